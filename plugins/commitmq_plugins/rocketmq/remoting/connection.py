"""One connection of a server: requests of the peer, their answers, and requests to the peer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from commitmq.plugin import failpoints
from commitmq_plugins.rocketmq.remoting.asked import Asked
from commitmq_plugins.rocketmq.remoting.channel import Buffer, Channel
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import PeerGoneError
from commitmq_plugins.rocketmq.remoting.frame import FrameParser, encode_head
from commitmq_plugins.rocketmq.remoting.owner import Owner
from commitmq_plugins.rocketmq.remoting.tls import FIRST_BYTE, Tls, TlsUnavailableError

Body = Sequence[Buffer]


class Connection:
    """One peer. ``peer`` is its address: IP (an IPv4 address that is mapped into IPv6 counts as IPv4) and port."""

    __slots__ = (
        "__weakref__", "_asked", "_channel", "_due_s", "_frame_began_s", "_is_behind", "_is_closing",
        "_is_flush_due", "_is_open", "_is_reading", "_is_writing", "_loop", "_oneways", "_parser",
        "_pending_bytes", "_sent_s", "_server", "_sizes", "_unanswered", "heard",
        "is_closed", "memo", "peer", "request_bytes", "user",
    )  # fmt: skip

    def __init__(self, server: Owner, sock: socket.socket, peer: tuple[str, int]) -> None:
        """``sock`` does not block. :meth:`start` begins to read."""
        self._server, self._channel, self.peer = server, Channel(sock), peer
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser(server.limits.max_frame_bytes)
        self._pending_bytes = 0
        self._asked = Asked()
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
        """End the connection after what is already handed over."""
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


Handler = Callable[[Connection, Command], Command | Awaitable[Command | None] | None]
"""Answers a request: with a command, at once or later. None when it sends its answer itself, for a one-way request too."""
