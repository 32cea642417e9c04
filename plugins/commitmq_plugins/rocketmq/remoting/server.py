"""A TCP server of the protocol: accepts connections, bounds what they take, and moves frames (remoting 2.1).

A handler gets each request. It returns the answer, or an awaitable of it; None says that it calls
:meth:`RemotingConnection.send` itself later. Requests of a connection run side by side, and answers go out in any order.
The server asks its peers over the same connections (:class:`ResponseTable`). The limits are those of :class:`ServerLimits`.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import ipaddress
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from commitmq.errors import ConfigError
from commitmq.files.fd_cache import affordable_files
from commitmq.log import Log
from commitmq.plugin import failpoints
from commitmq_plugins.rocketmq import RocketMQSettings
from commitmq_plugins.rocketmq.remoting import tls
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, FrameParser, PeerGoneError, PeerSilentError, encode_head
from commitmq_plugins.rocketmq.remoting.tls import FIRST_BYTE, Tls, TlsUnavailableError


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bytes, and seconds.

    * A frame has ``max_frame_bytes``; all incomplete frames of the server ``max_pending_bytes``, then the connection with
      the largest one ends. A frame must be complete ``frame_timeout_s`` after it began.
    * More than ``max_requests`` without an answer: the next ones get SYSTEM_BUSY. Nothing is read from a connection with as
      many one-way requests under way, or whose requests have ``max_request_bytes``, and while those of all connections
      have more than ``max_all_request_bytes``.
    * Nothing is read from a peer that has not read ``high_water_bytes`` of its answers. Its connection ends beyond
      ``max_unsent_bytes``, and when it reads nothing for ``send_timeout_s``.
    * ``max_connections``, and ``max_connections_per_address`` of them from one address; one without a byte
      from its peer in ``idle_timeout_s`` ends. A TLS handshake has ``handshake_timeout_s``.
    """

    max_connections: int = 2_000
    max_connections_per_address: int = 1_000_000
    max_frame_bytes: int = 16 << 20
    max_pending_bytes: int = 256 << 20
    max_unsent_bytes: int = 16 << 20
    max_requests: int = 8_192
    max_request_bytes: int = 64 << 20
    max_all_request_bytes: int = 512 << 20
    high_water_bytes: int = 1 << 20
    idle_timeout_s: float = 120.0
    frame_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    handshake_timeout_s: float = 15.0


def limits_of(settings: RocketMQSettings) -> ServerLimits:
    """The limits of a server's connections. There are no more of them than the process has descriptors for: with none left a
    client would wait in the kernel's queue, instead of being told at once.
    """
    most = affordable_files(settings.max_connections)
    return ServerLimits(
        max_connections=most,
        max_connections_per_address=settings.max_connections_per_address or most,
        max_frame_bytes=settings.max_frame_bytes,
        max_unsent_bytes=settings.max_unsent_bytes,
        idle_timeout_s=settings.idle_timeout_ms / 1_000,
    )


def tls_of(settings: RocketMQSettings, folder: Path, log: Log) -> tls.Tls | None:
    """The TLS of a server, whose own certificate would be in ``folder``. Raises ConfigError."""
    make = partial(tls.load_or_make, folder / tls.FILE, log)
    try:
        return tls.load(settings.tls_mode, settings.tls_certificate, settings.tls_key, make)
    except OSError as error:
        files = f"{settings.tls_certificate} and {settings.tls_key}"
        raise ConfigError(f"plugins.rocketmq.tls_certificate and tls_key: {files} cannot be used: {error}") from error


READ_BYTES: Final = 256 * 1024
_LEAST_READ_BYTES: Final = 16 * 1024
_MOST_BUFFERS: Final = 512
_COPIED_BYTES: Final = 2_048
_TLS_CHUNK_BYTES: Final = 16 * 1024
_AGAIN: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

Buffer = bytes | bytearray | memoryview


