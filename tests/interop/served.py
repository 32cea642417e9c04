"""A real node with the broker server of RocketMQ's protocol, and RocketMQ's own clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from broker import ClientTool, RefusedError

from commitmq import Reader
from nodes import Node, eventually, free_ports, start_node

OpenClients = Callable[..., ClientTool]


class Served:
    """A node with the broker server, and RocketMQ's clients of it."""

    def __init__(self, node: Node, clients: ClientTool) -> None:
        self.node, self.clients, self.ask = node, clients, clients.ask

    def bodies(self, topic: str) -> list[bytes]:
        """What a consumer finds in ``topic`` now."""
        with Reader(topic, node=self.node.address, start="earliest") as reader:
            found: list[bytes] = []
            while len(batch := reader.poll(timeout_s=0.3)):
                found += [message.body for message in batch]
            return sorted(found)

    def found(self, *words: object) -> list[bytes]:
        """The bodies of the messages that a client finds, none when it says so."""
        try:
            return sorted(bytes.fromhex(line["body_hex"]) for line in self.ask(*words))
        except RefusedError as error:
            assert "208" in str(error), error
            return []

    def send(self, topic: str, body: str) -> None:
        """Send until the server takes it: it starts, or has not registered with the name server yet."""

        def sent() -> bool:
            try:
                self.ask("send", topic, body)
            except RefusedError:
                return False
            return True

        eventually(sent, "the server takes a message", 60)

    def popped(self, group: str, topic: str, what: str) -> list[dict[str, Any]]:
        """The next messages of a plain pop."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found.extend(self.ask("pop", group, topic, 5_000, 32))
            return bool(found)

        eventually(look, what, 60)
        return found

    def pid_of(self, role: str) -> int:
        return next(int(row["pid"]) for row in self.node.report()["processes"] if row["role"] == role)


@contextlib.contextmanager
def serve(folder: Path, open_clients: OpenClients) -> Iterator[Served]:
    """The node's name server is RocketMQ's."""
    first = free_ports(4)
    clients = open_clients(folder, first, f"127.0.0.1:{first + 2}")
    settings = (
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.namesrv_port=0",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv=127.0.0.1:{first}",
        f"network.store_port={first + 2}",
        "transaction.timeout_ms=1000",
        "transaction.check_interval_ms=1000",
        "transaction.check_max=1000",
    )
    try:
        with start_node(folder, *settings) as node:
            served = Served(node, clients)
            served.send("Greetings", "hello")
            yield served
    finally:
        clients.kill()
