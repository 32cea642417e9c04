"""Redis streams: a stream is a queue, an entry a message. The server is the system's own package.

The append-only file is on in both kinds of durability, so that acknowledged messages outlive the process. It is never
rewritten, and there are no snapshots: both only cost time. One thread serves all commands, as Redis recommends for
fewer than four cores.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from bench.system import HOST, BenchError, Command, Durability, Server, free_port
from bench.systems import golang

_DRIVER = "./redisdriver"
_CLIENT = "github.com/redis/rueidis"
_PACKAGE_HINT = "no Redis: install redis-server with the system's package manager"


class Redis:
    """The system Redis."""

    name = "Redis"
    works = frozenset({"send", "pipeline", "batch", "read", "end_to_end", "mixed", "ready"})

    @property
    def version(self) -> str:
        """Of server and client."""
        try:
            done = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchError(f"redis-server --version: {error}") from error
        # Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=…
        found = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
        return f"{found.get('v', 'unknown')}, client rueidis {golang.required(_CLIENT)} (Go)"

    def missing(self) -> str | None:
        """The package, or Go, which the client is built with."""
        return golang.missing() if shutil.which("redis-server") else _PACKAGE_HINT

    def install(self) -> None:
        """Build the driver."""
        golang.build(_DRIVER)

    def settings(self, durability: Durability) -> dict[str, str]:
        """As on the server's command line."""
        return {
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if durability == "flushed" else "everysec",
            "auto-aof-rewrite-percentage": "0",
        }

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        """A new server in ``folder``."""
        return _RedisServer(folder, self.settings(durability)).launch()


class _RedisServer(Server):
    # It reads its whole append-only file before it serves anybody.
    ready_within_s = 300.0

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        super().__init__(folder)
        self._settings = settings
        self._port = free_port()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def commands(self) -> list[Command]:
        arguments = ["redis-server", "--bind", HOST, "--port", str(self._port), "--dir", str(self.folder)]
        for name, value in self._settings.items():
            arguments += [f"--{name}", value]
        return [Command("redis", arguments)]

    def is_ready(self) -> bool:
        with socket.create_connection((HOST, self._port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")  # -LOADING while it reads its file

    def driver(self) -> list[str]:
        return [str(golang.program(_DRIVER))]