class ByteChannel:
    """The bytes of one connection: a socket that does not block, with TLS or without, and what waits to be sent.

    Buffers are sent from where they lie, many in one system call; only TLS copies them.

    All methods raise OSError when the connection is over.
    """

    __slots__ = ("_is_repeated", "_out", "_read_bytes", "sock", "unsent_bytes")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent_bytes = 0
        self._out: deque[Buffer] = deque()
        self._read_bytes = _LEAST_READ_BYTES
        self._is_repeated = False

    @property
    def is_tls(self) -> bool:
        return isinstance(self.sock, ssl.SSLSocket)

    def first_byte(self) -> int | None:
        """The first byte that the peer sent, without taking it; None before there is one."""
        try:
            data = self.sock.recv(1, socket.MSG_PEEK)
        except _AGAIN:
            return None
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        return data[0]

    def begin_tls(self, context: ssl.SSLContext) -> None:
        """From now on the bytes are those inside TLS. :meth:`shake_hands` comes next."""
        self.sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self) -> bool | None:
        """Whether the handshake is done; None if it waits until something can be written."""
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            return None
        return True

    def receive(self) -> bytes | None:
        """What the peer sent, at most READ_BYTES; None for nothing, empty at its end."""
        room = self._read_bytes
        try:
            data = self.sock.recv(room)
        except _AGAIN:
            return None
        # A small buffer is cheap to get, a large one takes a large frame in few reads.
        if len(data) == room:
            self._read_bytes = min(4 * room, READ_BYTES)
        elif room > _LEAST_READ_BYTES and 16 * len(data) < room:
            self._read_bytes = room // 4
        return data

    @property
    def has_more(self) -> bool:
        """Whether bytes were received already that the socket itself does not show any more."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def put(self, buffers: Iterable[Buffer]) -> None:
        """Let ``buffers`` be sent after those before them. They must not change until they are."""
        for buffer in buffers:
            if type(buffer) is bytes:
                if buffer:
                    self._out.append(buffer)
                    self.unsent_bytes += len(buffer)
                continue
            view = memoryview(buffer)
            if view.nbytes:
                self._out.append(view if view.format == "B" else view.cast("B"))
                self.unsent_bytes += view.nbytes

    def flush(self) -> int:
        """Send as much as the socket takes. The number of bytes that it took."""
        before = self.unsent_bytes
        while self._out:
            try:
                sent = self._send_tls() if self.is_tls else self._send()
            except _AGAIN:
                break
            self._forget(sent)
        return before - self.unsent_bytes

    def _send(self) -> int:
        out = self._out
        if len(out) == 1:
            return self.sock.send(out[0])
        few = list(out) if len(out) <= _MOST_BUFFERS else [out[at] for at in range(_MOST_BUFFERS)]
        if self.unsent_bytes <= _COPIED_BYTES * len(few):
            return self.sock.send(b"".join(few))  # to copy small ones costs less than to hand over each
        return self.sock.sendmsg(few)

    def _send_tls(self) -> int:
        """One record of TLS. A repeated send must have the same bytes."""
        out = self._out
        if not self._is_repeated and len(out) > 1 and len(out[0]) < _TLS_CHUNK_BYTES:
            pieces, size = [], 0
            while out and size < _TLS_CHUNK_BYTES:
                pieces.append(out.popleft())
                size += len(pieces[-1])
            out.appendleft(b"".join(pieces))
        self._is_repeated = True
        sent = self.sock.send(out[0])
        self._is_repeated = False
        return sent

    def _forget(self, sent: int) -> None:
        self.unsent_bytes -= sent
        out = self._out
        if not self.unsent_bytes:
            out.clear()
            return
        while sent:
            first = out[0]
            size = len(first)
            if size > sent:
                out[0] = memoryview(first)[sent:]
                return
            sent -= size
            out.popleft()

    def close(self) -> None:
        """What is unsent is lost."""
        self._out.clear()
        self.unsent_bytes = 0
        self.sock.close()


class Flushable(Protocol):
    """A connection with something to send."""

    def flush(self) -> None: ...


class FlushBatch:
    """What one event of the loop causes to be sent goes out together, at the end of the event.

    A reader of requests, or of the node's answers, calls :meth:`begin` before and :meth:`end` after them. What is sent at
    other times goes out with the next round of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Flushable] = []
        self._is_inside = self._is_scheduled = False

    def begin(self) -> None:
        """An event begins; :meth:`end` follows in any case."""
        self._is_inside = True

    def end(self) -> None:
        """Send everything that the event caused."""
        self._is_inside = False
        if self._due:
            self._flush()

    def add(self, sender: Flushable) -> None:
        """``sender`` has something to send. It is not added again before its flush."""
        self._due.append(sender)
        if not self._is_inside and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._later)

    def _later(self) -> None:
        self._is_scheduled = False
        self._flush()

    def _flush(self) -> None:
        due, self._due = self._due, []
        for sender in due:
            try:
                sender.flush()
            except Exception as error:  # an error of one connection is no error of the others
                self._loop.call_exception_handler({"message": "a connection was not flushed", "exception": error})


