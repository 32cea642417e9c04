"""Goal: each message's id names the place of its own record, also where a run was stored in several parts.

Method: random sizes and parts; places one by one against a sum by hand, and those of several at once against them.
"""

from __future__ import annotations

import random

import pytest

from commitmq_plugins.rocketmq.broker.runs import RecordOffsets


@pytest.mark.parametrize("seed", range(20))
def test_places_of_all_parts(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(91, 500) for _ in range(60)]
    parts, expected, left, at = [], [], 60, 1_000
    while left:
        count = rng.randrange(1, left + 1)
        parts.append([count, at])
        for size in sizes[60 - left : 60 - left + count]:
            expected.append(at)
            at += size
        left -= count
        at += 10_000  # the next segment
    answer = {"parts": parts, "physical_offset": 1_000}
    one_by_one, at_once = RecordOffsets(answer), RecordOffsets(answer)
    assert [one_by_one.next(size) for size in sizes] == expected
    found: list[int] = []
    while len(found) < 60:
        found += at_once.next_of(sizes[len(found) : len(found) + rng.randrange(1, 20)])
    assert found == expected


def test_a_message_alone_lies_where_the_answer_says() -> None:
    assert RecordOffsets({"physical_offset": 77}).next(100) == 77
