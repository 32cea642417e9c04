"""The index dispatcher: enters records that have a key in RocketMQ's IndexFiles (spec section 4).

Invariants: a record's items follow each other in the order of the log and are written once, also after a death; a
batch's items are in the files before its end is published. All rules of trust, durability and repair are in
:mod:`commitmq.store.index.index_files`; no Python code runs for each message.
"""

from __future__ import annotations

from commitmq.config import NodeConfig
from commitmq.format.index import IndexShape
from commitmq.plugin.hookspecs import DispatcherSpec, DispatcherView, hookimpl
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.index.index_files import IndexFiles
from commitmq.store.log.dispatch_batch import DispatchBatch


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    """The built-in index, unless ``index.enable`` is off."""
    if not config.index.enable:
        return []
    return [DispatcherSpec("index", "commitmq_dispatchers.index:IndexDispatcher", can_undo=True)]


class IndexDispatcher:
    """Enters records that have a key in the IndexFiles (see :class:`commitmq.plugin.hookspecs.Dispatcher`)."""

    def open(self, view: DispatcherView) -> int:
        """Make the files trustworthy. The node's own position is not needed, because the files tell it."""
        shape = IndexShape(view.config.index.hash_slots, view.config.index.max_items)
        self._files = IndexFiles(
            view.layout.index,
            shape,
            view.commit_log,
            view.log,
            state_path=view.folder / "files.json",
            run=view.layout.run,
        )
        timestamp = Checkpoint.load(view.layout.checkpoint).index_msg_timestamp
        self._position = self._files.open(clean=view.node_clean, index_timestamp=timestamp, log_end=view.log_end)
        return self._position

    def dispatch(self, batch: DispatchBatch) -> None:
        """Index the batch. Raises DiskFullError when there is no space; then the same batch may be given again."""
        self._files.insert(batch)
        self._position = batch.end

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        """The newest file is never made durable while it grows (spec 4.3); full files are, in the background."""
        return self._files.flush()

    def going_back(self) -> int | None:
        """Where to continue when a file turned out to be damaged since the last call; None else."""
        back, self._files.goes_back_to = self._files.goes_back_to, None
        if back is not None:
            self._position = back
        return back

    def truncate(self, offset: int) -> None:
        """Drop the items that point at or behind ``offset``."""
        self._files.truncate(offset)
        self._position = offset

    def expire(self, min_offset: int) -> None:
        """Delete files that only point below ``min_offset``."""
        self._files.expire(min_offset)

    def close(self) -> None:
        """Make the newest file durable, and note that the stop was orderly."""
        self._files.close(self._position)
