"""Coalescing delay: how long flush and reput wait to batch small writes, so that one turn handles many small sends.

Each turn costs every process behind the writer a wake-up, and on a small machine each wake-up takes the processor away
from the writer and its clients. A turn makes messages readable earlier, which matters only while a pull is parked. So
readers publish until when a pull waits (``WorkerWord.AWAITED_UNTIL_MS``). The pause between two turns is
``dispatch.coalesce_us`` until then and ``dispatch.unawaited_coalesce_us`` otherwise.

A long pause lets no backlog grow: it is no longer than the time in which ``LITTLE_BYTES`` arrive at the rate of the
last turn, and there is none when more than ``LITTLE_BYTES`` are waiting. It does not delay a pull that begins to wait
either: the reader rings, which ends the pause.
"""

from __future__ import annotations

import math
import time

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, WorkerWord, role_slot
from commitmq.workers.runtime.context import monotonic_ms

LITTLE_BYTES = 262_144
_AWAITED_UNTIL_MS = int(WorkerWord.AWAITED_UNTIL_MS)


class CoalescingDelay:
    """The coalescing delay of one worker's loop."""

    def __init__(self, control: ControlBlock, config: NodeConfig, *, least_s: float = 0.0) -> None:
        """``least_s``: the shortest pause."""
        self._control = control
        readers = [f"reader-{number}" for number in range(config.reader.count)]
        self._slots = [role_slot(role) for role in (*readers, "pop")]
        self._short_s = max(least_s, config.dispatch.coalesce_us / 1e6)
        self._long_s = max(self._short_s, config.dispatch.unawaited_coalesce_us / 1e6)
        self._last_s = -math.inf
        self._fills_s = self._long_s
        self._is_awaited = True

    def look(self) -> None:
        """Look whether a pull waits for messages; once per turn."""
        self._is_awaited = self._someone_waits()

    def _someone_waits(self) -> bool:
        now = monotonic_ms()
        return any(self._control.worker(slot, _AWAITED_UNTIL_MS) > now for slot in self._slots)

    def is_late(self) -> bool:
        """Whether a pull has begun to wait since :meth:`look`. Ask after ASLEEP was published."""
        return not self._is_awaited and self._someone_waits()

    def done(self, work_bytes: int) -> None:
        """Record the end of a turn that handled ``work_bytes``."""
        now = time.monotonic()
        self._fills_s = (now - self._last_s) * LITTLE_BYTES / max(1, work_bytes)
        self._last_s = now

    def since_s(self) -> float:
        """Seconds since the end of the last turn."""
        return time.monotonic() - self._last_s

    def left_s(self, waiting_bytes: int = 0) -> float:
        """The rest of the pause while ``waiting_bytes`` are pending; 0 or less when it is over."""
        pause_s = self._short_s
        if not self._is_awaited and waiting_bytes < LITTLE_BYTES:
            pause_s = max(pause_s, min(self._long_s, self._fills_s))
        return pause_s - self.since_s()
