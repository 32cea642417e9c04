"""Goal: wheel and timer log keep what is put into them in RocketMQ's bytes, in slots and chains, across files and openings.

Method: hypothesis puts messages into slots in batches, with files of a few units, and cuts the log at an earlier end, as a
restart does; a dictionary is the model. The columns of numbers are compared with Python's own parsing.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq import counting, failpoints
from commitmq.counting import OTHER, CountReader, CountTable
from commitmq.format.timer import (
    WHEEL_BYTES,
    TimerCheck,
    TimerFiller,
    TimerUnit,
    decode_check,
    decode_slot,
    decode_unit,
    encode_check,
)
from commitmq.log import get_log
from commitmq.semantics.timer import TimerRules, slot_index
from commitmq.store.layout import StoreLayout
from commitmq.store.log.append import longs
from commitmq.workers.timer.incoming import Incoming, slots_of
from commitmq.workers.timer.process import TimerMetrics
from commitmq.workers.timer.progress import TimerProgress, TimerProgressFiles
from commitmq.workers.timer.wheel import DamagedTimerLogError, TimerIndex
from small_disk import fill, room, small_disk
from timer_model import slot_time

START_MS = 1_795_000_000_000
FILE_BYTES = 52 * 5 + 20
SPAWN = multiprocessing.get_context("spawn")


def incoming(count: int, first: int) -> Incoming:
    numbers = first + np.arange(count, dtype=np.int64)
    zeros = np.zeros(count, np.int64)
    return Incoming(
        first + count,
        numbers,
        numbers * 100,
        zeros + 100,
        zeros,
        zeros,
        zeros,
        zeros + 7,
        zeros.astype(np.bool_),
        zeros,
        [],
    )


def chain(index: TimerIndex, slot_ms: int) -> list[int]:
    """Physical offsets of the messages of a slot, the oldest first."""
    positions = index.log.chain(index.newest(slot_ms), slot_ms)
    return [int(one) for one in index.log.units(positions)["physical_offset"]][::-1]


BATCHES = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None)
@given(batches=BATCHES, cut=st.integers(0, 6))
def test_slots_and_chains(tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], cut: int) -> None:
    layout = StoreLayout(tmp_path_factory.mktemp("timer"))
    index = TimerIndex.make_empty(layout, FILE_BYTES)
    model: dict[int, list[int]] = {}
    done, kept, end = 0, {}, 0
    for number, batch in enumerate(batches):
        if number == cut:
            index.flush()
            kept, end = {slot: list(messages) for slot, messages in model.items()}, index.log.end
        slots = START_MS + 1000 * np.array(batch, np.int64)
        index.add(incoming(len(batch), done), slots, np.zeros(len(batch), np.bool_), START_MS)
        for offset, slot in enumerate(slots.tolist()):
            model.setdefault(slot, []).append((done + offset) * 100)
        done += len(batch)
    for slot, messages in model.items():
        assert chain(index, slot) == messages
    assert index.wheel.count(START_MS // 1000) == done
    assert index.next_slot_ms(START_MS, START_MS + 20_000) == min(model)
    index.flush()
    check_bytes(layout, model)
    if cut >= len(batches):
        kept, end = model, index.log.end
    again = TimerIndex.open(layout, FILE_BYTES, TimerProgress(START_MS, log_end=end, is_whole=True))
    for slot in range(START_MS, START_MS + 9_000, 1000):
        assert (chain(again, slot) if again.newest(slot) >= 0 else []) == kept.get(slot, [])
    assert again.wheel.count(START_MS // 1000) == sum(map(len, kept.values()))
    check_bytes(layout, kept)


def check_bytes(layout: StoreLayout, model: dict[int, list[int]]) -> None:
    """Read with the decoders of single slots and units: every unit, and no other, in files that end with a filler."""
    wheel = (layout.root / "timerwheel").read_bytes()
    assert len(wheel) == WHEEL_BYTES
    found = []
    files = sorted((layout.root / "timerlog").iterdir())
    for path in files:
        data = path.read_bytes()
        assert len(data) == FILE_BYTES
        for at in range(0, len(data), 52):
            unit = decode_unit(data, at)
            if not isinstance(unit, TimerUnit):
                assert unit is None or isinstance(unit, TimerFiller)
                assert (unit is None) == (path == files[-1]), "a filler where another file follows"
                break
            found.append(unit.physical_offset)
    assert sorted(found) == sorted(one for messages in model.values() for one in messages)
    for slot_ms, messages in model.items():
        slot = decode_slot(wheel, slot_index(slot_ms))
        assert (slot.time, slot.messages, slot.magic) == (slot_ms // 1000, len(messages), 0)


def test_a_damaged_unit_is_found(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    index = TimerIndex.make_empty(layout, FILE_BYTES)
    index.add(incoming(3, 0), np.full(3, START_MS), np.zeros(3, np.bool_), START_MS)
    index.flush()
    path = layout.root / "timerlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[52 + 12 : 52 + 16] = b"\xff" * 4
    path.write_bytes(data)
    again = TimerIndex.open(layout, FILE_BYTES, TimerProgress(START_MS, log_end=index.log.end, is_whole=True))
    with pytest.raises(DamagedTimerLogError):
        chain(again, START_MS)


def test_units_without_room_do_not_count_and_are_put_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = StoreLayout(tmp_path)
    index = TimerIndex.make_empty(layout, FILE_BYTES)
    told: list[int] = []
    index.on_add = lambda hashes, _steps: told.append(len(hashes))
    slots, no_rolls = START_MS + 1000 * (np.arange(13) % 4), np.zeros(13, np.bool_)
    for place in ("disk.resize.timerlog:before", "timerlog.write", "timerlog.write@3"):
        name, _, hit = place.partition("@")
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"{name}=errno:ENOSPC@{hit or 1}"))
        monkeypatch.setattr(failpoints, "ACTIVE", True)
        with pytest.raises(OSError, match="No space"):
            index.add(incoming(13, 0), slots, no_rolls, START_MS)
        monkeypatch.setattr(failpoints, "ACTIVE", False)
        assert (index.log.end, index.wheel.count(START_MS // 1000), told) == (0, 0, [])
    index.add(incoming(13, 0), slots, no_rolls, START_MS)
    assert [chain(index, START_MS + 1000 * slot) for slot in range(4)] == [
        list(range(100 * slot, 1300, 400)) for slot in range(4)
    ]
    index.flush()
    check_bytes(layout, {START_MS + 1000 * slot: list(range(100 * slot, 1300, 400)) for slot in range(4)})
    assert told == [13]


def test_no_look_into_a_hole_of_the_timer_log_on_a_full_disk(tmp_path: Path) -> None:
    """It would end the process by SIGBUS: so another one looks."""
    with small_disk(tmp_path / "disk") as folder:
        layout = StoreLayout(folder)
        file_bytes = 52 * 5_000 + 20
        index = TimerIndex.make_empty(layout, file_bytes)
        index.add(incoming(3, 0), np.full(3, START_MS), np.zeros(3, np.bool_), START_MS)
        index.flush()
        end = index.log.end
        index.add(incoming(3, 3), np.full(3, START_MS + 1000), np.zeros(3, np.bool_), START_MS)
        index.flush()
        fill(folder)
        looks = SPAWN.Process(target=open_and_damage, args=(folder, file_bytes, end))
        looks.start()
        looks.join(60)
        assert looks.exitcode == 0


def open_and_damage(folder: Path, file_bytes: int, end: int) -> None:
    """Open with the later units cut off, and with positions that name units in a hole, as a torn file has them."""
    layout = StoreLayout(folder)
    index = TimerIndex.open(layout, file_bytes, TimerProgress(START_MS, log_end=end, is_whole=True))
    assert chain(index, START_MS) == [0, 100, 200]
    in_hole = 52 * 4_000
    for look in (
        lambda: index.log.units(np.array([in_hole])),
        lambda: index.log.chain(in_hole, START_MS),
        lambda: index.log.check(np.array([in_hole]), np.array([START_MS])),
    ):
        with pytest.raises(DamagedTimerLogError):
            look()
    index.log.end = in_hole
    assert len(index.log.waiting(START_MS)) == 3
    index.log.cut()


@given(st.lists(st.integers(0, 8 * 86_400_000), min_size=1), st.sampled_from([2, 21_600, 172_800]))
def test_rolls_are_the_rule(ahead: list[int], window: int) -> None:
    rules = TimerRules(roll_window_slots=window)
    out = START_MS + np.array(ahead, np.int64) // 1000 * 1000
    times, rolls = slots_of(out, START_MS, rules)
    assert list(zip(times.tolist(), rolls.tolist(), strict=True)) == [
        slot_time(one, START_MS, rules) for one in out.tolist()
    ]


@given(st.lists(st.one_of(st.integers(-(1 << 64), 1 << 64).map(str), st.text("+-0123456789 x", max_size=22))))
def test_numbers_are_javas(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(one) for one in encoded], np.int64)
    starts = np.cumsum(lengths) - lengths
    numbers, good = longs(np.frombuffer(b"".join(encoded) + b"?", np.uint8), starts, lengths)
    for text, number, is_good in zip(texts, numbers.tolist(), good.tolist(), strict=True):
        digits = text[1:] if text[:1] in ("+", "-") else text
        wanted = digits.isdigit() and -(1 << 63) <= int(text) < 1 << 63
        assert (is_good, number) == (wanted, int(text) if wanted else 0), text


def test_rocketmqs_positions_count_where_its_version_is_newer(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir()
    layout.own.mkdir()
    files = TimerProgressFiles(layout, get_log("test"))
    assert files.load() == TimerProgress()
    mine = TimerProgress(5_000, 7, 100, 520, is_whole=True)
    files.store(mine)
    assert TimerProgressFiles(layout, get_log("test")).load() == mine
    check = bytearray((layout.config / "timercheck").read_bytes())
    assert len(check) == 4_096
    check[40:48] = b"\0" * 8
    (layout.config / "timercheck").write_bytes(check)
    assert TimerProgressFiles(layout, get_log("test")).load() == TimerProgress(5_000, 7)


def test_timercheck_has_each_position_in_its_place(tmp_path: Path) -> None:
    """While the wheel is made again RocketMQ shall read from the first message on; of two offsets the lower one counts."""
    layout = StoreLayout(tmp_path)
    layout.config.mkdir()
    layout.own.mkdir()
    files, path = TimerProgressFiles(layout, get_log("test")), layout.config / "timercheck"
    files.store(TimerProgress(5_000, 7, 100, 520, is_whole=True))
    check = decode_check(path.read_bytes())
    assert check[:5] == (5_000, 520, 7, 7, 0)
    assert check.counter == 1
    files.store(TimerProgress(5_000, 7, 100), first_offset=3)
    assert decode_check(path.read_bytes())[:4] == (5_000, 0, 3, 3)
    for offset, master in ((7, 4), (4, 7)):
        path.write_bytes(encode_check(TimerCheck(6_000, 520, offset, master, 0, 1, 9)))
        assert TimerProgressFiles(layout, get_log("test")).load() == TimerProgress(6_000, 4), (
            "RocketMQ's versions are not ours"
        )


@pytest.mark.parametrize("name", ["config/timercheck", "commitmq/timer.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"\x7f" * 56, b"\xff" * 20, b'{"versions":7}', b'{"versions":[[0,0,0]],"log":[]}']
)
def test_a_damaged_file_is_kept_aside_and_the_queue_counts(tmp_path: Path, name: str, content: bytes) -> None:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir()
    layout.own.mkdir()
    path = tmp_path / name
    for number in range(2):
        if name != "config/timercheck" and content[:1] == b"\x7f":
            return  # (of the other file)
        (layout.config / "timercheck").unlink(missing_ok=True)
        (layout.own / "timer.json").unlink(missing_ok=True)
        path.write_bytes(content)
        files = TimerProgressFiles(layout, get_log("test"))
        assert files.load() == TimerProgress(), "all that the topic has is looked at again"
        aside = path.with_name(path.name + (".damaged", ".damaged-1")[number])
        assert (aside.read_bytes(), path.exists()) == (content, False)
    mine = TimerProgress(5_000, 7, 100, 520, is_whole=True)
    files.store(mine)
    assert TimerProgressFiles(layout, get_log("test")).load() == mine
    (layout.config / "timercheck").write_bytes(b"")
    loaded = TimerProgressFiles(layout, get_log("test")).load()
    assert loaded == TimerProgress(5_000, 7, 100, 520), "timer.json alone is enough, and the wheel is made again"


def metrics_of(layout: StoreLayout, names: dict[int, str]) -> TimerMetrics:
    layout.config.mkdir(exist_ok=True)
    return TimerMetrics(layout.config / "timermetrics", get_log("test"), room(), names.get, lambda: START_MS)


def test_the_counts_of_topics_follow_from_the_timer_log(tmp_path: Path) -> None:
    """Also after a death: they are counted anew, without those whose slots have passed."""
    layout = StoreLayout(tmp_path)
    index = TimerIndex.make_empty(layout, FILE_BYTES)
    names = {7: "orders", 8: "parcels"}
    metrics = metrics_of(layout, names)
    index.on_add = metrics.add
    index.add(incoming(12, 0), START_MS + 1000 * np.arange(12), np.zeros(12, np.bool_), START_MS)
    other = incoming(3, 12)
    other.topic_hash += 1
    other.cancels[:] = [False, False, True]
    index.add(other, np.full(3, START_MS + 9_000), np.zeros(3, np.bool_), START_MS)
    assert metrics.counts() == {"orders": 12, "parcels": 1}
    index.flush()
    again = TimerIndex.open(layout, FILE_BYTES, TimerProgress(START_MS, log_end=index.log.end, is_whole=True))
    for from_ms, counts in (
        (START_MS, {"orders": 12, "parcels": 1}),
        (START_MS + 9_000, {"orders": 3, "parcels": 1}),
        (START_MS + 10_000, {"orders": 2}),
    ):
        units = again.log.waiting(from_ms)
        metrics = metrics_of(layout, names)
        metrics.begin(units["topic_hash"].astype(np.int64), again.log.steps(units["magic"].astype(np.int64)))
        assert metrics.counts() == counts


def test_timermetrics_is_rocketmqs(tmp_path: Path) -> None:
    """One line, as in the store of RocketMQ 5.4.0; the version goes on, and the file of before is kept."""
    layout = StoreLayout(tmp_path)
    metrics = metrics_of(layout, {7: "orders"})
    path = layout.config / "timermetrics"
    theirs = b'{"dataVersion":{"counter":106,"stateVersion":0,"timestamp":1795339413310},"timingCount":{}}'
    path.write_bytes(theirs)
    metrics.write_down()
    assert path.read_bytes() == theirs, "nothing has changed"
    metrics.add(np.array([7, 7, 9], np.int64), np.array([1, 1, 1], np.int64))
    metrics.write_down()
    data = json.loads(path.read_bytes())
    assert data["dataVersion"]["counter"] == 107
    assert data["timingCount"] == {"orders": {"count": 2, "timeStamp": START_MS}}
    text = b'{"dataVersion":{"counter":107,"stateVersion":0,"timestamp":%d},' % data["dataVersion"]["timestamp"]
    assert path.read_bytes() == text + b'"timingCount":{"orders":{"count":2,"timeStamp":%d}}}' % START_MS
    assert path.with_name("timermetrics.bak").read_bytes() == theirs
    metrics.add(np.array([7], np.int64), np.array([-1], np.int64))
    metrics.write_down()
    assert json.loads(path.read_bytes()) == data, "not each time"
    metrics.write_down(at_once=True)
    assert json.loads(path.read_bytes())["timingCount"]["orders"]["count"] == 1


def test_topics_that_share_a_row_of_counts_are_added_up(tmp_path: Path) -> None:
    """In whatever way their counts came: at a start, or later."""

    def waiting() -> dict[str, int]:
        reader = CountReader(tmp_path / "counts")
        rows = [(one.labels["topic"], values[0]) for _, one, values in reader.rows() if one.name == name]
        reader.close()
        return dict(rows)

    name = counting.DELAYED_WAITING.name
    names = {number: f"topic-{number}" for number in range(6)}
    table = CountTable(tmp_path / "counts", 4)
    metrics = TimerMetrics(tmp_path / "timermetrics", get_log("test"), room(), names.get, lambda: START_MS, table)
    hashes, one = np.arange(6, dtype=np.int64), np.ones(6, np.int64)
    metrics.begin(hashes, one)
    assert waiting() == {"topic-0": 1, "topic-1": 1, "topic-2": 1, "topic-3": 1, OTHER: 2}
    metrics.add(hashes, 2 * one)
    assert waiting() == {"topic-0": 3, "topic-1": 3, "topic-2": 3, "topic-3": 3, OTHER: 6}
    metrics.add(hashes[5:], -3 * one[5:])
    assert waiting()[OTHER] == 3
    metrics.begin(hashes[:5], one[:5])
    assert waiting() == {"topic-0": 1, "topic-1": 1, "topic-2": 1, "topic-3": 1, OTHER: 1}
