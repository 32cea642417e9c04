"""Goal: the acks that wait in the timer topic are found, each check point's own, and no more are kept than allowed.

Method: the golden store ``semantics``, which RocketMQ stopped with acks in its timer; a queue that grows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commitmq.format.constants import Property
from commitmq.semantics.pop_revive import Ack, CheckPointKey, revive_topic
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.pop.revival import AckSearch
from golden_stores import GOLDEN_QUEUE_FILE_BYTES, GOLDEN_SEGMENT_BYTES, unpack
from pending_store import PendingStore, read_pending_store


class Places:
    """The part of a reader's places that the search uses."""

    def __init__(self, root: Path) -> None:
        layout = StoreLayout(root)
        self.log = CommitLog(layout.commit_log, GOLDEN_SEGMENT_BYTES, 8)
        self.queues = QueueReader(self.log, layout.consume_queue, GOLDEN_QUEUE_FILE_BYTES)
        self.end = 1 << 62

    def bound(self) -> int:
        return self.end

    def floor(self, topic: str) -> int:
        return 0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still ends no turn."""
    monkeypatch.setattr("commitmq.workers.pop.revival.TURN_S", 60.0)


@pytest.fixture(scope="module")
def pending(tmp_path_factory: pytest.TempPathFactory) -> PendingStore:
    return read_pending_store(unpack("semantics", tmp_path_factory.mktemp("golden")).root)


def stored(pending: PendingStore) -> dict[CheckPointKey, set[int]]:
    """The acks of the store's timer topic, read record by record."""
    found: dict[CheckPointKey, set[int]] = {}
    for one in pending.of(TIMER_TOPIC):
        is_ours = one.properties.get(Property.REAL_TOPIC) == revive_topic("C")
        if is_ours and one.properties[Property.TAGS] in ("ack", "bAck"):
            ack = Ack.parse(one.body)
            found.setdefault(ack.key, set()).update(ack.acked)
    return found


def search(places: Any, **options: Any) -> AckSearch:
    return AckSearch(places, revive_topic("C"), lambda: None, **options)


def test_the_acks_of_each_check_point_are_found(pending: PendingStore) -> None:
    wanted = stored(pending)
    assert len(wanted) > 5
    one = search(Places(pending.root))
    unknown = next(iter(wanted))._replace(pop_time=1)
    assert one.acked([*wanted, unknown]) == {**wanted, unknown: set()}
    assert one._first == 0, "the unknown one is older than the queue"
    assert one.acked(list(wanted)) == {key: set() for key in wanted}, "each is asked for once"


def test_it_begins_where_the_oldest_check_point_was_received(
    pending: PendingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commitmq.workers.pop.revival._SLACK_MS", 0)
    monkeypatch.setattr("commitmq.workers.pop.revival._UNITS", 3)
    wanted = stored(pending)
    first, *_, last = sorted(wanted, key=lambda key: key.pop_time)
    one = search(Places(pending.root))
    assert one.acked([last]) == {last: wanted[last]}
    began = one._first
    assert began > 0
    assert one.acked([first]) == {first: wanted[first]}, "an older one makes it read back"
    assert one._first < began


def test_a_long_queue_is_read_in_parts(pending: PendingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commitmq.workers.pop.revival.TURN_S", 0.0)
    monkeypatch.setattr("commitmq.workers.pop.revival._UNITS", 3)
    wanted = stored(pending)
    one, turns = search(Places(pending.root)), 1
    while (found := one.acked(list(wanted))) is None:
        turns += 1
    assert found == wanted
    assert turns > 5


def test_what_comes_later_is_found_later(pending: PendingStore) -> None:
    places = Places(pending.root)
    acks = [one for one in pending.of(TIMER_TOPIC) if one.properties.get(Property.TAGS) == "ack"]
    last = acks[-1]
    key = Ack.parse(last.body).key
    before = {Ack.parse(one.body).offset for one in acks[:-1] if Ack.parse(one.body).key == key}
    places.end = last.physical_offset
    one = search(places)
    assert one.acked([]) == {}
    places.end = 1 << 62
    found = one.acked([key])
    assert found is not None
    assert found[key] >= before | {Ack.parse(last.body).offset}


def test_the_oldest_are_forgotten(pending: PendingStore) -> None:
    wanted = stored(pending)
    found = search(Places(pending.root), most=3).acked(list(wanted))
    assert found is not None
    assert sum(bool(offsets) for offsets in found.values()) == 3
