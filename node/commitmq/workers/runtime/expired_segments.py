"""Unmaps expired segments in a worker: cleanup publishes the CommitLog's new minimum, waits a moment, then unlinks.

A mapping of an unlinked file keeps its space. So every worker unmaps first and publishes that in ``RELEASED`` of its
slot. Cleanup does not wait long for a worker that keeps its mapping: the mapping of a deleted file does no harm, and
only costs space.
"""

from __future__ import annotations

from commitmq.control import Word, WorkerWord
from commitmq.store.log.commit_log import CommitLog
from commitmq.workers.runtime.context import WorkerContext


class ExpiredSegments:
    """One worker's log, and the offset below which it has unmapped."""

    def __init__(self, context: WorkerContext, log: CommitLog) -> None:
        self._control = context.control
        self._slot = context.slot
        self._log = log
        self._seen = -1
        self._released = -1

    def release(self) -> bool:
        """Unmap the segments to be deleted; call it in every turn of the loop. True when the minimum grew."""
        minimum = self._control.get(Word.MIN_OFFSET)
        if self._released == minimum:
            return False
        grew = minimum > self._seen
        self._seen = minimum
        self._released = self._log.release_below(minimum)
        self._control.put_worker(self._slot, WorkerWord.RELEASED, self._released)
        return grew
