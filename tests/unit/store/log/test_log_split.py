"""Goal: pieces of a log, read side by side, are together exactly the log, whatever the bodies in it hold.

Method: segments whose bodies hold what an adversary may put there who knows where his message will lie: headers, whole
records copied from elsewhere, whole records at the very places they name, and such a record that shares the end of the one
around it, so that its chain runs on in the true one. Readers of pieces of any size note where records begin; the truth is
where they were put. That a reader alone is fooled is shown too.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.errors import StoreError
from commitmq.kernels.codes import WALK_BLANK
from commitmq.kernels.compiled import find_record, scan
from commitmq.offline.extents import NO_START, Job, Stretch, find_start, find_stop, pieces_of, prove, walk_extents
from commitmq.store.log.commit_log import CommitLog
from tricky_log import HEAD_BYTES, SEGMENT_BYTES, TRICKS, build, record, segment_of


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
        ended = scan(segment_of(log, 0), start, SEGMENT_BYTES, 0, False, out)
        assert (ended, int(out[0]) > 20) == (WALK_BLANK, True)


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
    assert find_record(segment, 1, SEGMENT_BYTES, 0, 10_000, out) == good
    assert find_record(segment, 1, good, 0, 10_000, out) == -1
    assert find_record(segment, 1, SEGMENT_BYTES, 0, 2_500, out) == -2
