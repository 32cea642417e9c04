"""Goal: a start takes no queue for damaged whose files went with what expired, and finds torn units in the middle of others.

Method: a small store, its record of the queues' ends, and a queue's first file that is gone, or units of zeros.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq.config import from_mapping
from commitmq.offline.held_store import StoreView
from commitmq.offline.queue_check import find_losses
from commitmq.store.queues import queue_files
from commitmq.store.queues.queue_ends import QueueEnd, QueueEnds
from queue_store import QueueStore

UNITS_A_FILE = 10
CONFIG = from_mapping({"commit_log": {"segment_bytes": 65_536}, "consume_queue": {"file_bytes": 20 * UNITS_A_FILE}})


@pytest.mark.parametrize(("has_expired", "why"), [(True, []), (False, ["files are missing before the one"])])
def test_the_file_of_the_last_unit_may_have_expired(tmp_path: Path, has_expired: bool, why: list[str]) -> None:
    store = QueueStore(tmp_path / "store")
    store.topic("orders", 1)
    for number in range(UNITS_A_FILE):
        store.put("orders", 0, b"%d" % number)
    position = store.end
    ends = QueueEnds(position, expires_below=position if has_expired else -1)
    ends.queues.append(QueueEnd.of(store.queue("orders", 0)))
    # What follows lies in a file of its own, behind the position of the record, and the first file goes.
    store.put("orders", 0, b"next")
    (store.layout.consume_queue / "orders" / "0" / f"{0:020}").unlink()
    view = StoreView(store.root, CONFIG, (0,), was_open=True)
    found = [loss.why for loss in find_losses(view, ends, position, lambda *_: None)]
    assert len(found) == len(why)
    for one, words in zip(found, why, strict=True):
        assert words in one


@pytest.mark.parametrize("was_open", [True, False])
@pytest.mark.parametrize("number", [0, 1, 4, 8, 9, 10, 13, 19, 24])
def test_units_that_a_power_cut_took_from_the_middle_are_found(
    tmp_path: Path, number: int, was_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an orderly stop only the files' edges and the newest units are read."""
    monkeypatch.setattr(queue_files, "_TAIL_UNITS", 8)
    monkeypatch.setattr(queue_files, "_PIECE_UNITS", 4)
    store = QueueStore(tmp_path / "store")
    store.topic("orders", 1)
    for each in range(3 * UNITS_A_FILE):
        store.put("orders", 0, b"%d" % each)
    ends = QueueEnds(store.end)
    ends.queues.append(QueueEnd.of(store.queue("orders", 0)))
    view = StoreView(store.root, CONFIG, (0,), was_open=was_open)
    assert not find_losses(view, ends, store.end, lambda *_: None)
    base = number - number % UNITS_A_FILE
    with open(store.layout.consume_queue / "orders" / "0" / f"{20 * base:020}", "r+b") as file:
        file.seek(20 * (number - base))
        file.write(bytes(20))
    found = [one.why for one in find_losses(view, ends, store.end, lambda *_: None)]
    assert bool(found) == (was_open or number in (0, 9, 10, 19, 24))
    assert all("does not hold units of records that follow each other" in why for why in found)


def test_the_newest_units_of_a_light_queue_are_missed_without_the_record_of_ends(tmp_path: Path) -> None:
    """A light queue that has no files at all is no loss: RocketMQ may have been told not to fill it."""
    store = QueueStore(tmp_path / "store")
    store.topic("orders", 1)
    for each in range(UNITS_A_FILE - 1):
        store.put("orders", 0, b"%d" % each, light="%LMQ%a")
    view = StoreView(store.root, CONFIG, (0,), was_open=True, batch_topics={"orders": False})
    assert not find_losses(view, None, store.end, lambda *_: None)
    (path,) = (store.layout.consume_queue / "%LMQ%a" / "0").iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(len(data) - 100))
    (loss,) = find_losses(view, None, store.end, lambda *_: None)
    assert (loss.topic, loss.queue_id) == ("%LMQ%a", 0)
    assert "has no unit" in loss.why
    path.unlink()
    assert not find_losses(view, None, store.end, lambda *_: None)
