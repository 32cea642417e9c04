"""Wake-ups between processes of one node: one Unix datagram socket per role; an empty datagram is a ring.

Coordination and data between processes use ZeroMQ. Only the wake-ups on the path of a message (writer -> flush ->
writer, flush -> reput) use this socket, because they add to the latency of every send: a ring and its wake-up cost
about 15 microseconds each way against 50 for a ZeroMQ PAIR over ipc (a round trip measured at 31 against 100 on two
cores).

A ring carries no data and may be lost (the peer is dead, restarting, or its queue is full): positions are in the
control block, and every loop polls it at a bounded interval. So a lost ring costs latency, never correctness. An awake
peer is not rung at all: a peer publishes ``ASLEEP`` before it looks at the positions a last time and waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from commitmq.control import ControlBlock, WorkerWord

SLEEPING = 1
NAPPING = 2


class Doorbell:
    """The receiving end; one per worker. Its file descriptor can be polled."""

    def __init__(self, path: Path) -> None:
        """Bind ``path``, replacing the socket of a dead predecessor. The role's lock must be held."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(os.fspath(path))

    def fileno(self) -> int:
        return self._socket.fileno()

    def clear(self) -> None:
        """Take all rings that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)

    def close(self) -> None:
        self._socket.close()


class Ringer:
    """The sending end for one peer role."""

    def __init__(self, path: Path, control: ControlBlock, peer_slot: int) -> None:
        self._path = os.fspath(path)
        self._control = control
        self._slot = peer_slot
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._connected = False

    def ring(self, *, urgent: bool = True) -> None:
        """Wake the peer if it sleeps. Never blocks, never fails. Without ``urgent`` a peer that only naps is not woken
        (it looks again within milliseconds, see workers.runtime.coalescing). alone.
        """
        asleep = self._control.worker(self._slot, WorkerWord.ASLEEP)
        if not asleep or (asleep == NAPPING and not urgent):
            return
        for _ in range(2):
            try:
                if not self._connected:
                    self._socket.connect(self._path)
                    self._connected = True
                self._socket.send(b"")
            except BlockingIOError:
                pass  # its queue of rings is full: it will wake anyway
            except OSError:
                # Either the peer has bound again, then the second try reaches it; or it died, and its successor looks
                # by itself.
                self._connected = False
                continue
            return

    def close(self) -> None:
        self._socket.close()
