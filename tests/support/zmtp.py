"""A peer that speaks ZMTP 3.0 over a plain socket: what no ZeroMQ library would send can be sent.

https://rfc.zeromq.org/spec/23: greeting, the command READY with a socket type and perhaps an identity, then frames.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4


def frame(content: bytes, flags: int = 0) -> bytes:
    """One frame as it is sent."""
    if len(content) < 256:
        return bytes((flags, len(content))) + content
    return struct.pack(">BQ", flags | LONG, len(content)) + content


def ready(identity: bytes | None = None) -> bytes:
    """The handshake's command of a DEALER that chose ``identity``."""
    parts = [b"\x05READY", *_property(b"Socket-Type", b"DEALER")]
    if identity is not None:
        parts += _property(b"Identity", identity)
    return frame(b"".join(parts), COMMAND)


def _property(name: bytes, value: bytes) -> list[bytes]:
    return [bytes((len(name),)), name, struct.pack(">I", len(value)), value]


class RawPeer:
    """A connection after its handshake; ``endpoint`` is tcp or ipc."""

    def __init__(
        self, endpoint: str, identity: bytes | None = None, *, timeout_s: float = 10.0, receive_bytes: int = 0
    ) -> None:
        """``receive_bytes``: size of the kernel's receive buffer, for peers that do not read."""
        is_ipc = endpoint.startswith("ipc://")
        self.socket = socket.socket(socket.AF_UNIX if is_ipc else socket.AF_INET)
        try:
            self.socket.settimeout(timeout_s)
            if receive_bytes:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            url = urlsplit(endpoint)
            self.socket.connect(endpoint.removeprefix("ipc://") if is_ipc else (url.hostname, url.port))
            self.socket.sendall(GREETING + ready(identity))
            # libzmq takes what comes before its own READY is out for a violation of the protocol.
            self._receive(len(GREETING))
            self._receive(self._receive(2)[1])
        except BaseException:
            self.socket.close()
            raise

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (more := self.socket.recv(size - len(data)))
            if not more:
                raise ConnectionError("the node ended the connection during the handshake")
        return data

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        """A whole request."""
        last = len(frames) - 1
        self.socket.sendall(b"".join(frame(one, MORE if number < last else 0) for number, one in enumerate(frames)))

    def is_ended(self) -> bool:
        """Whether the node has ended the connection; what it sent before is read and thrown away."""
        self.socket.setblocking(False)
        try:
            while True:
                if not self.socket.recv(1 << 16):
                    return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    def flood(self, data: bytes, at_most_bytes: int) -> int:
        """Send ``data`` again and again until the node ends the connection; returns the bytes that went out."""
        sent = 0
        with contextlib.suppress(OSError):
            while sent < at_most_bytes:
                self.socket.sendall(data)
                sent += len(data)
        return sent
