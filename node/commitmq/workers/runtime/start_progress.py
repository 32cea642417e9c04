"""Reports a worker's progress before it is ready, and with what it makes again beside its work.

The supervisor gets the reports and shows them in ``status``, the former also to the program that waits for the start; the
log gets them when it takes long.
"""

from __future__ import annotations

from commitmq.supervision.exit_codes import progress_sentence
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

_TELL_MS = 200
_LOG_MS = 2_000


class StartProgress:
    """Called again and again with the progress. A report also shows that this worker lives."""

    def __init__(self, context: WorkerContext, name: str = "progress") -> None:
        """``name`` of the report: ``progress``, or ``remaking``: damaged files are made again while the worker serves."""
        self._context = context
        self._name = name
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
        self._context.tell(**{self._name: progress})
        if now >= self._next_log_ms:
            self._next_log_ms = now + _LOG_MS
            what = "starting: " if self._name == "progress" else ""
            self._context.log.info(f"{what}{progress_sentence(progress)}", done=done, total=total, unit=unit)

    def over(self) -> None:
        """Report that the work is finished."""
        if self._phase:
            self._phase = ""
            self._context.tell(**{self._name: None})
