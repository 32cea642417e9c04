"""The client's end of the writer's Unix socket on the same host (see commitmq.workers.writer.local_sockets).

One request and its answer at a time; the owner serialises its use. "Not taken" means *not sent*, "taken, no answer"
means *unknown*, as with a :class:`~commitmq.protocol.channel.Channel`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from typing import Any, Final

from commitmq.errors import NodeUnavailableError
from commitmq.protocol.channel import WAIT_SLICE_MS, ConnectionLost

MAX_PACKET_BYTES: Final = 65_536
HEADER_LENGTH: Final = 4  # bytes, big-endian, before the header
GREETING: Final = b'{"v":1,"id":null,"ok":true}'
_GREETING_S: Final = 0.5
_HEADER_ROOM: Final = 4_096
_SLICE: Final = struct.pack("@ll", 0, WAIT_SLICE_MS * 1000)


class LocalSocket:
    """A connection to the local socket of one writer."""

    #: Larger headers and bodies do not fit into a packet.
    MAX_HEADER_BYTES: Final = _HEADER_ROOM - HEADER_LENGTH
    MAX_BODY_BYTES: Final = MAX_PACKET_BYTES - _HEADER_ROOM

    __slots__ = ("_socket", "path", "receive", "send")

    def __init__(self, path: str) -> None:
        """Connect to the writer's socket. Raises OSError when no writer listens there, or it takes no more connections."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Time-outs in the kernel: Python's own cost one more system call each.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
            self._socket.connect(path)
            # Wait for the greeting: without it the fate of a request to a node that closes the connection at once would
            # be unknown.
            self._greeted(time.monotonic() + _GREETING_S)
        except BaseException:
            self._socket.close()
            raise
        self.send, self.receive = self._socket.sendmsg, self._socket.recv

    def _greeted(self, deadline: float) -> None:
        while True:
            try:
                if self._socket.recv(MAX_PACKET_BYTES) != GREETING:
                    raise ConnectionRefusedError(f"{self.path} takes no more connections")
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise

    def request(self, header: bytes, body: bytes, deadline: float) -> bytes:
        """The answer to one request. ``deadline`` is in ``time.monotonic()`` seconds.

        Raises NodeUnavailableError when it was not sent, ConnectionLost when it was sent and no answer came. After
        either, and after an interruption, the connection is unusable.
        """
        packet = (len(header).to_bytes(HEADER_LENGTH, "big"), header, body)
        taken = False
        while True:
            try:
                if not taken:
                    self.send(packet)
                    taken = True
                answer = self.receive(MAX_PACKET_BYTES)
            except OSError as error:
                if error.errno is None:
                    raise  # not the socket's: a signal handler of the program raised it (TimeoutError is one)
                if error.errno == errno.EAGAIN:
                    if time.monotonic() < deadline:
                        continue
                    sentence = f"no answer from {self.path} in time" if taken else f"{self.path} takes no requests"
                else:
                    sentence = f"the connection to {self.path} ended: {error}"
                raise (ConnectionLost if taken else NodeUnavailableError)(sentence) from None
            if not answer:
                raise ConnectionLost(f"the connection to {self.path} ended before its answer")
            return answer

    def close(self) -> None:
        self._socket.close()


def local_path(hello: dict[str, Any], endpoint: str) -> str:
    """The local socket of the writer that answered ``hello`` at ``endpoint``; empty when it cannot be used from here."""
    path = hello.get("local_socket")
    usable = type(path) is str and endpoint.startswith("ipc://") and os.access(path, os.W_OK)
    return str(path) if usable else ""
