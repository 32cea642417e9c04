"""Tells the coordinator who is connected here, for `commitmq client list` and the dashboard (``client.heard``).

A client is told of when its groups change and after its heartbeats, at most once a second, and many of them with one request.
So the cost grows with the clients, and not with what they send. While the coordinator is away nothing is kept but who is due.
A new coordinator is told of all, and of this process even without clients: it must not take its members for native ones.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import orjson

from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq.semantics.client_limits import FORGET_MS, MAX_CLIENTS_A_REQUEST, shortened
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, Node
from commitmq_plugins.rocketmq.broker.registry import Registry
from commitmq_plugins.rocketmq.broker.server_counts import version_name
from commitmq_plugins.rocketmq.remoting.server import Connection

GATEWAY: Final = "rocketmq"
_LONGEST_ID: Final = 255
_MOST_GONE: Final = 5_000
_ENOUGH_BYTES: Final = 32_768
"""Of clients in one request. Longer requests wait at the coordinator for shorter ones."""


class ClientNews:
    """See the module. ``instance`` names this process. All methods are called in the loop."""

    def __init__(self, node: Node, registry: Registry[Connection], instance: str, log: Log) -> None:
        self._node, self._registry, self._instance, self._log = node, registry, instance, log
        self._due: dict[Connection, None] = {}
        self._gone: dict[str, None] = {}
        self._line = 0
        self._is_new = True
        self._task: asyncio.Task[None] | None = None

    def changed(self, connection: Connection) -> None:
        """A heartbeat came, or the client left a group."""
        self._due[connection] = None

    def closed(self, connection: Connection) -> None:
        """The connection ended."""
        self._due.pop(connection, None)
        if len(self._gone) < _MOST_GONE:  # the coordinator forgets the others a while later
            self._gone[connection.name] = None

    def turn(self) -> None:
        """Tell what is due. It is called once a second."""
        if self._task is not None and not self._task.done():
            return
        connections = self._node.line("coordinator").connections
        if connections != self._line:
            self._line = connections
            self._is_new = True
            self._due |= dict.fromkeys(self._registry.links())
        if self._is_new or self._due or self._gone:
            self._task = asyncio.create_task(self._tell())

    async def close(self) -> None:
        """Tell nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tell(self) -> None:
        while self._is_new or self._due or self._gone:
            told: list[Connection] = []
            rows: list[dict[str, Any]] = []
            gone, self._gone = list(self._gone), {}
            size_bytes = 0
            while self._due and len(told) < MAX_CLIENTS_A_REQUEST and size_bytes < _ENOUGH_BYTES:
                connection = next(iter(self._due))
                del self._due[connection]
                told.append(connection)
                if (row := self._row(connection)) is None:
                    gone.append(connection.name)
                else:
                    rows.append(row)
                    size_bytes += len(orjson.dumps(row))
            try:
                await self._node.ask(
                    "coordinator", "client.heard", gateway=GATEWAY, instance=self._instance, clients=rows, gone=gone
                )
                self._is_new = False
            except ProtocolError as error:
                self._log.debug("the coordinator was not told who is connected", error=str(error))
                if error.code != SERVICE_NOT_AVAILABLE:
                    self._is_new = False
                    continue
                self._due |= dict.fromkeys(one for one in told if not one.is_closed)
                return  # the coordinator forgets by itself who is gone

    def _row(self, connection: Connection) -> dict[str, Any] | None:
        """A client as ``client.heard`` has it; None for a connection without a group."""
        consumes, produces, member = self._registry.groups_of(connection)
        if member is None:
            return None
        texts = {
            "id": member.client_id[:_LONGEST_ID],
            "connection": connection.name,
            "user": connection.user[:_LONGEST_ID],
            "language": member.language.name.lower(),
            "version": version_name(member.version)[1:].replace("_", ".", 2),
        }
        names = [one.name for one in consumes], produces, {topic for one in consumes for topic in one.subscriptions}
        (groups, producers, topics), left_out = shortened(sum(map(len, texts.values())), *names)
        return {
            **texts,
            "consumes": groups,
            "produces": producers,
            "topics": topics,
            "left_out": left_out,
            "heard_ms_ago": min(max(0, time.monotonic_ns() // 1_000_000 - member.heard_ms), FORGET_MS),
        }
