"""Goal: what thousands of queues cost at a start, at a batch and at a flush is bounded, and no call does it all at once.

Method: a store with 1,200 queues in full-size sparse files and records in a real log; system calls are counted, because
on a busy machine a clock says little.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from commitmq.config import NodeConfig, load
from commitmq.files import fd_cache
from commitmq.log import get_log
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.recovery.store_recovery import recover
from commitmq_dispatchers.consume_queue import ConsumeQueueDispatcher, Unsynced
from queue_store import QueueStore

TOPICS, QUEUES = 120, 10
COUNT = TOPICS * QUEUES
SEGMENT_BYTES, FILE_BYTES = 1 << 20, 6_000_000
COUNTED = ("open", "pread", "pwrite", "fdatasync", "fsync", "scandir")


def config(*settings: str) -> NodeConfig:
    return load(
        None, [f"commit_log.segment_bytes={SEGMENT_BYTES}", f"consume_queue.file_bytes={FILE_BYTES}", *settings]
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[QueueStore, int]:
    """The store, and the log's end below which all records have their units; one more record a queue follows."""
    store = QueueStore(tmp_path_factory.mktemp("many"), SEGMENT_BYTES, FILE_BYTES)
    queues = list(itertools.product([f"topic-{number:03d}" for number in range(TOPICS)], range(QUEUES)))
    for topic, queue in queues:
        store.put(topic, queue, b"first", timestamp=1_000)
    end = store.end
    for topic, queue in queues:
        store.put(topic, queue, b"second", timestamp=2_000, dispatch=False)
    return store, end


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """System calls by name, and ``read`` bytes."""
    counter: Counter[str] = Counter()
    for name in COUNTED:
        real = getattr(os, name)

        def call(*arguments: object, name: str = name, real: object = real, **named: object) -> object:
            counter[name] += 1
            result = real(*arguments, **named)  # type: ignore[operator]
            if name == "pread":
                counter["read"] += len(result)
            return result

        monkeypatch.setattr(os, name, call)
    return counter


@pytest.fixture
def opened(built: tuple[QueueStore, int]) -> Iterator[tuple[ConsumeQueueDispatcher, DispatchBatch, CommitLog]]:
    """The dispatcher on all queues, and a batch with a record for each."""
    store, end = built
    log = CommitLog(store.layout.commit_log, SEGMENT_BYTES)
    dispatcher = ConsumeQueueDispatcher()
    dispatcher.open(view(store, log, end))
    batch = LogWalker(log, max_rows=2 * COUNT, max_bytes=1 << 24).walk(end, store.end)
    yield dispatcher, batch, log
    dispatcher.truncate(end)
    dispatcher.close()
    log.close()


def view(store: QueueStore, log: CommitLog, position: int, *settings: str) -> DispatcherView:
    return DispatcherView(store.layout, config(*settings), get_log("test"), log, position, dict, lambda _: None)


def test_opening_costs_a_few_reads_a_queue(built: tuple[QueueStore, int], calls: Counter[str]) -> None:
    store, end = built
    log = CommitLog(store.layout.commit_log, SEGMENT_BYTES)
    first = ConsumeQueueDispatcher()  # what is imported and cached once is not what is measured
    first.open(view(store, log, end))
    first.close()
    dispatcher = ConsumeQueueDispatcher()
    seen = view(store, log, end, "consume_queue.max_open_files=100")  # the settings are no part of the queues' memory
    open_files = len(os.listdir("/proc/self/fd"))
    calls.clear()
    tracemalloc.start()
    dispatcher.open(seen)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert calls["open"] <= COUNT + 10
    assert calls["pread"] <= 8 * COUNT
    assert calls["read"] <= 9_000 * COUNT
    assert calls["pwrite"] == calls["fdatasync"] == calls["fsync"] == 0
    assert calls["scandir"] <= COUNT + TOPICS + 10
    assert used_bytes <= 700 * COUNT, "the queues, and until it is written the record of where they end"
    assert len(os.listdir("/proc/self/fd")) <= open_files + 110
    dispatcher.close()
    log.close()


def test_recovery_of_a_clean_stop_reads_little(built: tuple[QueueStore, int], calls: Counter[str]) -> None:
    store, end = built
    calls.clear()
    found = recover(
        store.layout,
        segment_bytes=SEGMENT_BYTES,
        consume_queue_bytes=FILE_BYTES,
        batch_queue_bytes=46_000,
        clean=True,
        log=get_log("test"),
    )
    assert (found.end, found.redispatch_from) == (store.end, end)
    assert calls["pread"] <= 8 * COUNT + 100
    assert calls["read"] <= 9_000 * COUNT + (2 << 20)


def test_a_batch_over_all_queues_is_one_write_each(
    opened: tuple[ConsumeQueueDispatcher, DispatchBatch, CommitLog], calls: Counter[str]
) -> None:
    dispatcher, batch, _ = opened
    assert len(batch) == COUNT
    calls.clear()
    dispatcher.dispatch(batch)
    assert calls["pwrite"] == COUNT
    assert calls["pread"] == calls["scandir"] == 0


def test_a_flush_does_its_share_and_all_are_durable_in_time(
    opened: tuple[ConsumeQueueDispatcher, DispatchBatch, CommitLog], calls: Counter[str]
) -> None:
    dispatcher, batch, _ = opened
    start = dispatcher.flush(thorough=False)[0]
    dispatcher.dispatch(batch)
    # The defaults: a call a second, everything within 60 of them; a round through all queues takes half of that.
    most = 0
    for number in range(60):  # noqa: B007 - how many it took is what is asked below
        calls.clear()
        durable, stamp = dispatcher.flush(thorough=False)
        while dispatcher.is_flushing:
            durable, stamp = dispatcher.flush(thorough=False)
        most = max(most, calls["fdatasync"])
        if durable == batch.end:
            break
        assert durable == start, "not all is synced, so the position may not move"
    assert (durable, stamp) == (batch.end, 2_000)
    assert number <= 31
    assert 0 < most <= COUNT // 30 + 64
    calls.clear()
    assert dispatcher.flush(thorough=True) == (durable, stamp)
    assert calls["fdatasync"] == 0, "there was nothing left to do"


