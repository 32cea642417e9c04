"""Kafka: a broker that is its own controller (KRaft), and its Java client."""

from __future__ import annotations

import json
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path

from bench.system import HOST, BenchError, Command, Durability, Server, accepts, free_port
from bench.systems import jvm

# The recommendation of Kafka's documentation, with a heap for this kind of machine instead of 6 GB.
_BROKER_FLAGS = {
    "-Xms": "2g",
    "-Xmx": "2g",
    "-XX:MetaspaceSize=": "96m",
    "-XX:+UseG1GC": "",
    "-XX:MaxGCPauseMillis=": "20",
    "-XX:InitiatingHeapOccupancyPercent=": "35",
    "-XX:G1HeapRegionSize=": "16M",
    "-XX:MinMetaspaceFreeRatio=": "50",
    "-XX:MaxMetaspaceFreeRatio=": "80",
    "-XX:+ExplicitGCInvokesConcurrent": "",
}

_BROKER = {
    # There is one broker.
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Batches of 1000 messages of 4 KiB.
    "message.max.bytes": str(16 << 20),
}

# After a restart of the server, the client looks for it as often as the other systems' clients do.
_RECONNECT = {"reconnect.backoff.ms": "20", "reconnect.backoff.max.ms": "20"}
# Messages that come while a request is under way go in the next one: with the default of 16 KiB these are 15 messages
# of 1 KiB.
_PROMPT = {"linger.ms": "0", "batch.size": str(256 << 10)}
_BULK = {"linger.ms": "5", "batch.size": str(1 << 20), "buffer.memory": str(128 << 20)}
_CLIENTS = {
    "producer": {
        # With one broker the leader's acknowledgement is the strongest.
        "acks": "1",
        "max.request.size": str(16 << 20),
        **_RECONNECT,
    },
    "producer, single": _PROMPT,
    "producer, rate": _PROMPT,
    "producer, pipeline": _BULK,
    # The driver lowers this batch.size to the size of one batch of its job, or to the share of buffer.memory for each
    # queue.
    "producer, batch": {**_BULK, "messages outstanding": "50000"},
    "consumer": {
        "max.poll.records": "10000",
        "max.partition.fetch.bytes": str(8 << 20),
        "fetch.max.bytes": str(64 << 20),
        "enable.auto.commit": "false",
        **_RECONNECT,
    },
    "admin": _RECONNECT,
}


class Kafka:
    """Apache Kafka."""

    name = "Kafka"
    works = frozenset({"send", "pipeline", "batch", "read", "end_to_end", "mixed", "ready"})

    @property
    def version(self) -> str:
        """The versions of broker and client."""
        return jvm.version("kafka")

    def missing(self) -> str | None:
        """The reason why it cannot run here."""
        return jvm.missing()

    def install(self) -> None:
        """Build the Java project."""
        jvm.install()

    def settings(self, durability: Durability) -> dict[str, str]:
        """All settings with other values than the defaults."""
        flags = " ".join(name + value for name, value in _BROKER_FLAGS.items())
        found = {"broker JVM": flags, **{f"broker: {key}": value for key, value in _broker(durability).items()}}
        found["clients: warm-up"] = jvm.WARM_UP
        found["client JVM"] = " ".join(name + value for name, value in jvm.DRIVER_FLAGS.items())
        for section, values in _CLIENTS.items():
            found |= {f"{section}: {key}": value for key, value in values.items()}
        return found

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        """One process that is broker and controller; ``hints`` are not used."""
        return KafkaServer(folder, durability).launch()


def _broker(durability: Durability) -> dict[str, str]:
    # Without it Kafka leaves all flushing to the operating system.
    flush = {"log.flush.interval.messages": "1"} if durability == "flushed" else {}
    return {**flush, **_BROKER}


class KafkaServer(Server):
    """The settings that Kafka's other clients have too."""

    ready_within_s = 120.0

    def __init__(self, folder: Path, durability: Durability) -> None:
        super().__init__(folder)
        self._data = folder / "data"
        self._conf = folder / "server.properties"
        self._port = free_port()
        controller_port = free_port()
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{controller_port}",
            "listeners": f"PLAINTEXT://{HOST}:{self._port},CONTROLLER://{HOST}:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{self._port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self._data),
            **_broker(durability),
        }
        self._conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
        self._format()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def commands(self) -> list[Command]:
        flags = {**_BROKER_FLAGS, "-Dlog4j2.level=": "INFO"}
        return [Command("kafka", [*jvm.java("kafka", "kafka.Kafka", flags), str(self._conf)])]

    def is_ready(self) -> bool:
        return accepts(self._port)

    def driver(self) -> list[str]:
        return [*jvm.java("kafka", "commitmq.bench.kafka.KafkaDriver", jvm.DRIVER_FLAGS), json.dumps(_CLIENTS)]

    def store_files(self) -> Iterator[Path]:
        return (path for path in self._data.rglob("*") if path.is_file())

    def _format(self) -> None:
        """Give the data folder its identity, as every new broker needs."""
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        command = jvm.java("kafka", "kafka.tools.StorageTool", {"-Xmx": "256m"})
        # In one word, because one in 64 identities begins with a dash.
        command += ["format", f"--cluster-id={cluster}", "--config", str(self._conf)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise BenchError(f"Kafka's storage could not be formatted: {(done.stdout + done.stderr)[-2000:]}")
