"""Goal: a delayed message is due when its level says, and goes to its own queue in order; what RocketMQ skips is passed.

Method: real logs of messages that wait, walked for their times of delivery, and a level over their queue in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.config import load
from commitmq.format.constants import PREBLANK_SIZE
from commitmq.format.record import Record
from commitmq.log import get_log
from commitmq.semantics.delay import DELAY_LEVELS_MS, SCHEDULE_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.workers.runtime.run_making import RunMaker
from commitmq.workers.schedule.process import NEVER_MS, Level, LevelRuns
from commitmq.workers.schedule.progress import ScheduleProgress, ScheduleProgressFiles
from golden_stores import GOLDEN_SEGMENT_BYTES
from log_builder import HOST, SEGMENT_BYTES, build_log
from pending_store import PendingStore, blank
from queue_in_memory import QueueInMemory

NOW_MS = 1_795_000_000_000
PLAIN = load(None, ["commit_log.append_properties_crc=false"])
SECONDS = [1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800, 3_600, 7_200]


def delayed(number: int, level: int | str = 1, *drop: str, topic: str = SCHEDULE_TOPIC, **more: str) -> Record:
    named = {"DELAY": str(level), "REAL_TOPIC": "orders", "REAL_QID": "3", "KEYS": str(number), **more}
    kept = {name: value for name, value in named.items() if name not in drop}
    return Record(topic, properties=kept, body=b"x", store_timestamp=NOW_MS, born_host=HOST, store_host=HOST)


class Waiting:
    """Level ``number`` with ``records`` in its queue, due at ``codes``."""

    def __init__(self, folder: Path, records: Sequence[Record], codes: Sequence[int], number: int = 1, low: int = 0):
        self.records = build_log(folder, records)
        self.log = CommitLog(folder, SEGMENT_BYTES, 4)
        self.queue = QueueInMemory(self.records, codes, low)
        self.level = Level(number, low, self.queue)  # type: ignore[arg-type]
        self.reports: list[str] = []
        self._runs = RunMaker(self.log, PLAIN, lambda why, _: self.reports.append(why))

    def take(self, now_ms: int = NOW_MS, later_ms: int = 0) -> LevelRuns | None:
        """``later_ms``: by the monotonic clock, which begins at 0."""
        return self.level.take(
            now_ms, later_ms, count=99, bound=0, floor=0, runs=self._runs, log_end=7, is_moved=None
        )  # fmt: skip


def counts(portion: LevelRuns | None) -> list[tuple[str, int, int]]:
    assert portion is not None
    return [(one.topic, one.queue_id, one.run.count) for one in portion.runs]


# ---------------------------------------------------------------- when a message is due


def test_the_eighteen_levels_are_rocketmqs() -> None:
    assert list(DELAY_LEVELS_MS) == [seconds * 1_000 for seconds in SECONDS]


def test_the_time_of_delivery_is_the_time_of_storing_and_the_levels_delay(tmp_path: Path) -> None:
    """All levels, one above the last, and texts that are no level: those units have the hash of a tag, as plain ones."""
    texts: list[int | str] = [*range(1, 19), 25, "0", "-3", "x"]
    build_log(tmp_path, [delayed(n, text) for n, text in enumerate(texts)], segment_bytes=1 << 16)
    batch = LogWalker(CommitLog(tmp_path, 1 << 16), max_rows=99, max_bytes=1 << 16).walk(0, 1 << 16)
    times = batch.rows["tags_code"].tolist()
    assert times[:18] == [NOW_MS + seconds * 1_000 for seconds in SECONDS]
    assert times[18:] == [NOW_MS + 7_200_000, 0, 0, 0]


def test_a_message_of_another_topic_keeps_the_hash_of_its_tag_though_it_has_a_level(tmp_path: Path) -> None:
    """A delivered message still has DELAY."""
    build_log(tmp_path, [delayed(0, 3, topic="orders", TAGS="A")])
    batch = LogWalker(CommitLog(tmp_path, SEGMENT_BYTES), max_rows=9, max_bytes=SEGMENT_BYTES).walk(0, SEGMENT_BYTES)
    assert batch.rows["tags_code"].tolist() == [65]


class Deleted:
    """Topics that were deleted, by the place in the log where they ended."""

    def __init__(self, **floors: int) -> None:
        self.table = {name.replace("retry_", "%RETRY%"): floor for name, floor in floors.items()}
        self.dropped = 0

    def floors(self) -> dict[str, int]:
        return self.table

    def drop(self, count: int) -> None:
        self.dropped += count


def test_messages_that_went_with_their_topic_are_dropped_and_counted(tmp_path: Path) -> None:
    """Of the topic before its end alone; those of other topics, and those that a group sent back, each by its own."""
    records = [
        delayed(0),
        delayed(1, REAL_TOPIC="bills"),
        delayed(2, REAL_TOPIC="%RETRY%g", RETRY_TOPIC="orders"),
        delayed(3, REAL_TOPIC="%RETRY%h", RETRY_TOPIC="bills"),
        delayed(4),
        delayed(5, REAL_TOPIC="%RETRY%g", RETRY_TOPIC="orders"),
    ]
    waits = Waiting(tmp_path, records, [NOW_MS] * len(records))
    deleted = Deleted(orders=waits.records[4].physical_offset, retry_h=1 << 62)
    waits._runs = RunMaker(waits.log, PLAIN, lambda why, _: waits.reports.append(why), deleted)  # type: ignore[arg-type]
    portion = waits.take()
    assert sorted(counts(portion)) == [("%RETRY%g", 3, 1), ("bills", 3, 1), ("orders", 3, 1)]
    assert portion is not None
    assert (portion.behind, deleted.dropped) == (len(records), 3)
    assert not waits.reports, "none is set aside"


def test_a_level_of_which_all_messages_went_with_their_topic_passes_them(tmp_path: Path) -> None:
    waits = Waiting(tmp_path, [delayed(0), delayed(1)], [NOW_MS] * 2)
    deleted = Deleted(orders=1 << 62)
    waits._runs = RunMaker(waits.log, PLAIN, lambda why, _: waits.reports.append(why), deleted)  # type: ignore[arg-type]
    portion = waits.take()
    assert portion is not None
    assert (portion.runs, portion.behind, deleted.dropped) == ([], 2, 2)


def test_a_level_delivers_what_is_due_and_waits_for_the_rest(tmp_path: Path) -> None:
    waits = Waiting(tmp_path, [delayed(n) for n in range(3)], [NOW_MS - 5, NOW_MS, NOW_MS + 1])
    portion = waits.take()
    assert counts(portion) == [("orders", 3, 2)]
    assert portion is not None
    assert (portion.behind, portion.log, waits.level.next_due_ms) == (2, 7, NOW_MS + 1)
    waits.level.offset = portion.behind
    assert waits.take() is None
    assert counts(waits.take(NOW_MS + 1)) == [("orders", 3, 1)]


@pytest.mark.parametrize("level", range(1, 19))
def test_a_time_further_away_than_the_levels_delay_is_the_delay_from_now_on(tmp_path: Path, level: int) -> None:
    """The clock went back. (RocketMQ delivers such a message at once: early.)"""
    delay_ms, day_ms = DELAY_LEVELS_MS[level - 1], 86_400_000
    waits = Waiting(tmp_path, [delayed(0), delayed(1)], [NOW_MS + 4 * day_ms + delay_ms] * 2, level)
    assert waits.take() is None
    assert waits.level.next_due_ms <= NOW_MS + delay_ms
    assert waits.take(NOW_MS + delay_ms - 1, delay_ms - 1) is None
    assert counts(waits.take(NOW_MS - day_ms, delay_ms)) == [("orders", 3, 2)], "whatever the clock does meanwhile"


@settings(max_examples=40, deadline=None)
@given(
    level=st.integers(1, 4),
    jumps=st.lists(
        st.tuples(st.integers(0, 40_000), st.sampled_from([2_000, -2_000, 3_600_000, -3_600_000, 4 * 86_400_000])),
        max_size=4,
    ),
    sent=st.lists(st.integers(0, 60_000), min_size=1, max_size=12),
)
def test_no_jump_of_the_clock_holds_a_message_back(
    tmp_path_factory: pytest.TempPathFactory, level: int, jumps: list[tuple[int, int]], sent: list[int]
) -> None:
    """Sends at times by a clock that nobody sets, jumps of the clock that sends and level see, and looks of the level as the
    process does. A forward jump makes messages due; a jump back never lets one wait longer than its delay from then on.
    """
    delay_ms, sent = DELAY_LEVELS_MS[level - 1], sorted(sent)
    times = range(0, 120_000, 100)
    ahead = [sum(by for at, by in jumps if at <= time) for time in times]
    codes = [NOW_MS + time + ahead[time // 100] + delay_ms for time in sent]
    waits = Waiting(tmp_path_factory.mktemp("level"), [delayed(n) for n in range(len(sent))], codes, level)
    rows = waits.queue.rows
    done: dict[int, int] = {}
    for tick, time in enumerate(times):
        stored = bisect_right(sent, time)
        waits.queue.rows = rows[:stored]
        if tick and ahead[tick] < ahead[tick - 1]:
            waits.level.mark(stored, time)
        portion = waits.take(NOW_MS + time + ahead[tick], time)
        if portion is not None:
            done.update((number, time) for number in range(waits.level.offset, portion.behind))
            waits.level.offset = portion.behind
    assert len(done) == len(sent), "in time, whatever the clock says"
    for number, at in done.items():
        backs = [jump for jump, by in jumps if by < 0 and jump >= sent[number]]
        assert at <= max([sent[number], *backs]) + delay_ms + 200
        if all(by < 0 for _, by in jumps):
            assert at >= sent[number] + delay_ms - 100, "no jump back makes a message early"


def test_an_offset_outside_of_the_queue_goes_to_its_nearer_end(tmp_path: Path) -> None:
    waits = Waiting(tmp_path, [delayed(n) for n in range(2)], [NOW_MS, NOW_MS], low=40)
    waits.level.offset = 3
    portion = waits.take()
    assert portion is not None
    assert (counts(portion), portion.behind) == ([("orders", 3, 2)], 42)
    waits.level.offset = 99
    assert (waits.take(), waits.level.offset, waits.level.next_due_ms) == (None, 42, NEVER_MS)


def test_levels_that_the_file_does_not_name_begin_at_the_front(tmp_path: Path) -> None:
    """After kill -9 of RocketMQ a level with waiting messages may be missing; what is no level counts for nothing."""
    layout = StoreLayout(tmp_path)
    layout.config.mkdir()
    (layout.config / "delayOffset.json").write_text('{"offsetTable":{1:17,3:3,19:4,0:1,2:-5}}')
    assert ScheduleProgressFiles(layout, get_log("test")).load().offsets == {1: 17, 3: 3}
    (layout.config / "delayOffset.json").unlink()
    assert ScheduleProgressFiles(layout, get_log("test")).load().offsets == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "\0" * 20,
        "[1]",
        "null",
        "0",
        "[" * 90_000,
        '{"offsetTable":{1:1e999},"versions":7}',
        '{"offsetTable":{1:"x"},"versions":7}',
    ],
)
def test_a_damaged_file_is_kept_aside_and_what_is_left_counts(tmp_path: Path, content: str) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir()
    layout.own.mkdir()
    theirs, ours = layout.config / "delayOffset.json", layout.own / "schedule.json"
    files = ScheduleProgressFiles(layout, get_log("test"))
    for number in (1, 2):
        files.store(ScheduleProgress({1: 10 * number, 2: number}, 1_000 * number))

    def load() -> ScheduleProgress:
        return ScheduleProgressFiles(layout, get_log("test")).load()

    (theirs.with_name("delayOffset.json.bak")).unlink()
    theirs.write_text(content)
    assert load() == ScheduleProgress({1: 20, 2: 2}, 2_000), "schedule.json alone is enough"
    files.store(ScheduleProgress({1: 10, 2: 1}, 1_000))
    files.store(ScheduleProgress({1: 20, 2: 2}, 2_000))
    theirs.with_name("delayOffset.json.damaged").unlink()
    theirs.write_text(content)
    assert load() == ScheduleProgress({1: 20, 2: 2}, 2_000), "schedule.json knows the generation before"
    assert theirs.with_name("delayOffset.json.damaged").read_text() == content
    ours.write_text(content)
    assert load() == ScheduleProgress({1: 10, 2: 1}, 1_000), "both generations before"
    for path in (theirs, ours):
        path.with_name(path.name + ".bak").write_text(content)
    assert load() == ScheduleProgress(), "all messages are looked at again"
    assert len(list(tmp_path.glob("*/*.damaged*"))) == 4


def test_a_delivered_message_has_rocketmqs_bytes(pending: PendingStore) -> None:
    """DELAY, REAL_TOPIC, REAL_QID and WAIT stay, and so do flag, sysFlag, times of birth, host and tries."""
    log = CommitLog(pending.root / "commitlog", GOLDEN_SEGMENT_BYTES, 4)
    seen = 0
    for stored in pending.records:
        if stored.topic in (SCHEDULE_TOPIC, "%DLQ%Pending_retry") or "DELAY" not in stored.properties:
            continue
        alike = [one for one in pending.of(SCHEDULE_TOPIC) if one.properties == stored.properties]
        if len(alike) != 1:
            continue
        (source,) = alike
        level = Level(1, 0, QueueInMemory([source], [NOW_MS]))  # type: ignore[arg-type]
        runs = RunMaker(log, PLAIN, pytest.fail)  # type: ignore[arg-type]
        portion = level.take(NOW_MS, 0, count=9, bound=0, floor=0, runs=runs, log_end=0, is_moved=None)
        assert counts(portion) == [(stored.topic, stored.queue_id, 1)]
        assert portion is not None
        assert portion.runs[0].run.data.tobytes() == blank(pending.data[stored.physical_offset])
        seen += 1
    assert seen > 10


# ---------------------------------------------------------------- what is skipped


@pytest.mark.parametrize(
    "wrong",
    [
        delayed(1, 1, "REAL_TOPIC"),
        delayed(1, 1, "REAL_QID"),
        delayed(1, REAL_QID="x"),
        delayed(1, REAL_TOPIC="RMQ_SYS_TRANS_HALF_TOPIC"),
    ],
    ids=["no topic", "no queue", "no number", "half topic"],
)
def test_a_message_that_belongs_nowhere_is_passed_and_reported(tmp_path: Path, wrong: Record) -> None:
    waits = Waiting(tmp_path, [delayed(0), wrong, delayed(2)], [NOW_MS] * 3)
    portion = waits.take()
    assert portion is not None
    assert (sum(count for _, _, count in counts(portion)), portion.behind) == (2, 3)
    assert {(topic, queue) for topic, queue, _ in counts(portion)} == {("orders", 3)}
    assert waits.reports == ["its record does not say where it belongs"]


def test_a_message_whose_record_has_expired_or_is_none_is_passed_and_reported(tmp_path: Path) -> None:
    large = [replace(delayed(n), body=b"x" * 2_500) for n in range(3)]  # one in each segment
    waits = Waiting(tmp_path, large, [NOW_MS] * 3)
    (tmp_path / f"{0:020d}").unlink()
    waits.queue.rows["size"][2] += 1
    portion = waits.take()
    assert portion is not None
    assert (counts(portion), portion.behind) == ([("orders", 3, 1)], 3)
    assert waits.reports == ["its record has expired", "its record does not say where it belongs"]


def test_a_unit_that_fills_a_gap_is_passed_in_silence(tmp_path: Path) -> None:
    waits = Waiting(tmp_path, [delayed(0), delayed(1)], [NOW_MS] * 2)
    waits.queue.rows[0] = (0, PREBLANK_SIZE, 0)
    first = waits.take()
    assert first is not None
    waits.level.offset = first.behind
    assert (counts(first), counts(waits.take()), waits.reports) == ([], [("orders", 3, 1)], [])
