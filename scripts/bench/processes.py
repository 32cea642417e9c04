"""The processes of a server: found by descent, counted, halted and ended together.

A server may be many processes that start and end others; the use of all of them counts.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_ENDED_WITHIN_S = 10.0
_GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)


@dataclass(slots=True)
class _Seen:
    """The use of a member at the last look."""

    cpu_s: float = 0.0
    parent: int = 0


class ProcessTree:
    """One process and everything that descends from it.

    A descendant is remembered when it is first seen, and stays one of the tree when its parent dies.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        # psutil compares processes by pid and start time, so a number that is used again is another process.
        self._seen: dict[psutil.Process, _Seen] = {self._root: _Seen()}

    def members(self) -> list[psutil.Process]:
        """All living members."""
        for known in list(self._seen):
            with contextlib.suppress(*_GONE):
                for child in known.children(recursive=True):
                    self._seen.setdefault(child, _Seen())
        return [one for one in self._seen if _lives(one)]

    def cpu_seconds(self) -> float:
        """User and system time of all members so far.

        The time of an ended member is in its parent's account once the parent waited for it. A member whose parent had
        ended before counts with its time at the last call.
        """
        living = {one.pid for one in self.members()}
        for one, seen in self._seen.items():
            try:
                spent = one.cpu_times()
                seen.parent = one.ppid()
                seen.cpu_s = spent.user + spent.system + spent.children_user + spent.children_system
            except _GONE:
                if seen.parent in living:
                    seen.cpu_s = 0.0
        return sum(seen.cpu_s for seen in self._seen.values())

    def memory_bytes(self, *, without: Path) -> int:
        """Proportional memory (PSS) of all members, without their maps of files under the folder ``without``.

        Those pages are the page cache's, which every system fills with its store, whether it maps or reads it.
        """
        return sum(_memory_bytes(one.pid, str(without.resolve()) + "/") for one in self.members())

    def send_signal(self, number: signal.Signals) -> None:
        """Send the root a signal."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._root.send_signal(number)

    def kill(self) -> None:
        """SIGKILL all members at one moment: they are halted first, so that none sees the end of another."""
        # A member may start another one until it is halted itself: halt until nobody new appears.
        halted: set[psutil.Process] = set()
        while new := set(self.members()) - halted:
            for one in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.suspend()
            halted |= new
        for one in halted:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def wait(self, timeout_s: float) -> bool:
        """True when nothing of the tree lives any more within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.members():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def children() -> set[psutil.Process]:
    """All descendants of this process whose parents live."""
    return set(psutil.Process().children(recursive=True))


def end_children(*, without: set[psutil.Process]) -> None:
    """SIGKILL all descendants of this process but those in ``without``.

    For an interrupted run: Ctrl-C may come when a process exists and its starter does not know it yet.
    """
    for one in psutil.Process().children():
        if one not in without:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = ProcessTree(one.pid)
                tree.kill()
                tree.wait(_ENDED_WITHIN_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except _GONE:
        return False


def _memory_bytes(pid: int, left_out: str) -> int:
    """PSS of one process, 0 when it is gone; mappings of files whose path begins with ``left_out`` do not count."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    total, counts = 0, True
    for line in lines:
        if header := _HEADER.match(line):
            counts = not header[1].startswith(left_out)
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total
