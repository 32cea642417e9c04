"""CommitMQ itself, started by its own command as its documentation says for a server: ``--profile server``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench.system import HOST, Command, Durability, Server, free_ports
from commitmq import Admin, CommitMQError
from commitmq.network.ports import PORTS
from commitmq.store.layout import StoreLayout
from commitmq.store.shared_memory import recorded_folder

_PYTHON: Final = (sys.executable,)
# Like RocketMQ's flushDiskType: an ack has the promise of the row, and with "async" consumers do not wait for the
# device either.
_SETTINGS: Final[dict[Durability, dict[str, str]]] = {
    "memory": {"profile": "server", "commit_log.flush_mode": "async"},
    "flushed": {"profile": "server"},
}


class CommitMQ:
    """The project's own node."""

    name = "CommitMQ"
    works = frozenset(
        {"send", "pipeline", "batch", "read", "end_to_end", "mixed", "query", "ready", "floor"}
        | {"delayed", "timers", "timers_ready", "transactions", "share", "retry"}
    )

    @property
    def version(self) -> str:
        return version("commitmq")

    def missing(self) -> str | None:
        return None

    def install(self) -> None:
        """Its kernels are compiled with the environment, so this does nothing."""

    def settings(self, durability: Durability) -> dict[str, str]:
        return {**self.node_settings(durability), "Producer(ack=…)": durability}

    def node_settings(self, durability: Durability) -> dict[str, str]:
        """Those of the node alone."""
        return _SETTINGS[durability]

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        return CommitMQServer(folder, {**self.node_settings(durability), **hints}).launch()


class CommitMQServer(Server):
    """A node in the foreground; all its processes descend from its keeper."""

    ready_within_s = 120.0
    start: Sequence[str] = ("start", "--verbose")

    def __init__(self, folder: Path, settings: dict[str, str], python: Sequence[str] = _PYTHON) -> None:
        """``python``: how the interpreter of the project is called."""
        super().__init__(folder)
        self._python = python
        self._store = folder / "store"
        self._settings = settings
        self._port = free_ports(PORTS)

    @property
    def node_address(self) -> str:
        """That of the node's own clients."""
        return f"tcp://{HOST}:{self._port}"

    @property
    def address(self) -> str:
        return self.node_address

    def commands(self) -> list[Command]:
        settings = {"network.port": str(self._port), **self._settings}
        pairs = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        paths = os.pathsep.join(path for path in sys.path if path)
        return [
            Command(
                "node",
                [*self._python, "-m", "commitmq.cli.main", *self.start, "--store", str(self._store), *pairs],
                {"PYTHONPATH": paths},
            )
        ]

    def is_ready(self) -> bool:
        try:
            with Admin(self.node_address, timeout_s=1.0) as admin:
                return bool(admin.status()["node"]["state"] == "ready")
        except CommitMQError:
            return False

    def driver(self) -> list[str]:
        return [*self._python, "-m", "bench.drivers.commitmq_driver"]

    def discard(self) -> None:
        super().discard()
        # A killed node leaves files in shared memory for its next start, which this store does not have.
        layout = StoreLayout(self._store)
        folder = recorded_folder(layout)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
