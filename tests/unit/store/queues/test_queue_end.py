"""Goal: the end of a queue that is found with a few reads is the end that reading every unit finds, whatever lies behind.

Method: a queue's files are written unit by unit as crashes leave them: good units up to where everything is durable,
then any mix of zeros, later units and stale ones. Two copies are recovered, one with the log's proof and one by reading
everything, and must be equal in state and bytes. Reads are counted where a long queue must cost no more than a short one.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.files.fd_cache import FdCache
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import LogProof, Proof, list_queues
from golden_stores import GOLDEN_QUEUE_FILE_BYTES, GOLDEN_SEGMENT_BYTES, GoldenStore
from log_builder import SEGMENT_BYTES, build_log, message, unit
from queue_store import QueueStore

FILE_BYTES = 200  # ten units
RECORD_BYTES = 100
Unit = tuple[int, int]  # physical offset, size


def write_units(folder: Path, first: int, units: list[bytes], file_bytes: int = FILE_BYTES) -> None:
    """Files that hold ``units`` from queue offset ``first`` on; places before it in its file are pre-blank."""
    blank = unit(0, 0x7FFFFFFF)
    data = blank * (first % (file_bytes // 20)) + b"".join(units)
    base = (first - first % (file_bytes // 20)) * 20
    folder.mkdir(parents=True)
    for at in range(0, len(data), file_bytes):
        (folder / f"{base + at:020d}").write_bytes(data[at : at + file_bytes].ljust(file_bytes, b"\0"))


def proof_of(records: dict[int, Unit]) -> Proof:
    """The proof of a log that holds exactly these records, by queue offset."""
    return lambda queue_offset, physical, size: records.get(queue_offset) == (physical, size)


def state(queue: ConsumeQueue) -> tuple[int, int, int, bool]:
    return queue.min_offset, queue.max_offset, queue.max_physical_offset, queue.has_files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


@st.composite
def damaged_queues(draw: st.DrawFn) -> tuple[int, list[bytes], dict[int, Unit], int | None]:
    """First queue offset, units as they lie in the files, the log's records of the queue, and the limit."""
    first = draw(st.sampled_from([0, 0, 3, 10, 17]))
    gaps = draw(st.lists(st.integers(0, 3), max_size=40))
    records: dict[int, Unit] = {}
    at = draw(st.integers(0, 500))
    for number, gap in enumerate(gaps):
        records[first + number] = (at, RECORD_BYTES)
        at += RECORD_BYTES * (1 + gap)
    limit = draw(st.one_of(st.none(), st.integers(0, at + RECORD_BYTES)))
    places = [records[first + number] for number in range(len(gaps))]
    kept = [place for place in places if limit is None or place[0] < limit]
    units = [unit(*place) for place in kept]
    for number in range(len(kept), len(kept) + draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["zero", "stale", "stale", "later"]))
        if kind == "later" and limit is not None and number < len(places):
            units.append(unit(*places[number]))
        elif kind == "stale":
            relic = draw(st.integers(0, 12_000))
            # A relic is another record than the one of this number that the log holds.
            units.append(unit(relic + (records.get(first + number) == (relic, RECORD_BYTES)), RECORD_BYTES))
        else:
            units.append(bytes(20))
    return first, units, records, limit


@settings(max_examples=400, deadline=None)
@given(damaged_queues())
def test_a_few_reads_find_what_reading_everything_finds(
    tmp_path_factory: pytest.TempPathFactory, damaged: tuple[int, list[bytes], dict[int, Unit], int | None]
) -> None:
    first, units, records, limit = damaged
    folder = tmp_path_factory.mktemp("queue")
    write_units(folder / "plain", first, units)
    shutil.copytree(folder / "plain", folder / "proven")
    shutil.copytree(folder / "plain", folder / "untouched")
    fds = FdCache(4)
    plain = ConsumeQueue(folder / "plain", FILE_BYTES, fds)
    # From the first file on. (What lies behind the end is never more than two files, where a scan begins in the third-last.)
    plain._scan(plain._list_files(repair=True), 0)
    if limit is not None:
        plain.truncate(limit)
    else:
        plain._settle(plain._list_files(repair=True), durable=True)
    reader = ConsumeQueue(folder / "proven", FILE_BYTES, fds)
    reader.refresh(limit, proof=proof_of(records))
    assert contents(folder / "proven") == contents(folder / "untouched")
    proven = ConsumeQueue(folder / "proven", FILE_BYTES, fds)
    proven.recover(limit, proof=proof_of(records))
    fds.close()
    assert state(proven) == state(plain)
    assert contents(folder / "proven") == contents(folder / "plain")
    if plain.has_files:
        assert (reader.max_offset, reader.max_physical_offset) == (plain.max_offset, plain.max_physical_offset)


def test_units_that_only_look_good_are_not_believed(tmp_path: Path) -> None:
    """Relics that grow on from the good units look like them; one that lies below the one before is where a scan ends."""
    records = {number: (number * 100, 100) for number in range(4)}
    relics = [unit(250, 100), *(unit(1_000 + 100 * number, 100) for number in range(5))]
    write_units(tmp_path / "q", 0, [*(unit(*records[number]) for number in range(4)), *relics])
    believing = ConsumeQueue(tmp_path / "q", FILE_BYTES, FdCache(2))
    assert believing.refresh(proof=lambda *_unit: True) == 10, "the search itself is misled, or this test shows nothing"
    queue = ConsumeQueue(tmp_path / "q", FILE_BYTES, FdCache(2))
    queue.recover(proof=proof_of(records))
    assert (queue.max_offset, queue.max_physical_offset) == (4, 400)


