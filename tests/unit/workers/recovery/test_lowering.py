"""Goal: after a cut of the log every committed offset behind it is lowered to the end of its queue, durably and before anyone
is served, and no other one moves.

Method: small stores written record by record, with offsets anywhere, cut at any record, while the ConsumeQueues lead to any
record before or behind it; the records that are left are counted. Then the reasons for which a start begins a generation.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.config import from_mapping
from commitmq.coordination.offsets import GroupOffsets
from commitmq.store.metadata.consumer_offsets import ConsumerOffsets
from commitmq.store.metadata.topic_config import STORAGE_MEMORY, STORAGE_TYPE
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory
from commitmq.store.recovery.store_recovery import Recovered
from commitmq.workers.recovery.lowering import begin_generation
from queue_store import QueueStore

SEGMENT_BYTES, FILE_BYTES = 65_536, 400
CONFIG = from_mapping({"commit_log": {"segment_bytes": SEGMENT_BYTES}, "consume_queue": {"file_bytes": FILE_BYTES}})
OFFSETS = st.lists(st.tuples(st.sampled_from(["g", "h"]), st.integers(0, 1), st.integers(0, 30)), max_size=6)


def make_store(root: Path, queues: list[int]) -> QueueStore:
    store = QueueStore(root, segment_bytes=SEGMENT_BYTES, file_bytes=FILE_BYTES)
    store.topic("orders", 2)
    for number, queue in enumerate(queues):
        store.put("orders", queue, b"%d" % number * 6_000)
    return store


def commit(store: QueueStore, wanted: list[tuple[str, str, int, int]]) -> None:
    offsets = GroupOffsets.open(store.layout)
    for group, topic, queue, offset in wanted:
        offsets.stage(group, [(topic, queue, offset)], reset=True)
        offsets.sync()
    offsets.close()


def recovered(end: int, redispatch_from: int | None = None, **changes: Any) -> Recovered:
    known: dict[str, Any] = {"by_sidecar": True, "power_may_have_gone": False, **changes}
    return Recovered(0, end, end if redispatch_from is None else redispatch_from, 0, 1, 0, 0, **known)


def start(store: QueueStore, found: Recovered, shown: int | None = None) -> dict[str, Any]:
    log = SimpleNamespace(warning=lambda *_, **__: None)
    context: Any = SimpleNamespace(
        layout=store.layout, config=CONFIG, log=log, params={"shown": shown}, heartbeat=lambda: None
    )
    return begin_generation(context, found)


def cut(store: QueueStore, end: int) -> None:
    """Zero the log behind ``end``; the ConsumeQueues keep what they had."""
    for path in store.layout.commit_log.iterdir():
        base = int(path.name)
        data = path.read_bytes()
        kept = max(0, min(len(data), end - base))
        path.write_bytes(data[:kept].ljust(len(data), b"\0"))


def committed(store: QueueStore) -> dict[tuple[str, str, int], int]:
    offsets = GroupOffsets.open(store.layout)
    try:
        table = offsets.table.offsets.items()
        return {(group, topic, queue): at for (topic, group), queues in table for queue, at in queues.items()}
    finally:
        offsets.close()


@given(st.lists(st.integers(0, 1), min_size=1, max_size=25), OFFSETS, st.integers(0, 25), st.integers(0, 25))
@settings(max_examples=40)
def test_offsets_go_to_the_ends_of_their_queues(
    tmp_path_factory: pytest.TempPathFactory,
    queues: list[int],
    wanted: list[tuple[str, int, int]],
    left: int,
    dispatched: int,
) -> None:
    store = make_store(tmp_path_factory.mktemp("lowering") / "store", queues)
    start(store, recovered(store.end))
    commit(store, [(group, "orders", queue, min(offset, queues.count(queue))) for group, queue, offset in wanted])
    before = committed(store)
    records = sorted((one for some in store.records.values() for one in some), key=lambda one: one.physical_offset)
    places = [0, *(one.physical_offset + one.total_size for one in records)]
    end, redispatch_from = places[min(left, len(records))], places[min(left, dispatched, len(records))]
    was_shown = store.end
    cut(store, end)
    told = start(store, recovered(end, redispatch_from), shown=was_shown)
    ends = [sum(one.queue_id == queue for one in records if one.physical_offset < end) for queue in (0, 1)]
    expected = {key: min(offset, ends[key[2]]) for key, offset in before.items()}
    assert committed(store) == expected
    lowered = {key for key in before if expected[key] != before[key]}
    theirs = ConsumerOffsets.load(store.layout.config / "consumerOffset.json")
    assert all(theirs.get(group, topic, queue) == expected[group, topic, queue] for group, topic, queue in lowered)
    assert bool(told["lowered_now"]) == bool(lowered)
    assert told["positions_lowered"] == len(lowered)
    history = CutHistory.load(store.layout)
    assert history.pending_end == NO_CUT
    assert told["generation"] == history.generation
    if end < was_shown:
        assert history.cuts[-1].end == end
        assert history.cuts[-1].lowered.messages == sum(before[key] - expected[key] for key in lowered)
    again = start(store, recovered(end, redispatch_from), shown=end)
    assert (again["generation"], again["lowered_now"]) == (told["generation"], None)


def test_only_offsets_that_name_the_log_are_lowered(tmp_path: Path) -> None:
    """Not those of topics in memory, nor leftovers of topics that nobody knows; a topic that lost all of its messages begins
    anew.
    """
    store = make_store(tmp_path / "store", [0] * 4)
    store.topic("memory", 1)
    store.topics["memory"].attributes[STORAGE_TYPE] = STORAGE_MEMORY
    store.topic("empty", 1)
    commit(store, [("g", "memory", 0, 9), ("g", "gone", 0, 9), ("g", "empty", 0, 9), ("g", "%LMQ%light", 0, 9)])
    start(store, recovered(store.end))
    assert committed(store) == {
        ("g", "memory", 0): 9,
        ("g", "gone", 0): 9,
        ("g", "empty", 0): 0,
        ("g", "%LMQ%light", 0): 0,
    }


def test_when_a_generation_begins(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [0] * 4)
    end = store.end

    def by(found: Recovered, shown: int | None = None) -> str | None:
        before = CutHistory.load(store.layout).generation
        told = start(store, found, shown)
        assert told["generation"] >= before
        return None if told["generation"] == before else str(told["last_log_cut"]["by"])

    assert by(recovered(end, clean=True)) == "first use"
    assert by(recovered(end, clean=True)) is None
    assert by(recovered(end, clean=True, power_may_have_gone=True)) is None, "everything was flushed"
    assert by(recovered(end), shown=end) is None, "a kill alone takes nothing"
    assert by(recovered(end), shown=end + 1) == "recovery"
    assert by(recovered(end), shown=None) == "recovery", "nobody knows what was shown"
    assert by(recovered(end, power_may_have_gone=True), shown=end) == "recovery"
    assert by(recovered(end, by_sidecar=False, clean=True)) == "recovery", "another program used the store"
    assert by(recovered(end, allowed=True, clean=True)) == "recovery"
    store.layout.root.rename(tmp_path / "original")
    shutil.copytree(tmp_path / "original", store.layout.root)
    assert by(recovered(end, clean=True)) == "copied store"
    assert by(recovered(end, clean=True)) is None
    store.layout.cut_history.write_bytes(b"damaged")
    assert by(recovered(end, clean=True)) == "first use"
