"""A TCP server of the protocol: accepts connections and bounds what they take (remoting 2.1).

A handler gets each request. It returns the answer, or an awaitable of it; None says that it calls :meth:`Connection.send`
itself later. Requests of a connection run side by side, and answers go out in any order. The limits are those of
:class:`.limits.ServerLimits`.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from commitmq.log import Log
from commitmq_plugins.rocketmq.remoting.connection import Body, Connection, Handler, Owner, Turn, place_of
from commitmq_plugins.rocketmq.remoting.limits import ServerLimits
from commitmq_plugins.rocketmq.remoting.tls import Tls

__all__ = ["Body", "Connection", "Handler", "RemotingServer", "ServerLimits"]

_SCAN_S: Final = 5.0
_BACKLOG: Final = 1_024
_ACCEPTED_AT_ONCE: Final = 64
_PAUSE_S: Final = 1.0
_DRAIN_S: Final = 1.0
_TURN_S: Final = 0.008
"""Of requests of connections that send more than one turn of the loop can take."""
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RemotingServer(Owner):
    """See the module."""

    def __init__(
        self,
        handler: Handler,
        closed: Callable[[Connection], None],
        log: Log,
        limits: ServerLimits | None = None,
        tls: Tls | None = None,
        turn: Turn | None = None,
    ) -> None:
        """``closed`` is called when a connection has ended. With ``tls`` a peer's first byte decides whether it has it.
        ``turn`` is that of others who cause answers; by default the server has one of its own.
        """
        self.handler, self._closed, self.log, self.tls = handler, closed, log, tls
        self.turn = turn or Turn(asyncio.get_running_loop())
        self.limits = limits or ServerLimits()
        self.connections: set[Connection] = set()
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Future[Any]] = set()
        self._pending_bytes = 0
        self._behind = 0
        self._request_bytes = 0
        self._refused = 0
        self._places: Counter[str] = Counter()
        self._scanner: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int) -> int:
        """Serve at this address too. Returns the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        flags = socket.AI_PASSIVE
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
        bound = 0
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setblocking(False)
                sock.bind((address[0], port or bound, *address[2:]))
                sock.listen(_BACKLOG)
            except OSError:
                sock.close()
                raise
            bound = int(sock.getsockname()[1])
            self._listening.append(sock)
            loop.add_reader(sock, self._accept, sock)
        if self._scanner is None:
            self._scanner = loop.call_later(_SCAN_S, self._scan)
            if self.tls is not None:
                self.spawn(self.tls.prepare_early(self.log))
        return bound

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self.log.warning("no connection can be accepted for a moment", error=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(_PAUSE_S, self._accept_again, listening)
                return
            host = str(address[0]).removeprefix("::ffff:")
            is_full = len(self.connections) >= self.limits.max_connections
            if is_full or self._places[place_of(host)] >= self.limits.max_connections_per_address:
                self._refused += 1
                sock.close()
                continue
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
            except OSError:
                sock.close()  # the peer is gone already
                continue
            connection = Connection(self, sock, (host, int(address[1])))
            self.connections.add(connection)
            self._places[place_of(host)] += 1
            connection.start()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def close(self) -> None:
        """End all connections, after a moment for what is unsent."""
        if self._scanner is not None:
            self._scanner.cancel()
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock)
            sock.close()
        self._listening.clear()
        for connection in list(self.connections):
            connection.close()
        for task in list(self._tasks):
            task.cancel()
        deadline = time.monotonic() + _DRAIN_S
        await asyncio.sleep(0)
        while self.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()

    def remove(self, connection: Connection, pending_bytes: int) -> None:
        self._pending_bytes -= pending_bytes
        if connection in self.connections:
            self.connections.discard(connection)
            place = place_of(connection.peer[0])
            self._places[place] -= 1
            if not self._places[place]:
                del self._places[place]
            self._closed(connection)

    def spawn(self, awaitable: Awaitable[None]) -> None:
        """Run it, and keep it until it is done."""
        task: asyncio.Future[None] = (
            asyncio.create_task(awaitable) if inspect.iscoroutine(awaitable) else asyncio.ensure_future(awaitable)
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

    def note_requests(self, change: int) -> None:
        """Count bytes of requests without an answer. While they are too many, connections that have any are not read."""
        was_full = self.is_full
        self._request_bytes += change
        if was_full and not self.is_full:
            for connection in list(self.connections):
                connection.regulate()

    @property
    def is_full(self) -> bool:
        return self._request_bytes > self.limits.max_all_request_bytes

    def note_behind(self, change: int) -> None:
        """Count connections with more requests than one turn takes."""
        self._behind += change

    @property
    def slice_s(self) -> float:
        """How long a connection's requests may be taken in one turn of the loop: those with many share the time."""
        return _TURN_S / max(1, self._behind)

    def _scan(self) -> None:
        self._scanner = asyncio.get_running_loop().call_later(_SCAN_S, self._scan)
        if self._refused:
            self.log.warning(
                "connections were refused",
                count=self._refused,
                max_connections=self.limits.max_connections,
                max_connections_per_address=self.limits.max_connections_per_address,
            )
            self._refused = 0
        now_s = time.monotonic()
        for connection in list(self.connections):
            reason = connection.overdue(now_s)
            if reason:
                self.log.info("a connection ends", peer=connection.name, reason=reason)
                connection.abort()
