"""The bytes of one connection: a socket that does not block, with TLS or without, and what waits to be sent.

Buffers are sent from where they lie, many in one system call; only TLS copies them.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Final

READ_BYTES: Final = 256 * 1024
_LEAST_READ_BYTES: Final = 16 * 1024
_MOST_BUFFERS: Final = 512
_COPIED_BYTES: Final = 2_048
_TLS_CHUNK_BYTES: Final = 16 * 1024
_AGAIN: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

Buffer = bytes | bytearray | memoryview


class Channel:
    """See the module. All methods raise OSError when the connection is over."""

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
