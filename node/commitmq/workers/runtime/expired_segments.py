"""How a worker that maps the CommitLog follows its minimum: cleanup publishes it, then waits a moment, then unlinks.

A mapping of an unlinked file keeps its space, so everybody unmaps first and says so in ``RELEASED`` of its slot. Nobody
waits for one who does not: reading on in a mapping of a deleted file is harmless, it only costs space.
"""

from __future__ import annotations

from commitmq.control import Word, WorkerWord
from commitmq.store.log.commit_log import CommitLog
from commitmq.workers.runtime.context import WorkerContext


class ExpiredSegments:
    """One worker's log, and how far it has let go."""

    def __init__(self, context: WorkerContext, log: CommitLog) -> None:
        self._control = context.control
        self._slot = context.slot
        self._log = log
        self._seen = -1
        self._released = -1

    def release(self) -> bool:
        """Unmap what is going to be deleted; to be called in every turn of the loop. True when the minimum grew."""
        minimum = self._control.get(Word.MIN_OFFSET)
        if self._released == minimum:
            return False
        grew = minimum > self._seen
        self._seen = minimum
        self._released = self._log.release_below(minimum)
        self._control.put_worker(self._slot, WorkerWord.RELEASED, self._released)
        return grew