# ---------------------------------------------------------------- what it costs


class Calls:
    """System calls of the store's modules, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.count = dict.fromkeys(names, 0)
        self.read_bytes = 0
        for name in names:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: object) -> object:
        def call(*arguments: object, **named: object) -> object:
            self.count[name] += 1
            result = real(*arguments, **named)  # type: ignore[operator]
            if name == "pread":
                self.read_bytes += len(result)
            return result

        return call


def long_queue(folder: Path, count: int, file_bytes: int) -> dict[int, Unit]:
    queue = ConsumeQueue(folder, file_bytes, FdCache(4))
    queue.append_units(0, b"".join(unit(number * 100, 100) for number in range(count)))
    queue.flush()
    return {number: (number * 100, 100) for number in (count - 1, count // 2 - 1)}


def test_a_long_queue_costs_no_more_than_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_bytes = 6_000_000
    records = long_queue(tmp_path / "q", 700_000, file_bytes)
    calls = Calls(monkeypatch, "pread", "pwrite", "open", "scandir")
    queue = ConsumeQueue(tmp_path / "q", file_bytes, FdCache(4))
    queue.recover(proof=proof_of(records))
    assert (queue.max_offset, queue.max_physical_offset) == (700_000, 70_000_000)
    assert calls.count["pread"] <= 6
    # Where holes begin is the file system's to say; what it calls data behind the end is looked at, for relics.
    assert calls.read_bytes <= 16 * 1_024
    assert calls.count == {**calls.count, "open": 1, "scandir": 1, "pwrite": 0}
    # A cut in the middle of a file is found by bisection; what is behind is read once, to be zeroed.
    assert queue.refresh(35_000_000, proof=proof_of(records)) == 350_000
    assert calls.count["pread"] <= 40
    assert calls.read_bytes <= 24 * 1_024


def test_zeroing_takes_no_blocks(tmp_path: Path) -> None:
    records = long_queue(tmp_path / "q", 1_000, 6_000_000)
    before = os.stat(tmp_path / "q" / f"{0:020d}").st_blocks
    queue = ConsumeQueue(tmp_path / "q", 6_000_000, FdCache(4))
    queue.recover(50_000, proof=proof_of(records))
    queue.append_units(500, unit(50_000, 100))
    queue.truncate(50_000)
    assert queue.max_offset == 500
    assert os.stat(tmp_path / "q" / f"{0:020d}").st_blocks <= before


# ---------------------------------------------------------------- the log's word


def test_the_log_knows_its_records(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    generator = random.Random(5)
    topics = ["a", "b", "t" * 200, "ü"]
    for _ in range(200):
        store.put(generator.choice(topics), generator.randrange(2), generator.randbytes(generator.randrange(1, 900)))
    proof = LogProof(store.layout.commit_log, store.segment_bytes)
    every = [record for records in store.records.values() for record in records]
    for record in every:
        check = proof.of(record.topic, record.queue_id)
        assert check(record.queue_offset, record.physical_offset, record.total_size)
        assert not check(record.queue_offset + 1, record.physical_offset, record.total_size)
        assert not check(record.queue_offset, record.physical_offset, record.total_size - 1)
        assert not check(record.queue_offset, record.physical_offset + 1, record.total_size)
        assert not proof.of(record.topic, record.queue_id + 1)(
            record.queue_offset, record.physical_offset, record.total_size
        )
        for other in ("c", record.topic + "x", record.topic[:-1], "x" * 300):
            assert not proof.of(other, record.queue_id)(record.queue_offset, record.physical_offset, record.total_size)
    assert not proof.of("a", 0)(0, store.end + 10 * store.segment_bytes, 100), "behind the log"
    proof.close()


def test_what_expired_counts_as_proven(tmp_path: Path) -> None:
    build_log(tmp_path, [message(number, size=3_000) for number in range(3)])
    (tmp_path / f"{0:020d}").unlink()
    check = LogProof(tmp_path, SEGMENT_BYTES).of("T", 0)
    assert check(0, 0, 100)
    assert not check(7, SEGMENT_BYTES + 1, 100)


def test_every_queue_of_the_golden_stores_is_proven(golden: GoldenStore) -> None:
    proof = LogProof(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES)
    for topic, queue_id, folder in list_queues(golden.layout.consume_queue):
        plain = ConsumeQueue(folder, GOLDEN_QUEUE_FILE_BYTES, FdCache(2))
        plain.refresh()
        asked: list[bool] = []

        known = proof.of(topic, queue_id)

        def check(*place: int, known: Proof = known, asked: list[bool] = asked) -> bool:
            asked.append(known(*place))
            return asked[-1]

        other = ConsumeQueue(folder, GOLDEN_QUEUE_FILE_BYTES, FdCache(2))
        assert other.refresh(proof=check) == plain.max_offset
        assert asked == [True], f"{topic} {queue_id}"