_MOST: Final = 1_024


class ResponseTable:
    """By their ``opaque``. An answer that nobody waits for is ignored."""

    __slots__ = ("_futures", "_opaque")

    def __init__(self) -> None:
        self._opaque = 0
        self._futures: dict[int, asyncio.Future[Command]] = {}

    def next_opaque(self) -> int:
        """A number for another request."""
        self._opaque = (self._opaque + 1) & 0x7FFF_FFFF
        return self._opaque

    async def ask(self, command: Command, put: Callable[[Command], None], timeout_s: float, name: str) -> Command:
        """The peer's answer to ``command``, which ``put`` sends. Raises PeerGoneError, PeerSilentError."""
        if len(self._futures) >= _MOST:
            raise PeerSilentError(f"{name} has {len(self._futures)} requests to answer already")
        opaque = command.opaque = self.next_opaque()
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._futures[opaque] = future
        try:
            put(command)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise PeerSilentError(f"{name} did not answer in {timeout_s:g} s") from error
        finally:
            self._futures.pop(opaque, None)

    def answered(self, command: Command) -> None:
        """The peer sent an answer."""
        future = self._futures.get(command.opaque)
        if future is not None and not future.done():
            command.body = bytes(command.body)
            future.set_result(command)

    def fail(self, name: str) -> None:
        """The connection ended."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(PeerGoneError(f"the connection of {name} ended"))
        self._futures.clear()


def place_of(host: str) -> str:
    """An IPv4 address as it is, an IPv6 address as its /64, of which one machine may have any address."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


Body = Sequence[Buffer]


