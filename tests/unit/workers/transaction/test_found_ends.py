"""Goal: what the log has of open transactions is found, and nothing else is taken for it.

Method: RocketMQ's own store, whose log has commits, copies and discards of known half messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from commitmq.format.record import Record
from commitmq.semantics.transaction import DISCARD_TOPIC, HALF_TOPIC
from commitmq.store.log.commit_log import CommitLog
from commitmq.workers.transaction import ends as module
from commitmq.workers.transaction.ends import Key, check_times, find_ends, find_superseded, key_of
from golden_stores import unpack
from pending_store import PendingStore, read_pending_store


@pytest.fixture(scope="module")
def pending(tmp_path_factory: pytest.TempPathFactory) -> PendingStore:
    return read_pending_store(unpack("semantics", tmp_path_factory.mktemp("golden")).root)


@pytest.fixture
def log(pending: PendingStore) -> Iterator[CommitLog]:
    made = CommitLog(pending.root / "commitlog", 131_072)
    yield made
    made.close()


def end_of(pending: PendingStore) -> int:
    last = pending.records[-1]
    return last.physical_offset + last.total_size


def by_offset(halves: list[Record]) -> dict[int, Record]:
    return {half.queue_offset: half for half in halves}


def test_commits_and_discards_are_found(pending: PendingStore, log: CommitLog) -> None:
    halves = pending.of(HALF_TOPIC)
    beats: list[None] = []
    found = find_ends(log, halves, end_of(pending), lambda: beats.append(None))
    places = {one.prepared_transaction_offset for one in pending.of("PendingTx")}
    exact = {half.queue_offset for half in halves if half.physical_offset in places}
    assert found.committed >= exact
    unique = {by_offset(halves)[offset].properties["UNIQ_KEY"] for offset in found.committed}
    assert unique == {one.properties["UNIQ_KEY"] for one in pending.of("PendingTx")}
    discarded = {by_offset(halves)[offset].properties["UNIQ_KEY"] for offset in found.discarded}
    assert discarded == {one.properties["UNIQ_KEY"] for one in pending.of(DISCARD_TOPIC)}
    assert beats


def test_nothing_is_found_in_front_of_it(pending: PendingStore, log: CommitLog) -> None:
    halves = pending.of(HALF_TOPIC)
    found = find_ends(log, halves, halves[0].physical_offset, lambda: None)
    assert not found.committed
    assert not found.discarded
    assert find_ends(log, [], end_of(pending), lambda: None) == type(found)()


def test_the_work_grows_with_the_log_not_with_its_square(
    pending: PendingStore, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {check_times(one) for one in pending.of(DISCARD_TOPIC)}
    alike = [half for half in pending.of(HALF_TOPIC) if check_times(half) in times]
    halves = [replace(one, queue_offset=number) for number, one in enumerate(alike * 300)]
    calls = []

    def counted(record: Record) -> Key:
        calls.append(record.queue_offset)
        return key_of(record)

    monkeypatch.setattr(module, "key_of", counted)
    assert find_ends(log, halves, end_of(pending), lambda: None).discarded
    assert len(calls) < 2.5 * len(halves), "twice for each half message, not once more for each discard"


def test_a_copy_supersedes_its_source(pending: PendingStore) -> None:
    halves = pending.of(HALF_TOPIC)
    found = find_superseded(halves)
    copies = [half for half in halves if check_times(half)]
    assert len(found) == len(copies)
    for copy in copies:
        chain = pending.with_key(HALF_TOPIC, copy.properties["UNIQ_KEY"])
        assert chain[check_times(copy) - 1].queue_offset in found
        assert (copy.queue_offset in found) == (copy is not chain[-1])
