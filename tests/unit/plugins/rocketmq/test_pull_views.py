"""Goal: the records of a pull are sent in as few parts of the log as they lie in, and no part crosses a segment.

Method: random units; the parts by arrays against the parts by a loop.
"""

from __future__ import annotations

import random

import pytest

from commitmq.format.units import UNIT_STRUCT
from commitmq_plugins.rocketmq.broker.pulling import _neighbours

SEGMENT = 4_096


def by_hand(units: list[tuple[int, int]]) -> list[tuple[int, int]]:
    parts: list[list[int]] = []
    for offset, size in units:
        if parts and parts[-1][1] == offset and offset % SEGMENT:
            parts[-1][1] += size
        else:
            parts.append([offset, offset + size])
    return [(begin, end) for begin, end in parts]


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_as_long_as_they_can_be(seed: int) -> None:
    rng = random.Random(seed)
    at, units = 10 * SEGMENT, []
    for _ in range(200):
        size = rng.choice((91, 200, 512))
        if at % SEGMENT + size > SEGMENT:
            at += SEGMENT - at % SEGMENT
        if rng.random() < 0.6:
            units.append((at, size))
        at += size
    data = b"".join(UNIT_STRUCT.pack(offset, size, 0) for offset, size in units)
    found = _neighbours(data, SEGMENT)
    assert found == by_hand(units)
    assert all(begin // SEGMENT == (end - 1) // SEGMENT for begin, end in found)


def test_a_segment_that_is_full_to_the_end_is_a_part_of_its_own() -> None:
    units = [(0, SEGMENT), (SEGMENT, 100), (SEGMENT + 100, 50)]
    data = b"".join(UNIT_STRUCT.pack(offset, size, 0) for offset, size in units)
    assert _neighbours(data, SEGMENT) == [(0, SEGMENT), (SEGMENT, SEGMENT + 150)]
