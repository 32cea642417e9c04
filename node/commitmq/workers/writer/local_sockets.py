"""Unix socket for single sends and short runs from clients on the same host: faster than the ZeroMQ socket beside it.

Why: a ZeroMQ round trip passes two I/O threads, so it needs four wake-ups; this socket needs two (measured on two
cores, 1 KiB: a bare echo takes 67 instead of 138 microseconds). Everything else goes over ZeroMQ: most runs are larger
than a packet, and ZeroMQ's I/O threads copy them while the writer works.

One packet (``SOCK_SEQPACKET``, at most :data:`~commitmq.protocol.channel.MAX_PACKET_BYTES`) is one request or one
answer; protocol/PROTOCOL.md defines the bytes. A client learns the socket's path from ``hello`` and may always use
ZeroMQ instead.

Failures and their effect:

* More connections than ``network.max_local_connections`` or the process's descriptors allow: further connections get no
  greeting, so their clients have sent nothing yet and stay with ZeroMQ.
* A client sends a packet that is too long or is no request: the writer answers with an error and closes the connection.
* A client does not read its answers: the writer closes the connection when the socket takes no more.
* A client ends: the writer drops its connection and the answers to it.
* The writer ends: the kernel closes all connections. The outcome of unanswered requests is unknown, as with ZeroMQ.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import zmq

from commitmq.files.fd_cache import affordable_files
from commitmq.log import Log
from commitmq.protocol import wire
from commitmq.protocol.channel import GREETING, HEADER_LENGTH, MAX_PACKET_BYTES

_BACKLOG = 128
_ACCEPTS_A_TURN = 64
_REST_S = 1.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Payload:
    """One part of a packet, with the methods of zmq.Frame that the writer uses."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    @property
    def bytes(self) -> bytes:
        return self.buffer.tobytes()

    def __len__(self) -> int:
        return len(self.buffer)

    def get(self, option: str) -> str:
        """Raises KeyError for every option, as a frame does: the peer of a Unix socket has no address."""
        raise KeyError(option)


Peer: TypeAlias = bytes | int  # a ZeroMQ identity, or the number of a local connection
Frames: TypeAlias = Sequence[zmq.Frame | Payload]  # the frames of a request: a header, and mostly a payload


class LocalSockets:
    """The listening socket and its connections. Each connection has a number that is never used again."""

    def __init__(
        self,
        path: Path,
        most: int,
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        log: Log,
        *,
        only_own: bool = False,
    ) -> None:
        """Listen at ``path``, replacing the socket of a dead predecessor (the role's lock must be held).

        ``watch`` and ``unwatch`` add and remove a descriptor to wait for. With ``most`` 0, or where the path is too
        long for a socket, nothing listens and ``path`` is None. ``only_own``: other accounts than the node's and root, whose
        rights are to be asked for, use ZeroMQ.
        """
        self.path: Path | None = None
        self._most = affordable_files(2 * most) // 2 if most else 0  # each client has a ZeroMQ connection too
        self._watch, self._unwatch = watch, unwatch
        self._log = log
        self._only_own = only_own
        self._next_number = 0
        self._listener: socket.socket | None = None
        self._rests_until = 0.0  # until then the listener is not watched: there were no free descriptors
        self._numbers: dict[int, int] = {}  # by descriptor
        self._connections: dict[int, socket.socket] = {}  # by number
        if not most:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(path))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            log.warning("no local socket: clients of this host use ZeroMQ", path=str(path), error=str(error))
            return
        self.path = path
        self._listener = listener
        watch(listener.fileno())

    def __len__(self) -> int:
        return len(self._connections)

    def requests(self, readable: Collection[object]) -> list[tuple[int, list[Payload]]]:
        """``(connection, [header, payload])`` for each descriptor among ``readable`` that has a request."""
        listener = self._listener
        if listener is not None:
            if self._rests_until and time.monotonic() >= self._rests_until:
                self._rests_until = 0.0
                self._watch(listener.fileno())
            if listener.fileno() in readable:
                self._accept(listener)
        requests = []
        for fd in readable:
            number = self._numbers.get(fd)  # type: ignore[call-overload]
            if number is None:
                continue
            request = self._receive(number)
            if request is not None:
                requests.append((number, request))
        return requests

    def last(self) -> list[tuple[int, list[Payload]]]:
        """Stop listening and watching; return the requests that have arrived. Answers can still be sent."""
        self._stop_listening()
        requests = self.requests(list(self._numbers))
        for fd in self._numbers:
            self._unwatch(fd)
        self._numbers.clear()
        return requests

    def _receive(self, number: int) -> list[Payload] | None:
        try:
            packet = self._connections[number].recv(MAX_PACKET_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        if not packet:
            self._close(number)
            return None
        header_end = HEADER_LENGTH + int.from_bytes(packet[:HEADER_LENGTH], "big")
        if len(packet) > MAX_PACKET_BYTES or header_end > len(packet):
            sentence = (
                f"a packet has at most {MAX_PACKET_BYTES} bytes: larger ones go over ZeroMQ"
                if len(packet) > MAX_PACKET_BYTES
                else f"the packet of {len(packet)} bytes ends inside its header"
            )
            self.answer(number, wire.error(None, "BAD_HEADER", sentence, outcome="not_stored"))
            self._close(number)
            return None
        view = memoryview(packet)
        return [Payload(view[HEADER_LENGTH:header_end]), Payload(view[header_end:])]

    def answer(self, number: int, answer: bytes) -> None:
        """Send an answer. It is lost when the connection is gone or takes no more."""
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            connection.send(answer)
        except OSError:
            self._close(number)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    # The kernel would report it again at once, without end.
                    self._log.warning("no room for a local connection", error=str(error))
                    self._unwatch(listener.fileno())
                    self._rests_until = time.monotonic() + _REST_S
                return
            if len(self._connections) >= self._most or (self._only_own and not _is_own(connection)):
                connection.close()
                continue
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # the client has disconnected already
                connection.send(GREETING)
            self._next_number += 1
            number = self._next_number
            self._connections[number] = connection
            self._numbers[connection.fileno()] = number
            self._watch(connection.fileno())

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number)
        fd = connection.fileno()
        if self._numbers.pop(fd, None) is not None:
            self._unwatch(fd)
        connection.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            if not self._rests_until:
                self._unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        self._stop_listening()
        for number in list(self._connections):
            self._close(number)


def _is_own(connection: socket.socket) -> bool:
    """Whether the peer is of the node's own account, or root's."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (0, os.geteuid())
