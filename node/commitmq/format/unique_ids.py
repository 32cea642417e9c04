"""Unique message ids (the ``UNIQ_KEY`` property), drawn singly or in blocks for a whole run.

The text form is that of RocketMQ's client (spec 2.10): upper-case hex of

    address 4 | process id 2 | generator 4 | milliseconds since the month began 4 | counter 2

The address and generator parts are random for each generator, because many containers share one address and one process
id, and a store treats the id as opaque text. A forked process needs a new generator; the clients ensure that by
refusing to work in a child.

An id repeats only when 65,536 of them are drawn within one millisecond; drawing one takes longer than 15 nanoseconds,
and a block is at most :data:`MAX_BLOCK` ids, whose encoding takes milliseconds.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from datetime import UTC, datetime

MAX_BLOCK = 16_384
ID_BYTES = 32


class UniqueIds:
    """A thread-safe source of ids."""

    __slots__ = ("_counter", "_lock", "_month_end_ms", "_month_start_ms", "_prefix", "_stamped")

    def __init__(self) -> None:
        address = secrets.token_bytes(4)
        generator = secrets.token_bytes(4)
        self._prefix = (address + (os.getpid() & 0xFFFF).to_bytes(2, "big") + generator).hex().upper()
        self._counter = secrets.randbelow(0x10000)
        self._lock = threading.Lock()
        self._month_start_ms = 0
        self._month_end_ms = 0
        self._stamped = (-1, "")  # a millisecond, and the first 28 characters of its ids

    def next(self) -> str:
        """One id: 32 characters."""
        return self.at(time.time_ns() // 1_000_000)

    def at(self, now_ms: int) -> str:
        """One id drawn at ``now_ms``, for a caller that has just read the clock (milliseconds since 1970)."""
        stamp_ms, start = self._stamped
        with self._lock:
            counter = self._counter
            self._counter = counter + 1
            if stamp_ms != now_ms:
                start = self._start(now_ms)
                self._stamped = (now_ms, start)
        return f"{start}{counter & 0xFFFF:04X}"

    def block(self, count: int) -> tuple[bytes, int]:
        """The common first 28 bytes of ``count`` ids (at most MAX_BLOCK), and the counter of the first id.

        Id ``i`` is ``first 28 bytes + b"%04X" % ((counter + i) & 0xFFFF)``.
        """
        if not 0 < count <= MAX_BLOCK:
            raise ValueError(f"a block has 1 to {MAX_BLOCK} ids, not {count}")
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            counter = self._counter
            self._counter = counter + count
            return self._start(now_ms).encode(), counter & 0xFFFF

    def _start(self, now_ms: int) -> str:
        if not self._month_start_ms <= now_ms < self._month_end_ms:
            self._turn_month(now_ms)
        return f"{self._prefix}{now_ms - self._month_start_ms & 0xFFFFFFFF:08X}"

    def _turn_month(self, now_ms: int) -> None:
        now = datetime.fromtimestamp(now_ms / 1000, UTC)
        start = datetime(now.year, now.month, 1, tzinfo=UTC)
        end = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        self._month_start_ms = int(start.timestamp() * 1000)
        self._month_end_ms = int(end.timestamp() * 1000)
