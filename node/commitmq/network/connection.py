"""One connection that libzmq has accepted, as the kernel and the process see it.

The bytes that libzmq has taken off a connection are counted by the kernel: for TCP in ``TCP_INFO``, for a Unix socket by
``SO_PEEK_OFF``, which every byte read moves back by one (socket(7)). Such an offset is set anew once a gigabyte and not at
each look: the kernel reads and writes it in two steps, so a reader between them writes back what it was before it was set
(seen with Linux 6.18), and all that had been counted would be counted once more. What the process has handled of them is
counted where it receives. The difference is what lies in libzmq: requests that wait, and those that are not whole yet.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Final

# linux/socket.h, and where tcpi_bytes_received stands in struct tcp_info (since Linux 4.1).
_SO_PEEK_OFF: Final = 42
_BYTES_RECEIVED_AT: Final = 128
_TCP_INFO_BYTES: Final = _BYTES_RECEIVED_AT + 8
_PEEK_BASE: Final = (1 << 31) - 1
_PEEK_SPAN: Final = 1 << 30
# What a peer may send besides requests: greeting and handshake once, and heartbeats.
_HANDSHAKE_BYTES: Final = 1_024
_BYTES_A_SECOND: Final = 64


class Connection:
    """What is known of one. ``handled`` and ``identity`` are the receiving thread's, the rest is the gate's.

    In bytes: ``received`` in all, ``grown`` since the look before, ``pending`` of it not handled, and ``unfinished`` of that
    known to be of a request that is not whole. ``ended``: the gate has shut it down. ``closed``: libzmq has closed it, and
    what came over it may still wait to be handled.

    It has a descriptor of its own, or what came just before libzmq closed the other one would be seen by nobody.
    """

    __slots__ = (
        "_is_unix",
        "_left",
        "_left_before_renewal",
        "_received_before",
        "_socket",
        "accepted_s",
        "client",
        "closed",
        "descriptor",
        "ended",
        "grown",
        "handled",
        "identity",
        "pending",
        "received",
        "unfinished",
    )

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.client = ""  # who is behind it: an address, or on this host a process
        self.accepted_s = time.monotonic()
        self.identity: bytes | None = None
        self.handled = 0
        self.received = 0
        self.grown = 0
        self.pending = 0
        self.unfinished = 0
        self.ended = False
        self.closed = False
        self._received_before = 0
        self._is_unix = False
        # SO_PEEK_OFF at the last look, and at the look that set it anew.
        self._left = self._left_before_renewal = _PEEK_BASE
        self._socket: socket.socket | None = None

    def open(self) -> int:
        """Look at the descriptor, which libzmq has just accepted; returns this object's own. Raises OSError: it is closed
        again, or there is no descriptor left.
        """
        found = socket.socket(fileno=os.dup(self.descriptor))
        try:
            self._is_unix = found.family == socket.AF_UNIX
            if self._is_unix:
                process, _, _ = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                self.client = f"process {process}"
                found.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, _PEEK_BASE)
            else:
                self.client = str(found.getpeername()[0])
        except BaseException:
            found.close()
            raise
        self._socket = found
        return found.fileno()

    @property
    def own(self) -> int | None:
        """Its own descriptor, None once it is closed."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def is_local(self) -> bool:
        """Whether it came over the node's own Unix socket, which only its account reaches."""
        return self._is_unix

    def close(self) -> None:
        """libzmq has closed its descriptor, or is about to. The peer hears of it when both are closed."""
        self.closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self.look()
            self._socket.close()
            self._socket = None

    def look(self) -> None:
        """Count what has come since the last look. Raises OSError when the kernel does not say."""
        assert self._socket is not None
        if self._is_unix:
            left = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
            self.grown = self._left - left
            if self.grown >= _PEEK_SPAN:
                # So much does not come between two looks: a reader has undone the renewal.
                self.grown = max(0, self._left_before_renewal - left)
            self.received += self.grown
            self._left = left
            if left < _PEEK_BASE - _PEEK_SPAN:
                self._renew(left)
        else:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            received: int = struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)[0]
            self.grown, self.received = received - self.received, received

    def _renew(self, left: int) -> None:
        """Set SO_PEEK_OFF anew, before it reaches 0. What is read between two of these calls is not counted: microseconds."""
        assert self._socket is not None
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, _PEEK_BASE)
        if self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF) > left:
            self._left, self._left_before_renewal = _PEEK_BASE, left

    def judge(self, now_s: float, *, all_taken: bool) -> None:
        """Work out what is held of it; to be called at each look, whether anything has come or not.

        ``all_taken``: since the last call the receiving thread found nothing left, so that what had come before it and is
        not handled belongs to a request that is not whole.
        """
        handled = self.handled
        over = handled + _HANDSHAKE_BYTES + int(_BYTES_A_SECOND * (now_s - self.accepted_s))
        self.pending = max(0, self.received - over)
        self.unfinished = max(0, self._received_before - over) if all_taken else 0
        self._received_before = self.received

    @property
    def is_held(self) -> bool:
        """Whether something of it waits. libzmq drops what is not whole when a connection has ended."""
        if self.closed:
            return self.pending > self.unfinished
        return self.pending > 0 and not self.ended

    def end(self) -> None:
        """Shut it down; libzmq then drops what is not whole, and the descriptor. Never another one of the same number: what
        was not opened stays as it is.
        """
        self.ended = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Shut it down over libzmq's descriptor, when :meth:`open` got none; only while the gate hears of its arrival."""
        self.ended = True
        with contextlib.suppress(OSError):
            theirs = socket.socket(fileno=self.descriptor)
            try:
                theirs.shutdown(socket.SHUT_RDWR)
            finally:
                theirs.detach()
