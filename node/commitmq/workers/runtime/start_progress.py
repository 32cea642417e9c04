"""Reports a worker's progress before it is ready.

The supervisor gets the reports and shows them in ``status`` and to the program that waits for the start; the log gets
them when the start takes long.
"""

from __future__ import annotations

from commitmq.supervision.progress import progress_sentence
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

_TELL_MS = 200
_LOG_MS = 2_000


class StartProgress:
    """Called again and again with the progress. A report also shows that this worker lives."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._phase = ""
        self._next_tell_ms = 0
        self._next_log_ms = monotonic_ms() + _LOG_MS

    def __call__(self, phase: str, done: int, total: int, unit: str = "bytes") -> None:
        """``done`` of ``total`` in ``unit`` (``bytes`` of the log, ``queues``); a total of 0 is unknown."""
        now = monotonic_ms()
        if phase == self._phase and now < self._next_tell_ms:
            return
        self._phase, self._next_tell_ms = phase, now + _TELL_MS
        self._context.heartbeat()
        progress = {"phase": phase, "done": done, "total": total, "unit": unit}
        self._context.tell(progress=progress)
        if now >= self._next_log_ms:
            self._next_log_ms = now + _LOG_MS
            self._context.log.info(f"starting: {progress_sentence(progress)}", done=done, total=total, unit=unit)

    def over(self) -> None:
        """Report that the work is finished."""
        if self._phase:
            self._phase = ""
            self._context.tell(progress=None)
