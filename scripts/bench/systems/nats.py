"""NATS JetStream with streams in files; the server is built from its Go module.

By default the server writes a message to its file before it acknowledges it and syncs files every two minutes, which is
the durability ``memory``; with ``sync_interval: always`` it syncs before it acknowledges.
"""

from __future__ import annotations

import socket
from pathlib import Path

from bench.system import HOST, Command, Durability, Server, free_port
from bench.systems import golang

_DRIVER = "./natsdriver"
_SERVER = "github.com/nats-io/nats-server/v2"
_CLIENT = "github.com/nats-io/nats.go"


class Nats:
    """The system NATS."""

    name = "NATS"
    works = frozenset({"send", "pipeline", "batch", "read", "end_to_end", "mixed", "ready"})

    @property
    def version(self) -> str:
        """The versions of server and client."""
        return f"{golang.required(_SERVER)}, client nats.go {golang.required(_CLIENT)}"

    def missing(self) -> str | None:
        """Go, which server and client are built with."""
        return golang.missing()

    def install(self) -> None:
        """Build the server and the driver."""
        golang.build(_SERVER)
        golang.build(_DRIVER)

    def settings(self, durability: Durability) -> dict[str, str]:
        """As in the section ``jetstream`` of the server's configuration."""
        return {"sync_interval": "always"} if durability == "flushed" else {}

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        """A new server in ``folder``."""
        return _NatsServer(folder, self.settings(durability)).launch()


class _NatsServer(Server):
    # After a kill the server first reads the files of its streams.
    ready_within_s = 300.0

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        super().__init__(folder)
        self._port = free_port()
        lines = [f"  {name}: {value}" for name, value in {"store_dir": f'"{folder}/store"', **settings}.items()]
        self._config = folder / "nats.conf"
        text = "\n".join([f'listen: "{self.address}"', "jetstream {", *lines, "}", ""])
        self._config.write_text(text, encoding="utf-8")

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def commands(self) -> list[Command]:
        return [Command("nats", [golang.program(_SERVER), "--config", self._config])]

    def is_ready(self) -> bool:
        # The server listens when its streams are recovered, and greets every client.
        with socket.create_connection((HOST, self._port), timeout=1.0) as connection:
            return connection.recv(64).startswith(b"INFO ")

    def driver(self) -> list[str]:
        return [str(golang.program(_DRIVER))]
