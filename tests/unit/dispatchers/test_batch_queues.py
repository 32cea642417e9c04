"""Goal: what a deleted topic left of its batch queues never becomes part of a new topic of the same name.

Method: the ConsumeQueue dispatcher over a real log, without a node. A process that was killed before it deleted the files
is one that was told nothing: the next one opens them with the tombstone in its view.
"""

from __future__ import annotations

from pathlib import Path

from commitmq.config import load
from commitmq.format.record import Record
from commitmq.log import get_log
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.layout import StoreLayout
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq_dispatchers.consume_queue import ConsumeQueueDispatcher
from index_store import SEGMENT_BYTES, IndexStore

CONFIG = load(None, [f"commit_log.segment_bytes={SEGMENT_BYTES}", "consume_queue.batch_file_bytes=460"])


def dispatch(store: IndexStore, deleted: dict[str, int], position: int, end: int) -> None:
    """What one process of the dispatcher does between its start, at ``position``, and its end."""
    dispatcher = ConsumeQueueDispatcher()
    view = DispatcherView(
        StoreLayout(store.root),
        CONFIG,
        get_log("test"),
        store.log,
        position,
        lambda: deleted,
        lambda _queues: None,
        topic_attributes=lambda _topic: {"queue.type": "BatchCQ"},
    )
    dispatcher.open(view)
    walker = LogWalker(store.log, max_rows=100, max_bytes=1 << 20)
    while position < end:
        batch = walker.walk(position, end)
        dispatcher.dispatch(batch)
        position = batch.end
    dispatcher.flush(thorough=True)
    dispatcher.close()


def test_files_of_a_deleted_topic_are_no_part_of_its_successor(tmp_path: Path) -> None:
    store = IndexStore(tmp_path)
    store.append([Record("B", queue_offset=number) for number in range(25)])
    deleted_at = store.end
    dispatch(store, {}, 0, deleted_at)
    folder = tmp_path / "batchconsumequeue" / "B" / "0"
    assert BatchConsumeQueue(folder, 460).refresh() == 25
    store.append([Record("B", queue_offset=number) for number in range(3)])
    dispatch(store, {"B": deleted_at}, deleted_at, store.end)
    queue = BatchConsumeQueue(folder, 460)
    assert (queue.refresh(), queue.min_offset, queue.end_index) == (3, 0, 3)
    # Units of the successor stay.
    dispatch(store, {"B": deleted_at}, store.end, store.end)
    assert BatchConsumeQueue(folder, 460).refresh() == 3
