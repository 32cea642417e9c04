"""Which waiting messages went with their topic: a mover drops them, however the next topic of the name came to be."""

from __future__ import annotations

from commitmq.store.metadata.deleted_topics import NO_END, WatchedTable
from commitmq.workers.runtime.context import WorkerContext


class DeletedTopics:
    """``dropped`` counts messages; ``status`` shows it at the process."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._tombstones = WatchedTable(context.layout.tombstones)
        self._endings = WatchedTable(context.layout.endings)
        self.dropped = 0

    def floors(self) -> dict[str, int]:
        """Physical offsets by topic: a message below is of a deleted one. Mostly empty. Raises StoreError."""
        tombstones, endings = self._tombstones.load(), self._endings.load()
        return {**tombstones, **dict.fromkeys(endings, NO_END)} if endings else tombstones

    def drop(self, count: int) -> None:
        """Count messages that are not moved."""
        self.dropped += count
        self._context.tell(dropped=self.dropped)
