"""The node behind the broker server: one line to each of its processes, and the words of their requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from commitmq.errors import ProtocolError, StoreError
from commitmq.plugin import Actor, NodeConfig, WorkerContext
from commitmq.protocol import wire
from commitmq_plugins.rocketmq.broker.auditing import PROTOCOL
from commitmq_plugins.rocketmq.broker.local_line import LocalLine
from commitmq_plugins.rocketmq.broker.node_line import Answer, LineLostError, NodeLine
from commitmq_plugins.rocketmq.remoting.turn import Turn

_TIMEOUT_S: Final = 5.0
_MOST_PROOFS: Final = 10_000
SERVICE_NOT_AVAILABLE: Final = "SERVICE_NOT_AVAILABLE"


class Node:
    """Lines are opened at first use. All methods are called in the loop."""

    def __init__(self, context: WorkerContext, loop: asyncio.AbstractEventLoop, turn: Turn) -> None:
        """``turn`` is that of the server: the answers of a moment go to its clients together."""
        self._context, self._loop, self._turn = context, loop, turn
        self.layout = context.layout
        self.control, self.quotas = context.control, context.quotas
        self._lines: dict[tuple[str, int], NodeLine] = {}
        self._local_lines: list[LocalLine] = []
        self._on_behalf: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.on_check: Callable[[dict[str, Any], list[bytes]], None] | None = None
        """Takes the checks of transactions that the transaction process sends."""

    @property
    def config(self) -> NodeConfig:
        """The node's settings, as they are now."""
        return self._context.config

    def on_behalf_of(self, op: str, user: str, address: str = "") -> dict[str, Any]:
        """What a request of the operation ``op`` carries that is made for a client of ``user``, whose quotas it counts for."""
        if not user:
            return {}
        key = op, user, address
        found = self._on_behalf.get(key)
        if found is None:
            if len(self._on_behalf) >= _MOST_PROOFS:
                self._on_behalf.clear()
            found = self._on_behalf[key] = self._context.vouching.fields(op, Actor(user, PROTOCOL, address))
        return found

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        for local in self._local_lines:
            local.close()
        self._local_lines.clear()

    def local_line(self) -> LocalLine:
        """A new line to the writer's local socket."""
        self._local_lines.append(LocalLine(self._loop, self.layout.local_socket, self._turn))
        return self._local_lines[-1]

    def line(self, role: str, lane: int = 0) -> NodeLine:
        """The line to ``role``, as ``reader-0`` or ``writer``. Each lane is a peer of its own, which limits count alone."""
        found = self._lines.get((role, lane))
        if found is None:
            on_message = self._checked if role == "transaction" else None
            endpoint = self.layout.ipc(role)
            found = NodeLine(self._loop, self._context.zmq, endpoint, self._turn, on_message=on_message)
            self._lines[role, lane] = found
        return found

    def _checked(self, header: dict[str, Any], frames: list[bytes]) -> None:
        if self.on_check is not None and header.get("op") == "transaction.check":
            self.on_check(header, frames)

    def reader_of(self, topic: str, queue: int) -> NodeLine:
        """The line to the reader that serves this queue for this server."""
        return self.line(f"reader-{(hash(topic) + queue) % self.config.reader.count}")

    async def ask(self, role: str, op: str, *, timeout_s: float = _TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """The header of the answer. Raises ProtocolError for a refusal, SERVICE_NOT_AVAILABLE without an answer."""
        return (await self.exchange(self.line(role), op, fields, timeout_s=timeout_s))[0]

    async def exchange(
        self,
        line: NodeLine,
        op: str,
        fields: dict[str, Any],
        payload: tuple[Any, ...] = (),
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> Answer:
        """One request and its answer. Raises as :meth:`ask`."""
        try:
            answer = await line.request(op, fields, payload, timeout_s=timeout_s)
        except LineLostError as error:
            raise ProtocolError(SERVICE_NOT_AVAILABLE, str(error)) from error
        if not answer[0]["ok"]:
            raise wire.refusal(answer[0])
        return answer

    async def mover(self, role: str, op: str, *, lane: int = 0, timeout_s: float = _TIMEOUT_S, **fields: Any) -> Answer:
        """A request to a mover that runs on demand, ``pop`` or ``transaction``. Raises as :meth:`ask`."""
        await self._call(role)
        return await self.exchange(self.line(role, lane), op, fields, timeout_s=timeout_s)

    async def _call(self, role: str) -> None:
        if not (self.layout.sockets / f"{role}.ipc").exists():
            await self.exchange(self.line(self._admin()), "mover.start", {"role": role})

    async def expect(self, role: str) -> None:
        """A mover is likely to be needed soon: on a busy machine its start takes seconds that clients do not wait."""
        with contextlib.suppress(ProtocolError):  # the first request calls again, and says what is wrong
            await self._call(role)

    def _admin(self) -> str:
        """The name of the supervisor's socket, which each life of the node has of its own. Raises ProtocolError."""
        try:
            endpoint = self._context.admin_ipc
        except (StoreError, KeyError, IndexError) as error:
            raise ProtocolError(SERVICE_NOT_AVAILABLE, f"the supervisor cannot be reached: {error}") from error
        return endpoint.rpartition("/")[2].removesuffix(".ipc")