class RemotingConnection:
    """One peer. ``peer`` is its address: IP (an IPv4 address that is mapped into IPv6 counts as IPv4) and port."""

    __slots__ = (
        "__weakref__", "_asked", "_channel", "_due_s", "_frame_began_s", "_is_behind", "_is_closing",
        "_is_flush_due", "_is_open", "_is_reading", "_is_writing", "_loop", "_oneways", "_parser",
        "_pending_bytes", "_sent_s", "_server", "_sizes", "_unanswered", "heard",
        "is_closed", "memo", "peer", "request_bytes", "user",
    )  # fmt: skip

    def __init__(self, server: RemotingServer, sock: socket.socket, peer: tuple[str, int]) -> None:
        """``sock`` does not block. :meth:`start` begins to read."""
        self._server, self._channel, self.peer = server, ByteChannel(sock), peer
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser(server.limits.max_frame_bytes)
        self._pending_bytes = 0
        self._asked = ResponseTable()
        self._unanswered = self._oneways = 0
        self.request_bytes = 0  # of requests without an answer
        self._sizes: dict[int, int] = {}
        self.heard = self._sent_s = time.monotonic()
        self._frame_began_s = 0.0
        self._due_s = 0.0
        self._is_open = server.tls is None
        self._is_reading = self._is_writing = self._is_closing = self._is_flush_due = self._is_behind = False
        self.is_closed, self.user = False, ""  # the user is whoever has signed the last request, as the handler found
        self.memo: dict[Any, Any] = {}
        """For the handler, which bounds it: what it found out about earlier requests."""

    def start(self) -> None:
        """Read from now on."""
        self._read(True)

    @property
    def name(self) -> str:
        """The peer as ``ip:port``."""
        return f"{self.peer[0]}:{self.peer[1]}"

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet, and of requests that wait for the next turn."""
        return self._pending_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the peer has not read yet, beyond what the operating system keeps."""
        return self._channel.unsent_bytes

    # ------------------------------------------------------------ readiness of the socket

    def _read(self, wanted: bool) -> None:
        if wanted != self._is_reading and not self.is_closed:
            self._is_reading = wanted
            if wanted:
                self._loop.add_reader(self._channel.sock, self._readable)
            else:
                self._loop.remove_reader(self._channel.sock)

    def _write_when_possible(self, wanted: bool) -> None:
        if wanted != self._is_writing and not self.is_closed:
            self._is_writing = wanted
            if wanted:
                self._loop.add_writer(self._channel.sock, self._writable)
            else:
                self._loop.remove_writer(self._channel.sock)

    def regulate(self) -> None:
        """Read only while the peer reads, and while requests without an answer are few enough."""
        limits = self._server.limits
        is_full = self._channel.unsent_bytes > limits.high_water_bytes or self._has_too_many
        self._read(not is_full and not self._is_closing and not self._is_behind)

    @property
    def _has_too_many(self) -> bool:
        size, limits = self.request_bytes, self._server.limits
        # Nobody could be told that a one-way request is too much.
        if size > limits.max_request_bytes or self._oneways >= limits.max_requests:
            return True
        return size > 0 and self._server.is_full

    def _readable(self) -> None:
        try:
            if not self._is_open and not self._opened():
                return
            data = self._channel.receive()
        except OSError as error:
            self._lost(str(error))
            return
        if data is None:
            return
        if not data:
            self._lost("the peer closed it")
            return
        self.heard = time.monotonic()
        self._parser.add(data)
        self._take_turn()

    def _readable_again(self) -> None:
        if self._is_reading and not self.is_closed:
            self._readable()

    def _writable(self) -> None:
        if self._is_open:
            self.flush()
        else:
            self._write_when_possible(False)
            self._readable()

    def _opened(self) -> bool:
        """Whether the connection can have frames: the first byte is known, and a TLS handshake is done."""
        channel, tls = self._channel, self._server.tls
        assert tls is not None
        if not channel.is_tls:
            first = channel.first_byte()
            if first is None:
                return False
            if first != FIRST_BYTE:
                if tls.is_required:
                    raise ConnectionAbortedError("it has no TLS, which this server requires")
                self._is_open = True
                return True
            self._due_s = time.monotonic() + self._server.limits.handshake_timeout_s
            if tls.context is None:
                self._read(False)
                self._server.spawn(self._prepare(tls))
                return False
            # The wrapped socket has the same descriptor, and the loop must not know it by the old object.
            self._read(False)
            channel.begin_tls(tls.context)
            self._read(True)
        done = channel.shake_hands()
        if done is None:
            self._write_when_possible(True)
        if done:
            self._is_open, self._due_s = True, 0.0
        return bool(done)

    async def _prepare(self, tls: Tls) -> None:
        """Go on when the server has its certificate."""
        try:
            await tls.prepare(self._server.log)
        except TlsUnavailableError as error:
            self._lost(str(error))
        else:
            self._read(True)

    # ------------------------------------------------------------ requests of the peer

    def _take_turn(self) -> None:
        """Take requests. What they cause goes out together."""
        turn = self._server.turn
        turn.begin()
        try:
            self._work()
        finally:
            turn.end()
        if self._is_writing:
            self.regulate()  # while the peer does not read, nothing is flushed
        self._look_again()

    def _work(self) -> None:
        """Take requests until none is left, or the time of this turn is over: other connections come first then."""
        parser, server = self._parser, self._server
        until = time.monotonic() + server.slice_s
        is_first, is_late = True, False
        while not is_late and (command := parser.next()) is not None:
            if command.is_response:
                self._asked.answered(command)
            else:
                self._take(command)
            if self.is_closed:
                return
            is_first, is_late = False, time.monotonic() >= until
        before, after = self._pending_bytes, parser.pending_bytes
        if not is_first or not before:
            self._frame_began_s = self.heard if after else 0.0
        if after != before:
            self._pending_bytes = after
            server.note_pending(after - before)
            if self.is_closed:
                return
        self._fall_behind(is_late and after > 0)
        if parser.error is not None:
            server.log.warning("a peer is no client", peer=self.name, error=str(parser.error))
            self.close()

    def _fall_behind(self, behind: bool) -> None:
        """Go on with the requests that are left in the loop's next turn, and read nothing more until then."""
        if behind != self._is_behind:
            self._is_behind = behind
            self._server.note_behind(1 if behind else -1)
            self.regulate()
        if behind:
            self._loop.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        if not self.is_closed and not self._is_closing:
            self._take_turn()

    def _look_again(self) -> None:
        """What TLS has decrypted already makes the socket readable no more."""
        if self._is_reading and self._channel.has_more:
            self._loop.call_soon(self._readable_again)

    def _take(self, command: Command) -> None:
        if self._unanswered >= self._server.limits.max_requests and not command.is_oneway:
            remark = f"[OVERLOAD]system busy, {self._unanswered} requests of this connection have no answer yet"
            self._put(command.answer(ResponseCode.SYSTEM_BUSY, remark))
            return
        try:
            found = self._server.handler(self, command)
        except Exception as error:
            found = self._failed(command, error)
        if isinstance(found, Command):
            if not command.is_oneway:
                self._put(found)
            return
        self._begin(command)
        if found is not None:
            self._server.spawn(self._finish(command, found))

    def _begin(self, command: Command) -> None:
        size = command.frame_bytes
        self._oneways += command.is_oneway
        self._unanswered += not command.is_oneway
        self.request_bytes += size
        self._sizes[command.opaque] = self._sizes.get(command.opaque, 0) + size
        self._server.note_requests(size)
        if self._has_too_many:
            self.regulate()

    def _end(self, opaque: int, *, is_oneway: bool) -> None:
        size = self._sizes.pop(opaque, 0)
        was_full = self._has_too_many
        self._oneways -= is_oneway
        self._unanswered -= not is_oneway
        self.request_bytes -= size
        self._server.note_requests(-size)
        if was_full:
            self.regulate()

    async def _finish(self, command: Command, found: Awaitable[Command | None]) -> None:
        try:
            answer = await found
        except Exception as error:
            answer = self._failed(command, error)
        if answer is not None:
            self.send(answer)

    def _failed(self, command: Command, error: Exception) -> Command:
        self._server.log.exception("a request failed", code=command.code, error=repr(error))
        return command.answer(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}, {error}")

    def send(self, command: Command, body: Body = ()) -> None:
        """Send an answer that the handler did not return, or a one-way request. ``body`` replaces the command's.

        The buffers of ``body`` are sent from where they are, and must not change. The answer to a one-way request ends the
        request, and nothing is sent.
        """
        if command.is_response:
            self._end(command.opaque, is_oneway=command.is_unwanted)
            if command.is_unwanted:
                return
        else:
            command.opaque = self._asked.next_opaque()
        self._put(command, body)

    def send_frame(self, opaque: int, frame: bytes) -> None:
        """Send the encoded answer to the request ``opaque``, which is not one-way."""
        self._end(opaque, is_oneway=False)
        self._put_pieces((frame,), is_answer=True)

    def _put(self, command: Command, body: Body = ()) -> None:
        pieces: Body = body or (command.body,)
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        head = encode_head(command, size)
        self._put_pieces((head, *pieces) if size else (head,), is_answer=command.is_response)

    def _put_pieces(self, pieces: Body, *, is_answer: bool) -> None:
        """Let a frame be sent. Those of one turn go out together."""
        if self.is_closed or self._is_closing:
            return
        channel = self._channel
        if not channel.unsent_bytes:
            self._sent_s = time.monotonic()
        elif channel.unsent_bytes > self._server.limits.max_unsent_bytes:
            self._server.log.warning("a peer does not read", peer=self.name, unsent_bytes=channel.unsent_bytes)
            self.abort()
            return
        if failpoints.ACTIVE and is_answer:
            failpoints.hit("remoting.answer:before")
        channel.put(pieces)
        if not self._is_flush_due and not self._is_writing:
            self._is_flush_due = True
            self._server.turn.add(self)

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it."""
        self._is_flush_due = False
        if self.is_closed or not self._is_open:
            return
        channel = self._channel
        if channel.unsent_bytes:
            try:
                sent = channel.flush()
            except OSError as error:
                self._lost(str(error))
                return
            if sent:
                self._sent_s = time.monotonic()
                if failpoints.ACTIVE:
                    failpoints.hit("remoting.answer:after")
            self._write_when_possible(channel.unsent_bytes > 0)
            self.regulate()
        if self._is_closing and not channel.unsent_bytes:
            self._lost("")

    # ------------------------------------------------------------ requests to the peer

    async def request(self, command: Command, timeout_s: float) -> Command:
        """The peer's answer. Raises PeerGoneError, PeerSilentError."""
        if self.is_closed or self._is_closing:
            raise PeerGoneError(f"the connection of {self.name} ended")
        return await self._asked.ask(command, self._put, timeout_s, self.name)

    # ------------------------------------------------------------ the end

    def overdue(self, now_s: float) -> str:
        """Why the connection has lived too long, empty if it has not."""
        limits = self._server.limits
        if self._due_s and now_s > self._due_s:
            return "its TLS handshake takes too long"
        if self._channel.unsent_bytes and now_s - self._sent_s > limits.send_timeout_s:
            return "the peer does not read"
        if self._frame_began_s and now_s - self._frame_began_s > limits.frame_timeout_s:
            return "a frame takes too long"
        if now_s - self.heard > limits.idle_timeout_s:
            return "the peer is silent"
        return ""

    def close(self) -> None:
        """End the connection after what is already passed on."""
        if not self.is_closed and not self._is_closing:
            self._is_closing = True
            self._read(False)
            if self._is_open:
                self._loop.call_soon(self.flush)
            else:
                self._lost("")

    def abort(self) -> None:
        """End the connection now."""
        self._lost("")

    def _lost(self, reason: str) -> None:
        if self.is_closed:
            return
        self._read(False)
        self._write_when_possible(False)
        self.is_closed = True
        if self._is_behind:
            self._is_behind = False
            self._server.note_behind(-1)
        if reason:
            self._server.log.debug("a connection ended", peer=self.name, reason=reason)
        self._channel.close()
        self._asked.fail(self.name)
        self._sizes.clear()
        self._server.note_requests(-self.request_bytes)
        self.request_bytes = 0
        self._server.remove(self, self._pending_bytes)


