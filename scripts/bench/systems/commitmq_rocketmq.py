"""CommitMQ's server for RocketMQ's clients, with the very driver that loads RocketMQ's own broker."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.system import HOST, Durability, Server, accepts, free_port
from bench.systems import jvm, rocketmq
from bench.systems.commitmq import CommitMQ, CommitMQServer
from bench.workloads import REMOTING

_SETTINGS: Final = {
    "plugins.rocketmq.enable": "true",
    # The driver names the broker in its requests.
    "network.broker_name": rocketmq.BROKER_NAME,
}


class CommitMQForRocketMQ:
    """The node as in the rows of its own client; clients, their settings and their flags are RocketMQ's."""

    name = REMOTING
    works = frozenset(
        {"send", "pipeline", "batch", "read", "end_to_end", "mixed", "query", "ready", "push", "connections"}
        | {"delayed", "transactions", "share", "retry"}
    )

    @property
    def version(self) -> str:
        """The versions of the node and of the client."""
        return f"{CommitMQ().version}, clients {jvm.version('rocketmq')}"

    def missing(self) -> str | None:
        """The reason why the clients cannot run here."""
        return jvm.missing()

    def install(self) -> None:
        """Build the Java project."""
        jvm.install()

    def settings(self, durability: Durability) -> dict[str, str]:
        """Those of the node, and those of the clients."""
        return {**CommitMQ().node_settings(durability), **_SETTINGS, **rocketmq.client_settings()}

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        """A node with the name server and the broker server."""
        return _Server(folder, {**CommitMQ().node_settings(durability), **_SETTINGS, **hints}).launch()


class _Server(CommitMQServer):
    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._name_server_port, self._broker_port = free_port(), free_port()
        ports = {
            "plugins.rocketmq.namesrv_port": str(self._name_server_port),
            "plugins.rocketmq.vip_port": "false",
            "network.store_port": str(self._broker_port),
        }
        super().__init__(folder, {**settings, **ports})

    @property
    def address(self) -> str:
        """The address of the name server, which knows the broker's."""
        return f"{HOST}:{self._name_server_port}"

    @property
    def broker_port(self) -> int:
        return self._broker_port

    def is_ready(self) -> bool:
        return accepts(self._name_server_port) and accepts(self._broker_port) and super().is_ready()

    def driver(self) -> list[str]:
        return rocketmq.driver(self.folder)
