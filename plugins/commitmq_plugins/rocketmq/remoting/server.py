"""A TCP server of the protocol: connections, their limits, requests in both directions (spec remoting 2.1).

A handler gets each request. It returns the answer, or an awaitable of it; None says that it calls :meth:`Connection.send`
itself later. Requests of a connection run side by side, and answers go out in any order. What one connection can take is
bounded:

    * A frame has ``max_frame_bytes``; all incomplete frames of the server ``max_pending_bytes``, then the largest one's
      connection ends.
    * Nothing is read from a peer that does not read; beyond ``max_unsent_bytes`` its connection ends.
    * More than ``max_requests`` without an answer: the next ones get SYSTEM_BUSY.
    * ``max_connections``; a connection without a byte in ``idle_timeout_s`` ends.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from commitmq.log import Log
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import PeerGoneError, PeerSilentError
from commitmq_plugins.rocketmq.remoting.frame import FrameParser, encode_head

_JOINED_BYTES: Final = 256 * 1024
_HIGH_WATER_BYTES: Final = 1024 * 1024
_SCAN_S: Final = 5.0
_BACKLOG: Final = 1_024

Body = Sequence["bytes | bytearray | memoryview"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """See the module. Bytes, and seconds."""

    max_connections: int = 2_000
    max_frame_bytes: int = 16 << 20
    max_pending_bytes: int = 256 << 20
    max_unsent_bytes: int = 16 << 20
    max_requests: int = 8_192
    idle_timeout_s: float = 120.0


class Connection(asyncio.Protocol):
    """One peer. ``peer`` is its address: IP (an IPv4 address that is mapped into IPv6 counts as IPv4) and port."""

    def __init__(self, server: RemotingServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = FrameParser(server.limits.max_frame_bytes)
        self._opaque = 0
        self._asked: dict[int, asyncio.Future[Command]] = {}
        self._unanswered = 0
        self.peer: tuple[str, int] = ("", 0)
        self.heard = time.monotonic()
        self.is_closed = False

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        address = self._transport.get_extra_info("peername") or ("", 0)
        self.peer = str(address[0]).removeprefix("::ffff:"), int(address[1])
        made = self._transport.get_extra_info("socket")
        if made is not None:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        if not self._server.add(self):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._server.remove(self, self._parser.pending_bytes)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(PeerGoneError(f"the connection of {self.name} ended"))
        self._asked.clear()

    def pause_writing(self) -> None:
        if self._transport is not None and not self.is_closed:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self.is_closed:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        before = self._parser.pending_bytes
        for command in self._parser.feed(data):
            if command.is_response:
                self._answered(command)
            else:
                self._take(command)
        if self._parser.error is not None:
            self._server.log.warning("a peer is no client", peer=self.name, error=str(self._parser.error))
            self.close()
            return
        self._server.note_pending(self._parser.pending_bytes - before)

    @property
    def name(self) -> str:
        """The peer as ``ip:port``."""
        return f"{self.peer[0]}:{self.peer[1]}"

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return self._parser.pending_bytes

    # ------------------------------------------------------------ requests of the peer

    def _take(self, command: Command) -> None:
        if self._unanswered >= self._server.limits.max_requests:
            if not command.is_oneway:
                remark = f"[OVERLOAD]system busy, {self._unanswered} requests of this connection have no answer yet"
                self._write(command.answer(ResponseCode.SYSTEM_BUSY, remark), ())
            return
        found = self._server.handler(self, command)
        if found is None:
            if not command.is_oneway:
                self._unanswered += 1
        elif isinstance(found, Command):
            if not command.is_oneway:
                self._write(found, ())
        else:
            self._unanswered += 1
            self._server.spawn(self._finish(command, found))

    async def _finish(self, command: Command, found: Awaitable[Command | None]) -> None:
        answer = None
        try:
            answer = await found
        finally:
            if answer is not None or command.is_oneway:
                self._unanswered -= 1
        if answer is not None and not command.is_oneway:
            self._write(answer, ())

    def send(self, command: Command, body: Body = ()) -> None:
        """Send an answer that the handler did not return, or a one-way request. ``body`` replaces the command's.

        The answer to a one-way request must not be sent.
        """
        if command.is_response:
            self._unanswered -= 1
        else:
            self._opaque += 1
            command.opaque = self._opaque
        self._write(command, body)

    def _write(self, command: Command, body: Body) -> None:
        transport = self._transport
        if transport is None or self.is_closed or transport.is_closing():
            return
        pieces: Body = body or ((command.body,) if command.body else ())
        size = sum(len(piece) for piece in pieces)
        head = encode_head(command, size)
        if size <= _JOINED_BYTES:
            transport.write(b"".join((head, *pieces)))
        else:
            transport.write(head)
            for piece in pieces:
                transport.write(piece)
        if transport.get_write_buffer_size() > self._server.limits.max_unsent_bytes + size:
            self._server.log.warning("a peer does not read", peer=self.name)
            transport.abort()

    # ------------------------------------------------------------ requests to the peer

    async def request(self, command: Command, timeout_s: float) -> Command:
        """The peer's answer. Raises PeerGoneError, PeerSilentError."""
        self._opaque += 1
        command.opaque = self._opaque
        if self.is_closed:
            raise PeerGoneError(f"the connection of {self.name} ended")
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._asked[command.opaque] = future
        try:
            self._write(command, ())
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise PeerSilentError(f"{self.name} did not answer in {timeout_s:g} s") from error
        finally:
            self._asked.pop(command.opaque, None)

    def _answered(self, command: Command) -> None:
        future = self._asked.get(command.opaque)
        if future is not None and not future.done():
            command.body = bytes(command.body)
            future.set_result(command)

    def close(self) -> None:
        """End the connection after what is already handed over."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()


Handler = Callable[[Connection, Command], Command | Awaitable[Command | None] | None]
"""Answers a request: with a command, at once or later. None when it sends its answer itself."""


class RemotingServer:
    """See the module."""

    def __init__(
        self, handler: Handler, closed: Callable[[Connection], None], log: Log, limits: ServerLimits | None = None
    ) -> None:
        """``closed`` is called when a connection has ended."""
        self.handler, self._closed, self.log = handler, closed, log
        self.limits = limits or ServerLimits()
        self.connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Future[Any]] = set()
        self._pending_bytes = 0
        self._scanner: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int) -> int:
        """Serve at this address too. Returns the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), host, port, backlog=_BACKLOG)
        self._servers.append(server)
        if self._scanner is None:
            self._scanner = loop.call_later(_SCAN_S, self._scan)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections."""
        if self._scanner is not None:
            self._scanner.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0)

    def add(self, connection: Connection) -> bool:
        """Whether there is room for the connection."""
        if len(self.connections) >= self.limits.max_connections:
            self.log.warning(
                "a connection is refused", peer=connection.peer[0], max_connections=self.limits.max_connections
            )
            return False
        self.connections.add(connection)
        return True

    def remove(self, connection: Connection, pending_bytes: int) -> None:
        self._pending_bytes -= pending_bytes
        if connection in self.connections:
            self.connections.discard(connection)
            self._closed(connection)

    def spawn(self, awaitable: Awaitable[None]) -> None:
        """Run it, and keep it until it is done."""
        task = (
            asyncio.ensure_future(awaitable) if not inspect.iscoroutine(awaitable) else asyncio.create_task(awaitable)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note_pending(self, change: int) -> None:
        """Count bytes of incomplete frames; end the connection with the most when they are too many."""
        self._pending_bytes += change
        if change > 0 and self._pending_bytes > self.limits.max_pending_bytes:
            largest = max(self.connections, key=lambda one: one.pending_bytes)
            self.log.warning("a connection has too much under way", peer=largest.peer[0], bytes=largest.pending_bytes)
            largest.abort()

    def _scan(self) -> None:
        self._scanner = asyncio.get_running_loop().call_later(_SCAN_S, self._scan)
        before = time.monotonic() - self.limits.idle_timeout_s
        for connection in [one for one in self.connections if one.heard < before]:
            connection.close()
