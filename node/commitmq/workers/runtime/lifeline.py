"""A worker's end of its lifeline, before its loop begins and after it has ended."""

from __future__ import annotations

import contextlib
import socket

from commitmq.protocol import wire


def has_ended(lifeline: socket.socket) -> bool:
    """True if the supervisor died before this worker had its lock.

    A new supervisor waits for the locks that it finds, and may have looked before this one was taken. If the old
    supervisor is alive now, with the lock held, then every later one will see the lock.
    """
    try:
        return lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def last_words(lifeline: socket.socket, error: str) -> None:
    """Tell the supervisor why this worker ends, if it still listens."""
    with contextlib.suppress(OSError):
        lifeline.send(wire.dumps({"event": "error", "error": error[:4096]}))
