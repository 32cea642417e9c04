"""CPU and memory of one process.

Memory is the proportional set size (PSS) without the mapped files of the store. So pages that workers share count once
in the sum, and the page cache of the log, which the kernel may take back at any time, does not count at all.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A mapping's first line in smaps (address range, permissions, offset, device, inode, path), or its Pss line.
_SMAPS = re.compile(rb"^(?:[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *([^\n]*)|Pss: +([0-9]+) kB)$", re.MULTILINE)

# Limits of a gauge of memory: its share of the time for measuring, how much of that time it may save up, how many
# processes it knows.
_LOOKING_SHARE = 0.1
_MAX_SAVED_MS = 500.0
_MAX_PROCESSES = 128
_FORGOTTEN_MS = 60_000


def cpu_seconds(pid: int) -> float | None:
    """User plus system time of process ``pid`` since it started; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read(4096)
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_bytes(pid: int, store: Path) -> int | None:
    """PSS of ``pid`` without mappings of files under ``store``; None when it is gone or this account may not look at it."""
    try:
        smaps = Path(f"/proc/{pid}/smaps").read_bytes()
    except OSError:
        return None
    inside = os.fsencode(store) + b"/"
    total_kib = 0
    counts = True
    for path, pss in _SMAPS.findall(smaps):
        if pss:
            total_kib += int(pss) if counts else 0
        else:
            counts = not path.startswith(inside)
    return total_kib * 1024 or None  # (an ended process that was not waited for yet has no mappings)


@dataclass(slots=True)
class CpuMeter:
    """CPU use of one process over the last two samples, in percent of one core."""

    pid: int = 0
    seconds: float = 0.0
    at_ms: int = 0
    percent: float = 0.0

    def sample(self, pid: int, now_ms: int) -> None:
        """Measure ``pid`` again at monotonic time ``now_ms``; a new pid starts from zero."""
        seconds = cpu_seconds(pid) if pid else None
        if seconds is None:
            self.pid, self.percent = 0, 0.0
            return
        if pid == self.pid and now_ms > self.at_ms:
            self.percent = round((seconds - self.seconds) * 100_000 / (now_ms - self.at_ms), 1)
        elif pid != self.pid:
            self.percent = 0.0
        self.pid, self.seconds, self.at_ms = pid, seconds, now_ms


class MemoryGauge:
    """Memory of processes, measured on request, and for a small share of the time.

    The kernel walks every page of a process to answer, which takes milliseconds each. A client that asks without a
    pause must not keep the supervisor from its workers, so between two measurements the last answer stands.
    """

    def __init__(self, store: Path, age_ms: int) -> None:
        """``age_ms``: the age from which an answer is measured again."""
        self._store = store
        self._age_ms = age_ms
        self._known: dict[int, tuple[int | None, float]] = {}  # pid -> bytes, when
        self._saved_ms = _MAX_SAVED_MS  # time for measuring
        self._at_ms = _clock_ms()

    def of(self, pid: int) -> int | None:
        """See :func:`memory_bytes`. A process is measured in any case when it is asked for the first time."""
        now_ms = _clock_ms()
        self._saved_ms = min(_MAX_SAVED_MS, self._saved_ms + (now_ms - self._at_ms) * _LOOKING_SHARE)
        self._at_ms = now_ms
        known = self._known.get(pid)
        if known is None or (now_ms - known[1] >= self._age_ms and self._saved_ms > 0):
            measured = memory_bytes(pid, self._store)
            self._at_ms = _clock_ms()
            self._saved_ms -= self._at_ms - now_ms
            known = self._known[pid] = (measured, self._at_ms)
            if len(self._known) > _MAX_PROCESSES:
                self._known = {one: said for one, said in self._known.items() if self._at_ms - said[1] < _FORGOTTEN_MS}
        return known[0]


def _clock_ms() -> float:
    return time.monotonic_ns() / 1e6
