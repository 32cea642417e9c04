"""Goal: a ConsumeQueue goes with the topic that it was of, and only then, whatever its first places hold.

Method: the ConsumeQueue dispatcher and the offline rebuild over a real log, without a node. A tombstone is in the dispatcher's
view from its start, as for one that is opened after the topic was deleted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commitmq.config import load
from commitmq.format.record import Record
from commitmq.log import get_log
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import keep_ends
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.layout import StoreLayout
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.metadata import json_config
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq_dispatchers.consume_queue import ConsumeQueueDispatcher
from index_store import SEGMENT_BYTES, IndexStore

FILE_BYTES = 200
SETTINGS = [f"commit_log.segment_bytes={SEGMENT_BYTES}", f"consume_queue.file_bytes={FILE_BYTES}", "index.enable=false"]


def dispatch(store: IndexStore, deleted: dict[str, int], position: int) -> int:
    """What one process of the dispatcher does from its start, at ``position``, to the log's end; the queue's end then."""
    dispatcher = ConsumeQueueDispatcher()
    dispatcher.open(
        DispatcherView(
            StoreLayout(store.root),
            load(None, SETTINGS),
            get_log("test"),
            store.log,
            position,
            lambda: deleted,
            lambda _queues: None,
            topic_attributes=lambda _topic: {},
        )
    )
    walker = LogWalker(store.log, max_rows=100, max_bytes=1 << 20)
    while position < store.end:
        batch = walker.walk(position, store.end)
        dispatcher.dispatch(batch)
        position = batch.end
    dispatcher.flush(thorough=True)
    dispatcher.close()
    return ConsumeQueue(store.root / "consumequeue" / "t" / "0", FILE_BYTES).refresh()


@pytest.mark.parametrize("lost", [1, 9, 10, 11, 25])
def test_a_queue_whose_first_messages_are_lost_stays_beside_an_old_tombstone(tmp_path: Path, lost: int) -> None:
    """A topic was deleted and made anew, and the first ``lost`` messages of the new one expired or were cut out: the queue,
    made anew from the log, begins with blank places, which are of no record and so not below anything.
    """
    store = IndexStore(tmp_path)
    store.append([Record("t", queue_offset=number) for number in range(5)])
    deleted = {"t": store.end}
    store.append([Record("t", queue_offset=number) for number in range(lost, lost + 30)])
    assert dispatch(store, deleted, 0) == lost + 30
    before = [path.read_bytes() for path in sorted((tmp_path / "consumequeue" / "t" / "0").iterdir())]
    for _ in range(2):
        assert dispatch(store, deleted, store.end) == lost + 30
    after = [path.read_bytes() for path in sorted((tmp_path / "consumequeue" / "t" / "0").iterdir())]
    assert after == before


@pytest.mark.parametrize("blank", [0, 3])
def test_a_queue_of_a_deleted_topic_goes(tmp_path: Path, blank: int) -> None:
    store = IndexStore(tmp_path)
    store.append([Record("t", queue_offset=number) for number in range(blank, blank + 25)])
    deleted_at = store.end
    assert dispatch(store, {}, 0) == blank + 25
    store.append([Record("t", queue_offset=number) for number in range(3)])
    assert dispatch(store, {"t": deleted_at}, deleted_at) == 3


@pytest.mark.parametrize("have_files", [True, False])
def test_a_rebuild_does_not_keep_the_end_of_a_deleted_topics_queue(tmp_path: Path, have_files: bool) -> None:
    """All of two topics expired; the dispatcher died before it removed the queue of the one that was deleted."""
    store = IndexStore(tmp_path)
    store.append([Record(topic, queue_offset=number) for number in range(5) for topic in ("t", "u")])
    dispatch(store, {}, 0)
    layout = StoreLayout(tmp_path)
    json_config.persist(layout.tombstones, {"t": store.end})
    beside = StoreLayout(tmp_path / "beside")
    ends = QueueEnds.load(layout.queue_ends)
    assert ends is not None
    assert {end.topic for end in ends.queues} == {"t", "u"}
    if not have_files:
        shutil.rmtree(layout.consume_queue)
    with HeldStore(tmp_path, load(None, SETTINGS)) as held:
        keep_ends(held, beside, store.end, ends)
    assert sorted(path.name for path in beside.consume_queue.iterdir()) == ["u"]
