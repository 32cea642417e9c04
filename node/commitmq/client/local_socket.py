"""The client's end of the short way to a writer on the same host (see commitmq.workers.local_sockets).

One request and its answer at a time; the owner serialises its use. "Not taken" means *not sent*, "taken, no answer" means
*unknown*, as with a :class:`~commitmq.client.connection.Channel`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from commitmq.client.connection import WAIT_SLICE_MS, ConnectionLost
from commitmq.errors import NodeUnavailableError

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
        """Connect to the writer's socket. Raises OSError when nobody listens there, or it takes no more connections."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Time-outs in the kernel: Python's own cost one more system call each.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
            self._socket.connect(path)
            # Without it a request to a node that closes the connection at once would be of unknown fate.
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

    def request(self, packet: Sequence[bytes], deadline: float, *, taken: bool = False) -> bytes:
        """The answer to one request, made of ``packet``. ``deadline`` is in ``time.monotonic()`` seconds.

        ``taken``: it was handed over before, only the answer is missing. Raises NodeUnavailableError when it was not sent,
        ConnectionLost when it was and no answer came. After either the connection is of no more use.
        """
        while not taken:
            try:
                self.send(packet)
                taken = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise NodeUnavailableError(f"{self.path} takes no requests") from None
            except OSError as error:
                raise NodeUnavailableError(f"the connection to {self.path} ended: {error}") from None
        while True:
            try:
                answer = self.receive(MAX_PACKET_BYTES)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ConnectionLost(f"no answer from {self.path} in time") from None
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection to {self.path} ended before its answer: {error}") from None
            if not answer:
                raise ConnectionLost(f"the connection to {self.path} ended before its answer")
            return answer

    def close(self) -> None:
        self._socket.close()


def connect_local(path: object, endpoint: str) -> LocalSocket | None:
    """The short way beside a connection to ``endpoint``; None where the node has none or it cannot be used from here."""
    if type(path) is not str or not path or not endpoint.startswith("ipc://") or not os.access(path, os.W_OK):
        return None
    try:
        return LocalSocket(path)
    except OSError:
        return None
