"""The node's processes: processor time, memory, descriptors, restarts, heartbeats.

Proportional memory is what ``status`` says: the kernel finds it by walking all pages of a process, so the supervisor measures
it for a small share of its time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psutil

from commitmq.control import WORKER_SLOTS, ControlBlock, WorkerWord


@dataclass(slots=True)
class ProcessFigures:
    """One process. A figure that cannot be read is None. Sizes in bytes."""

    role: str
    is_ready: bool
    restarts: int
    cpu_s: float | None = None
    resident: int | None = None
    proportional: int | None = None
    descriptors: int | None = None
    heartbeat_age_s: float | None = None


class Processes:
    """Measures them."""

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        self._known: dict[int, psutil.Process] = {}
        self._before: dict[tuple[str, int], float] = {}
        self._ended: dict[str, float] = {}

    def measure(self, rows: list[dict[str, Any]]) -> list[ProcessFigures]:
        """The processes of ``rows``, as ``status`` lists them."""
        now_s = time.monotonic()
        pids = {int(row["pid"]) for row in rows if row["pid"]}
        self._known = {pid: one for pid, one in self._known.items() if pid in pids}
        beats = self._heartbeats(now_s)
        found = []
        for row in rows:
            figures = ProcessFigures(str(row["role"]), row["state"] == "ready", int(row["restarts"] or 0))
            pid = int(row["pid"] or 0)
            if pid:
                self._look(pid, figures)
                figures.proportional = row.get("memory_bytes")
                figures.heartbeat_age_s = beats.get(pid)
            figures.cpu_s = self._cpu_of_role(figures.role, pid, figures.cpu_s)
            found.append(figures)
        return found

    def has_lost_one(self) -> bool:
        """Whether a process that was measured has ended since: ``status`` knows its successor."""
        return any(not process.is_running() for process in self._known.values())

    def _look(self, pid: int, figures: ProcessFigures) -> None:
        try:
            process = self._known.get(pid)
            if process is None:
                process = self._known[pid] = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                figures.cpu_s = times.user + times.system
                figures.resident = process.memory_info().rss
            figures.descriptors = process.num_fds()
        except (psutil.Error, OSError):
            figures.is_ready = False

    def _cpu_of_role(self, role: str, pid: int, seconds: float | None) -> float | None:
        """The time of this process and of those that had the role before: a counter does not fall."""
        if seconds is None:
            return None
        for key in [key for key in self._before if key[0] == role and key[1] != pid]:
            self._ended[role] = self._ended.get(role, 0.0) + self._before.pop(key)
        self._before[role, pid] = seconds
        return self._ended.get(role, 0.0) + seconds

    def _heartbeats(self, now_s: float) -> dict[int, float]:
        control = self._control
        slots = ((control.worker(slot, WorkerWord.PID), slot) for slot in range(WORKER_SLOTS))
        return {
            pid: max(0.0, now_s - control.worker(slot, WorkerWord.HEARTBEAT_MS) / 1000) for pid, slot in slots if pid
        }
