"""Goal: after a cut of the log every committed offset behind it is lowered to the end of its queue, durably and before anyone
is served, and no other one moves.

Method: small stores written record by record, with offsets anywhere, cut at any record, while the ConsumeQueues lead to any
record before or behind it; the records that are left are counted. Then the reasons for which a start begins a generation.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq import ownership
from commitmq.config import PopConfig, from_mapping
from commitmq.coordination.offsets import GroupOffsets
from commitmq.files.disk_space import DiskRoom
from commitmq.log import get_log
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.pop import first_pop
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import CHECK_GROUP, HALF_TOPIC, OP_TOPIC
from commitmq.store.metadata import journal
from commitmq.store.metadata.group_config import ConsumerOffsets
from commitmq.store.metadata.topic_config import STORAGE_MEMORY, STORAGE_TYPE
from commitmq.store.producers import ProducerSnapshot
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory, note_cut
from commitmq.store.recovery.store_recovery import Recovered
from commitmq.workers.dispatcher.dispatch_state import DispatchState
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.recovery import ProgressFile
from commitmq.workers.recovery import begin_generation
from commitmq.workers.runtime.set_aside import listed
from commitmq.workers.schedule import progress as schedule
from commitmq.workers.timer import progress as timer
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
    assert by(recovered(end, allowed=True, clean=True)) == "allow-cut"
    store.layout.root.rename(tmp_path / "original")
    shutil.copytree(tmp_path / "original", store.layout.root)
    assert by(recovered(end, clean=True)) == "copied store"
    assert by(recovered(end, clean=True)) is None
    store.layout.cut_history.write_bytes(b"damaged")
    assert by(recovered(end, clean=True)) == "first use"


# ---------------------------------------------------------------- every file that names a place

ELSEWHERE = {
    "commitlog/*": "tests/unit/store/recovery/test_cut_refusals.py",
    "consumequeue/*": "tests/crash/test_lost_files.py",
    "consumequeue_ext/*": "tests/crash/test_lost_files.py",
    "batchconsumequeue/*": "tests/crash/test_lost_files.py",
    "index/*": "tests/crash/test_derived_files.py",
    "timerwheel*": "tests/unit/workers/runtime/test_position_trail.py",
    "timerlog/*": "tests/unit/workers/runtime/test_position_trail.py",
    "checkpoint*": "tests/unit/workers/recovery/test_recovered_checkpoint.py",
    "commitmq/position*": "tests/unit/workers/recovery/test_recovered_checkpoint.py",
    "commitmq/queue_ends*": "tests/unit/store/queues/test_queue_ends.py",
    "commitmq/deleted_topics.json*": "tests/unit/store/recovery/test_log_recovery.py",
    "commitmq/min_offset*": "tests/unit/store/log/test_segment_expiry.py",
    "commitmq/cut_history*": "tests/unit/store/recovery/test_cut_history.py",
    "commitmq/cut/*": "tests/unit/store/recovery/test_cut_record.py",
    "commitmq/workers/*": "docs/spec/cut-history.md",
    "run/control": "tests/unit/test_control.py",
    "run/index*": "tests/crash/test_lost_files.py",
}
LOWERED = (
    "config/consumerOffset.json*",
    "config/delayOffset.json*",
    "config/timercheck*",
    "config/consumerOrderInfo.json*",
    "commitmq/schedule.json*",
    "commitmq/timer.json*",
    "commitmq/pop.json*",
    "commitmq/producers*",
    "commitmq/orders.journal*",
    "commitmq/offsets.journal*",
    "commitmq/dispatchers/index*",
    "commitmq/dispatchers/*",
    "commitmq/set_aside/*",
)
NAMES_NO_PLACE = {
    "config/topics.json*",
    "config/messageRequestMode.json*",
    "config/security/*",
    "config/subscriptionGroup.json*",
    "config/consumerFilter.json*",
    "config/timermetrics*",
    "abort*",
    "lock",
    "commitmq/flush_failed",
    "commitmq/writer_sync_failed",
    "commitmq/topics.journal*",
    "commitmq/group_members.log*",
    "commitmq/makers.log*",
    "commitmq/deleting_topics.json*",
    "commitmq/store.json*",
    "commitmq/transient_pool.json*",
    "commitmq/shared_memory.json*",
    "commitmq/sockets.json*",
    "commitmq/epoch*",
    "commitmq/node.log*",
    "commitmq/audit/users.jsonl*",
    "commitmq/audit/*",
    "commitmq/settings.json*",
    "run/node.json*",
    "run/token*",
    "run/sockets*",
    "run/subscriptions.json*",
    "run/segment.new",
    "run/*.lock",
    "run/*.counts",
    "run/*.bell",
    "run/*.ipc",
    "run/*.sock",
}


def test_every_file_of_the_node_is_known_here() -> None:
    """A new file that names a place in the log or in a queue says what becomes of it after a cut, and has a test of that."""
    patterns = {owner.pattern: owner.after_cut for owner in ownership.FILES}
    assert set(patterns) == {*ELSEWHERE, *LOWERED, *NAMES_NO_PLACE}
    assert {pattern for pattern, after_cut in patterns.items() if not after_cut} == NAMES_NO_PLACE
    for where in ELSEWHERE.values():
        assert (Path(__file__).parents[4] / where).exists(), where


@pytest.mark.parametrize("by_person", [True, False])
def test_every_file_is_lowered(tmp_path: Path, by_person: bool) -> None:
    """All files speak of the whole log, and then half of it is left. Those that a power cut cannot make wrong stay then."""
    store = QueueStore(tmp_path / "store", segment_bytes=SEGMENT_BYTES, file_bytes=FILE_BYTES)
    layout, log = store.layout, get_log("test")
    topics = ("orders", SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, OP_TOPIC)
    for topic in topics:
        store.topic(topic, 18)
    middle = 0
    files = (
        schedule.ScheduleProgressFiles(layout, log, lambda: store.end),
        timer.TimerProgressFiles(layout, log, lambda: store.end),
        ProgressFile(layout, log, lambda: store.end),
    )
    for number in range(20):
        for topic in topics:
            store.put(topic, 2 if topic == SCHEDULE_TOPIC else 0, b"x" * 4_000)
        files[0].store(schedule.ScheduleProgress({3: number + 1}, store.end))
        files[1].store(timer.TimerProgress(number * 1_000, number + 1, store.end, 0, True))
        files[2].store(store.end)
        middle = store.end if number == 9 else middle
    start(store, recovered(store.end))
    committed_at = [
        ("g", "orders", 0, 20),
        ("h", "orders", 0, 5),
        (CHECK_GROUP, HALF_TOPIC, 0, 8),
        (CHECK_GROUP, OP_TOPIC, 0, 8),
    ]
    commit(store, committed_at)
    orders = Orders(layout, log, DiskRoom.of_nobody(log), PopConfig())
    orders.load()
    for group, offsets in (("g", [8, 12]), ("h", [3, 9])):
        orders.put(OrderKey("orders", group, 0), first_pop(1, 1, offsets, 1))
    orders.store()
    orders.close()
    (layout.own / "dispatchers").mkdir()
    for name in ("index", "mine"):
        path = layout.own / "dispatchers" / f"{name}.json"
        DispatchState(path, store.end, 1, 1, True, [(middle - 10, middle + 10), (middle + 10, store.end)]).save()
    ProducerSnapshot(store.end, b"").save(layout.producers)
    layout.set_aside.mkdir()
    aside = [{"at": 1, "why": "full", "physical_offset": place} for place in (middle - 1, middle)]
    (layout.set_aside / "timer.json").write_text(json.dumps({"count": 2, "messages": aside}))
    was_shown = store.end
    cut(store, middle)
    if by_person:
        note_cut(layout, middle, "repair --cut", 1)
    start(store, recovered(middle), shown=was_shown)
    half = 0 if by_person else 8
    assert committed(store) == {
        ("g", "orders", 0): 10,
        ("h", "orders", 0): 5,
        (CHECK_GROUP, HALF_TOPIC, 0): half,
        (CHECK_GROUP, OP_TOPIC, 0): half,
    }
    found = schedule.ScheduleProgressFiles(layout, log).load()
    assert found.offsets.get(3, 0) <= 10
    assert found.log <= middle
    waits = timer.TimerProgressFiles(layout, log).load()
    assert (waits.queue_offset <= 10, waits.read_ms <= 9_000, waits.log <= middle, waits.is_whole) == (
        True,
        True,
        True,
        False,
    )
    assert (ProgressFile(layout, log, lambda: 0).load() or 0) <= middle
    assert set(journal.read(layout)) == {("orders", "h")}
    for name in ("index", "mine"):
        state = DispatchState.load(layout.own / "dispatchers" / f"{name}.json", log)
        assert (state.position, state.cut_to, state.skipped) == (middle, middle, [(middle - 10, middle)])
    assert not layout.producers.exists()
    assert [one["physical_offset"] for one in listed(layout.set_aside)] == [middle - 1]
    assert start(store, recovered(middle), shown=middle)["lowered_now"] is None