def test_a_thorough_flush_leaves_nothing(
    opened: tuple[ConsumeQueueDispatcher, DispatchBatch, CommitLog], calls: Counter[str]
) -> None:
    dispatcher, batch, _ = opened
    dispatcher.dispatch(batch)
    dispatcher.flush(thorough=False)
    assert dispatcher.flush(thorough=True) == (batch.end, 2_000)
    assert COUNT <= calls["fdatasync"] <= COUNT + 1, "each queue once, and the record of where they end"


def test_a_queue_that_cannot_be_synced_holds_the_position_back(
    opened: tuple[ConsumeQueueDispatcher, DispatchBatch, CommitLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, batch, _ = opened
    start = dispatcher.flush(thorough=False)[0]
    dispatcher.dispatch(batch)
    real, left = os.fdatasync, [300]

    def failing(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", failing)
    assert dispatcher.flush(thorough=True)[0] == start
    monkeypatch.setattr(os, "fdatasync", real)
    assert dispatcher.flush(thorough=True)[0] == start, (
        "a sync after a failed one says nothing about what that one lost"
    )
    again = ConsumeQueueDispatcher()
    again.open(replace(dispatcher._view, position=batch.end, durable=start))
    assert again.flush(thorough=True)[0] == batch.end, "a new process has written the units once more"
    again.close()


def test_new_queues_share_the_syncs_of_their_folders(tmp_path: Path, calls: Counter[str]) -> None:
    store = QueueStore(tmp_path, SEGMENT_BYTES, FILE_BYTES)
    for topic, queue in itertools.product([f"t{number}" for number in range(20)], range(QUEUES)):
        store.put(topic, queue, b"x", timestamp=7, dispatch=False)
    log = CommitLog(store.layout.commit_log, SEGMENT_BYTES)
    dispatcher = ConsumeQueueDispatcher()
    dispatcher.open(view(store, log, 0))
    dispatcher.dispatch(LogWalker(log, max_rows=1_000, max_bytes=1 << 24).walk(0, store.end))
    calls.clear()
    assert dispatcher.flush(thorough=True) == (store.end, 7)
    assert 20 * QUEUES <= calls["fdatasync"] <= 20 * QUEUES + 1, "each queue once, and the record of where they end"
    slices = -(-20 * QUEUES // 64)
    assert calls["fsync"] <= 20 * QUEUES + 20 + 2 * slices, "a queue's folder once, a topic's and the root once a slice"
    dispatcher.close()
    log.close()


@pytest.mark.parametrize(
    ("limits", "wanted", "given", "raised"),
    [((1024, 524_288), 16_384, 16_384, 16_640), ((1024, 4096), 16_384, 3_072, 4_096), ((65_536, -1), 500, 500, None)],
)
def test_open_files_are_what_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, given: int, raised: int | None
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: set_to.append(pair[0]))
    assert fd_cache.affordable_files(wanted) == given
    assert set_to == ([] if raised is None else [raised])


def test_what_a_recovery_dispatches_again_is_bounded_in_bytes(
    opened: tuple[ConsumeQueueDispatcher, DispatchBatch, CommitLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream over all queues, each of which waits anew all the time, and a bound of a quarter of it."""
    dispatcher, batch, _ = opened
    bound = (batch.end - batch.start) // 4
    monkeypatch.setattr("commitmq_dispatchers.consume_queue._MOST_UNSYNCED_BYTES", bound)
    monkeypatch.setattr("commitmq_dispatchers.consume_queue._FLUSH_S", 60.0)
    pieces, most = 12, 0
    for number in range(pieces):
        low, high = (
            int(batch.rows["physical_offset"][at * COUNT // pieces]) for at in (number, min(number + 1, pieces - 1))
        )
        high = batch.end if number + 1 == pieces else high
        rows = batch.rows[number * COUNT // pieces : (number + 1) * COUNT // pieces]
        dispatcher.dispatch(DispatchBatch(low, high, rows, batch.topics, batch.log))
        durable, _ = dispatcher.flush(thorough=False)
        most = max(most, high - durable)
        assert high - durable <= bound + (high - low), "the oldest units are synced first"
    assert most > bound // 2, "not everything is synced each time"
    assert dispatcher.flush(thorough=True)[0] == batch.end


def test_the_durable_position_never_passes_a_unit_that_waits() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    queues = [ConsumeQueue(f"/nowhere/t/{number}", FILE_BYTES) for number in range(20)]
    unsynced = Unsynced()
    model: dict[ConsumeQueue, int] = {}  # where its first unsynced unit is
    position = 0
    for _ in range(2_000):
        if chance.random() < 0.5:
            for queue in chance.sample(queues, chance.randrange(6)):
                unsynced.add(queue, 20)
                model.setdefault(queue, position)
            position += chance.randrange(1, 100)
            unsynced.reached(position, position * 2)
        elif model:
            # Synced in any order.
            for queue in chance.sample(sorted(model, key=lambda one: one.folder), chance.randrange(len(model) + 1)):
                unsynced.discard(queue)
                del model[queue]
        expected = min(model.values(), default=position)
        assert unsynced.durable() == (expected, expected * 2), f"seed {seed}"
        bound = chance.randrange(position + 1)
        assert set(unsynced.waiting_below(bound)) == {queue for queue, at in model.items() if at < bound}, (
            f"seed {seed}"
        )
