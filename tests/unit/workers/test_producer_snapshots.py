"""Goal: a stop saves the table of idempotent producers as of the log's end, also when a snapshot of that end was taken before
and waited for its flush.

Method: the writer's table over an empty store, with the log's positions given by the test.
"""

from __future__ import annotations

from pathlib import Path

from commitmq.config import NodeConfig
from commitmq.files.disk_space import DiskRoom
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.producers import ProducerSnapshot
from commitmq.workers.writer.producers import ProducerStateManager


def test_a_snapshot_that_waits_for_its_flush_is_saved_by_a_stop(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    layout.own.mkdir()
    log = get_log("test")
    producers = ProducerStateManager(layout, NodeConfig(), log, DiskRoom.of_nobody(log))
    producers.turn(4_096, flushed=0)
    assert ProducerSnapshot.load(layout.producers) is None, "it waits"
    producers.finish(4_096, flushed=4_096)
    found = ProducerSnapshot.load(layout.producers)
    assert found is not None
    assert found.position == 4_096
