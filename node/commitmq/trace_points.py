"""Times of a send at the places on its way, in each process: for ``commitmq bench trace-points``; in a normal run unused.

``COMMITMQ_TRACE_POINTS=FOLDER`` in a node's environment makes its writer and flush process wrap a few of their own methods
when they start (:func:`watch`). Each wrapper writes a number and the time (CLOCK_MONOTONIC, which all processes of a
host share) into a file of that folder. Without the variable no wrapper is created: the path of a message is not one
instruction longer.

A file has 16 bytes per event, trace point and time in nanoseconds, and zeros behind the last one; when it is full, no more
events are written.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

VARIABLE = "COMMITMQ_TRACE_POINTS"
_MAX_EVENTS = 1 << 18


class TracePoint(IntEnum):
    """A place on the way of a send; in the client, the writer (W) and the flush process (F)."""

    CALLED = 1  # the program called send
    ENCODED = 2  # the client begins to hand the request to its socket
    HANDED_OVER = 3  # the socket has the whole request
    ANSWERED = 4  # the client has the answer
    RETURNED = 5  # send returned
    W_AWAKE = 10  # the writer returned from waiting
    W_RECEIVED = 11  # it has all frames of a request
    W_APPEND = 12  # the request is checked and the record encoded
    W_APPENDED = 13
    W_DONE = 14  # published, and the answer is built
    W_ANSWER = 15  # the answer is handed to the socket
    W_ANSWERED = 16
    F_SYNC = 20  # the flush process begins a flush, or the writer one of its own
    F_SYNCED = 21


class Recorder:
    """Writes events of this process to a file of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises OSError."""
        fd = os.open(folder / f"{name}.{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _MAX_EVENTS * 16)
            self._cells = memoryview(mmap.mmap(fd, _MAX_EVENTS * 16)).cast("q")
        finally:
            os.close(fd)
        self._at = 0

    def note(self, point: int) -> None:
        """Record that a send is at ``point`` now."""
        at = self._at
        if at < 2 * _MAX_EVENTS:
            self._cells[at + 1] = time.monotonic_ns()
            self._cells[at] = point
            self._at = at + 2

    def around(self, owner: Any, method: str, before: TracePoint | None, after: TracePoint | None) -> None:
        """Wrap ``owner``'s ``method``: it notes ``before`` when it is called and ``after`` when it has returned."""
        call: Callable[..., Any] = getattr(owner, method)
        note, first, last = self.note, int(before or 0), int(after or 0)

        def noted(*arguments: Any, **more: Any) -> Any:
            if first:
                note(first)
            try:
                return call(*arguments, **more)
            finally:
                if last:
                    note(last)

        setattr(owner, method, noted)


def watch(name: str, *places: tuple[Any, str, TracePoint | None, TracePoint | None]) -> None:
    """Note ``(owner, method, before, after)`` of this process, if the environment asks for it; else do nothing."""
    folder = os.environ.get(VARIABLE)
    if folder:
        recorder = Recorder(Path(folder), name)
        for place in places:
            recorder.around(*place)


def read(folder: Path) -> list[tuple[int, int]]:
    """All events of all processes, ``(nanoseconds, trace point)``, in the order of time."""
    return sorted(event for path in folder.iterdir() for event in _events(path.read_bytes()))


def _events(data: bytes) -> Iterator[tuple[int, int]]:
    cells = memoryview(data).cast("q")
    for at in range(0, len(cells), 2):
        if not cells[at]:
            return
        yield cells[at + 1], cells[at]