Handler = Callable[[RemotingConnection, Command], Command | Awaitable[Command | None] | None]
"""Answers a request: with a command, at once or later. None when it sends its answer itself, for a one-way request too."""


__all__ = ["Body", "Handler", "RemotingConnection", "RemotingServer", "ServerLimits"]

_SCAN_S: Final = 5.0
_BACKLOG: Final = 1_024
_ACCEPTED_AT_ONCE: Final = 64
_PAUSE_S: Final = 1.0
_DRAIN_S: Final = 1.0
_TURN_S: Final = 0.008
"""Of requests of connections that send more than one turn of the loop can take."""
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RemotingServer:
    """A TCP server of the remoting protocol."""

    def __init__(
        self,
        handler: Handler,
        closed: Callable[[RemotingConnection], None],
        log: Log,
        limits: ServerLimits | None = None,
        tls: Tls | None = None,
        turn: FlushBatch | None = None,
    ) -> None:
        """``closed`` is called when a connection has ended. With ``tls`` a peer's first byte decides whether it has it.
        ``turn`` is that of others who cause answers; by default the server has one of its own.
        """
        self.handler, self._closed, self.log, self.tls = handler, closed, log, tls
        self.turn = turn or FlushBatch(asyncio.get_running_loop())
        self.limits = limits or ServerLimits()
        self.connections: set[RemotingConnection] = set()
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
            connection = RemotingConnection(self, sock, (host, int(address[1])))
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

    def remove(self, connection: RemotingConnection, pending_bytes: int) -> None:
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
