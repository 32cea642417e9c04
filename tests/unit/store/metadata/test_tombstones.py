"""Goal: a tombstone never lies behind the log's end. Method: real files, and a recovery of a log that was cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq.errors import StoreError
from commitmq.format.record import Record
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.topic_files import load_endings, load_tombstones, lower_tombstones
from commitmq.store.recovery.store_recovery import recover
from index_store import SEGMENT_BYTES, IndexStore


def test_tombstones_behind_the_end_are_lowered_to_it(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    assert lower_tombstones(layout, 5) == []
    json_config.persist(layout.tombstones, {"a": 10, "b": 20, "c": 30})
    assert lower_tombstones(layout, 30) == []
    assert lower_tombstones(layout, 15) == ["b", "c"]
    assert load_tombstones(layout) == {"a": 10, "b": 15, "c": 15}


def test_the_generation_before_counts_while_a_new_one_takes_its_place(tmp_path: Path) -> None:
    """Between its two renames there is no file of the name; a reader must not think then that nothing was deleted."""
    layout = StoreLayout(tmp_path)
    for path, load in ((layout.tombstones, load_tombstones), (layout.endings, load_endings)):
        assert load(layout) == {}
        json_config.persist(path, {"t": 1})
        path.rename(json_config.backup_path(path))
        assert load(layout) == {"t": 1}
        path.write_text('["t"]')
        with pytest.raises(StoreError, match=path.name):
            load(layout)


def test_a_recovery_after_a_power_cut_lowers_what_lies_behind_the_new_end(tmp_path: Path) -> None:
    """The log lost records that a tombstone counted: what is stored there next is not of the deleted topic."""
    store = IndexStore(tmp_path)
    store.append([Record("t", queue_offset=number) for number in range(5)])
    layout = StoreLayout(tmp_path)
    json_config.persist(layout.tombstones, {"t": store.end + 1_000, "u": 17})
    found = recover(
        layout,
        segment_bytes=SEGMENT_BYTES,
        consume_queue_bytes=200,
        batch_queue_bytes=460,
        clean=False,
        log=get_log("test"),
    )
    assert found.end == store.end
    assert load_tombstones(layout) == {"t": store.end, "u": 17}
