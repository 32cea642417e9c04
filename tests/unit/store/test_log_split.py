"""Goal: pieces of a log, read side by side, are together exactly the log, whatever the bodies in it hold.

Method: segments whose bodies hold what an adversary may put there who knows where his message will lie: headers, whole
records copied from elsewhere, whole records at the very places they name, and such a record that shares the end of the one
around it, so that its chain runs on in the true one. Readers of pieces of any size note where records begin; the truth is
where they were put. That a reader alone is fooled is shown too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.kernels import walk as kernel
from commitmq.offline.extents import Stretch, walk_extents
from commitmq.store.commit_log import CommitLog
from commitmq.store.format import Host
from commitmq.store.layout import segment_name
from commitmq.store.log_split import NO_START, Job, find_start, find_stop, pieces_of, prove
from commitmq.store.record import Record, encode_filler, encode_record

SEGMENT_BYTES = 16_384
HEAD_BYTES = 88  # before a body, with two IPv4 hosts
HOST = Host("127.0.0.1", 10911)
TRICKS = ("noise", "header", "copied", "placed", "chain", "joined")


def record(position: int, body: bytes, number: int = 0) -> bytes:
    return encode_record(
        Record("T", queue_offset=number, physical_offset=position, body=body, properties={"TAGS": "a"},
               store_timestamp=1_000, born_host=HOST, store_host=HOST)
    )  # fmt: skip


def tail_bytes() -> int:
    """What follows a body."""
    return len(record(0, b"")) - HEAD_BYTES


def body_of(trick: str, position: int, chance: random.Random) -> bytes:
    """A body for the record at ``position``."""
    at = position + HEAD_BYTES
    before = chance.randbytes(chance.randrange(40))
    if trick == "header":
        return before + record(at + len(before), b"x" * 50)[:80] + bytes(120)
    if trick == "copied":
        return before + record(chance.randrange(1 << 20), chance.randbytes(30)) + b"."
    if trick == "placed":
        return before + record(at + len(before), chance.randbytes(chance.randrange(200))) + before
    if trick == "chain":
        body = b""
        for number in range(chance.randrange(1, 6)):
            body += record(at + len(body), chance.randbytes(chance.randrange(100)), number)
        return body
    if trick == "joined":
        first = record(at, b"first")
        inner = record(at + len(first), chance.randbytes(60))
        return first + inner[: -tail_bytes()]
    return chance.randbytes(chance.randrange(600))


def build(folder: Path, tricks: Sequence[str], seed: int) -> tuple[CommitLog, list[int]]:
    """A log with a record for each of ``tricks``; and where they begin."""
    folder.mkdir(exist_ok=True)
    chance = random.Random(seed)
    segments: dict[int, bytearray] = {0: bytearray(SEGMENT_BYTES)}
    offsets: list[int] = []
    end = 0
    for trick in tricks:
        data = record(end, body_of(trick, end, chance))
        left = SEGMENT_BYTES - end % SEGMENT_BYTES
        if len(data) + 8 > left:
            segments[end - end % SEGMENT_BYTES][-left:] = encode_filler(left).ljust(left, b"\0")
            end += left
            segments[end] = bytearray(SEGMENT_BYTES)
            data = record(end, body_of(trick, end, chance))
        base = end - end % SEGMENT_BYTES
        segments[base][end - base : end - base + len(data)] = data
        offsets.append(end)
        end += len(data)
    for path in folder.iterdir():
        path.unlink()
    for base, segment in segments.items():
        (folder / segment_name(base)).write_bytes(segment)
    return CommitLog(folder, SEGMENT_BYTES), offsets


def segment_of(log: CommitLog, base: int) -> NDArray[np.uint8]:
    return np.frombuffer(log.read(base, SEGMENT_BYTES), np.uint8)


def records_in(log: CommitLog, stretch: Stretch) -> list[int]:
    out = []
    for extent in stretch.extents:
        assert not extent.damage, extent
        position = extent.start
        while position < extent.end:
            out.append(position)
            position += int.from_bytes(log.read(position, 4), "big")
    return out


def read_in_pieces(log: CommitLog, piece_bytes: int, seed: int) -> tuple[list[int], int]:
    """Where records begin, by readers that work in any order; and how many pieces were read a second time."""
    bases = log.segments()
    jobs_done = 0

    def walk(job: Job) -> Stretch:
        piece, start = job
        segment = segment_of(log, piece.base)
        start = find_start(segment, piece) if start == NO_START else start
        stop = NO_START if start == NO_START else find_stop(segment, piece)
        return walk_extents(log, segment, piece.base, bases, start, stop) if start < stop else Stretch(start, start, ())

    def run(jobs: list[Job]) -> list[Stretch]:
        nonlocal jobs_done
        jobs_done += len(jobs)
        order = list(range(len(jobs)))
        random.Random(seed).shuffle(order)
        done = {index: walk(jobs[index]) for index in order}
        return [done[index] for index in range(len(jobs))]

    pieces = pieces_of(bases, SEGMENT_BYTES, piece_bytes)
    results = prove(pieces, run)
    return [at for one in results for at in records_in(log, one)], jobs_done - len(pieces)


@given(
    tricks=st.lists(st.sampled_from(TRICKS), min_size=1, max_size=80),
    seed=st.integers(0, 1 << 30),
    piece_bytes=st.integers(92, SEGMENT_BYTES + 1),
)
@settings(max_examples=60, deadline=None)
def test_pieces_are_together_the_log(
    tmp_path_factory: pytest.TempPathFactory, tricks: list[str], seed: int, piece_bytes: int
) -> None:
    log, offsets = build(tmp_path_factory.getbasetemp() / "split", tricks, seed)
    assert read_in_pieces(log, piece_bytes, seed)[0] == offsets
    log.close()


@pytest.mark.parametrize("trick", ["chain", "joined"])
def test_a_record_in_a_body_fools_one_reader_but_not_all(tmp_path: Path, trick: str) -> None:
    """Goal: the fakes are as good as fakes can be, and it is the comparison that finds them."""
    log, offsets = build(tmp_path / "log", [trick] * 60, 7)
    fooled = 0
    for piece in pieces_of(log.segments(), SEGMENT_BYTES, 1_000):
        start = find_start(segment_of(log, piece.base), piece)
        fooled += start != NO_START and start not in offsets
    assert fooled > 5
    found, again = read_in_pieces(log, 1_000, 7)
    assert found == offsets
    assert again >= fooled
    if trick == "joined":
        # The chain that begins with the fake is whole up to the segment's end: no walk from there would notice.
        piece = next(
            one
            for one in pieces_of([0], SEGMENT_BYTES, 1_000)
            if find_start(segment_of(log, 0), one) not in (*offsets, NO_START)
        )
        start = find_start(segment_of(log, 0), piece)
        out = np.zeros(5, np.int64)
        ended = kernel.scan(segment_of(log, 0), start, SEGMENT_BYTES, 0, False, out)
        assert (ended, int(out[0]) > 20) == (kernel.WALK_BLANK, True)


def test_a_reader_that_begins_elsewhere_is_refused(tmp_path: Path) -> None:
    log, _ = build(tmp_path / "log", ["joined"] * 60, 7)
    with pytest.raises(StoreError, match="began at"):
        prove(
            pieces_of([0], SEGMENT_BYTES, 1_000),
            lambda jobs: [Stretch(piece.begin + 1, piece.stop, ()) for piece, _ in jobs],
        )
    log.close()


def test_looking_for_a_record_costs_no_more_than_its_budget() -> None:
    """Goal: things that look like long records but for their CRC do not make a search quadratic; it is given up."""
    data = bytearray(SEGMENT_BYTES)
    position = 100
    for number in range(4):
        one = bytearray(record(position, bytes(1_000), number))
        if number < 3:
            one[HEAD_BYTES] ^= 1
        data[position : position + len(one)] = one
        good, position = position, position + len(one)
    segment, out = np.frombuffer(bytes(data), np.uint8), np.zeros(5, np.int64)
    assert kernel.find_record(segment, 1, SEGMENT_BYTES, 0, 10_000, out) == good
    assert kernel.find_record(segment, 1, good, 0, 10_000, out) == -1
    assert kernel.find_record(segment, 1, SEGMENT_BYTES, 0, 2_500, out) == -2
