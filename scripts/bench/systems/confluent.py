"""Kafka's broker with confluent-kafka, the client that Python programs use: librdkafka, which is C, below Python objects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.system import CACHE, BenchError, Durability, Server
from bench.systems import jvm
from bench.systems.kafka import Kafka, KafkaServer

_FOLDER = CACHE / "confluent"
_PYTHON = _FOLDER / "bin" / "python"
_CLIENT_VERSION = "2.16.1"
_REQUIREMENT = f"confluent-kafka=={_CLIENT_VERSION}"
_INSTALLED_WITHIN_S = 600

# The settings of Kafka's Java client, as far as both clients have them.
CLIENTS: dict[str, dict[str, str | bool]] = {
    "all": {"socket.nagle.disable": "true", "reconnect.backoff.ms": "20", "reconnect.backoff.max.ms": "20"},
    "producer": {"acks": "1", "message.max.bytes": str(16 << 20), "queue.buffering.max.kbytes": str(128 << 10)},
    # Without the limit, which is Java's own, every message would be a request of its own, with any number under way.
    "producer, single": {"linger.ms": "0", "max.in.flight.requests.per.connection": "5"},
    "producer, pipeline": {"linger.ms": "5"},
    "producer, batch": {
        "linger.ms": "5",
        "batch.size": str(4 << 20),
        "batch.num.messages": "10000",
        # Only failures are reported: a Python call for each message would be most of the work.
        "delivery.report.only.error": True,
    },
    "consumer": {
        "group.id": "bench",
        "enable.auto.commit": "false",
        "max.partition.fetch.bytes": str(8 << 20),
        "fetch.max.bytes": str(64 << 20),
        "queued.min.messages": "1000000",
        # After it filled its queue the client waits for a second by default.
        "fetch.queue.backoff.ms": "5",
    },
}


class Confluent:
    """Kafka with its client for Python."""

    name = "Kafka (Python)"
    works = Kafka.works

    def __init__(self) -> None:
        self._kafka = Kafka()

    @property
    def version(self) -> str:
        """The versions of broker and client."""
        return f"{self._kafka.version}, client confluent-kafka {_CLIENT_VERSION}"

    def missing(self) -> str | None:
        """The needs of the broker; the client is installed with pip."""
        return jvm.missing()

    def install(self) -> None:
        """Build the broker, and make a Python environment with the client."""
        self._kafka.install()
        stamp = _FOLDER / "installed"
        wanted = f"{_REQUIREMENT} Python {sys.version.split()[0]}"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return
        _run([sys.executable, "-I", "-m", "venv", "--clear", str(_FOLDER)])
        pip = [str(_PYTHON), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--only-binary", ":all:", _REQUIREMENT])
        stamp.write_text(wanted, encoding="utf-8")

    def settings(self, durability: Durability) -> dict[str, str]:
        """The broker's settings as for Kafka, and the clients' settings."""
        found = {name: value for name, value in self._kafka.settings(durability).items() if name.startswith("broker")}
        for section, values in CLIENTS.items():
            found |= {f"{section}: {key}": str(value).lower() for key, value in values.items()}
        return found

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        """A broker like Kafka's."""
        return _ConfluentServer(folder, durability).launch()


class _ConfluentServer(KafkaServer):
    def driver(self) -> list[str]:
        return [str(_PYTHON), "-m", "bench.drivers.confluent_driver", json.dumps(CLIENTS)]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_INSTALLED_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr[-2000:].decode('utf-8', 'replace').strip()}")
