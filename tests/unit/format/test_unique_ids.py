"""Goal: ids are unique, well-formed, and blocks and single draws come from one sequence.

Method: several threads draw single ids and blocks; the clock is set where the time part is judged.
"""

from __future__ import annotations

import threading
import time

import pytest

from commitmq.format.message_id import MAX_BLOCK, UniqueIds


def test_an_id_has_the_form_of_rocketmq() -> None:
    one = UniqueIds().next()
    assert len(one) == 32
    assert set(one) <= set("0123456789ABCDEF")


def test_single_ids_and_blocks_continue_each_other() -> None:
    ids = UniqueIds()
    first = int(ids.next()[-4:], 16)
    prefix, counter = ids.block(1000)
    after = int(ids.next()[-4:], 16)
    assert len(prefix) == 28
    assert counter == (first + 1) & 0xFFFF
    assert after == (first + 1001) & 0xFFFF


def test_threads_draw_no_id_twice() -> None:
    ids = UniqueIds()
    drawn: list[str] = []

    def draw() -> None:
        drawn.extend([ids.next() for _ in range(5000)])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 20_000


def test_two_generators_differ() -> None:
    assert UniqueIds().next()[:20] != UniqueIds().next()[:20]


@pytest.mark.parametrize("count", [0, -1, MAX_BLOCK + 1])
def test_a_block_has_bounds(count: int) -> None:
    with pytest.raises(ValueError, match="a block has"):
        UniqueIds().block(count)


@pytest.mark.parametrize(
    ("now", "expected_ms"),
    [
        ("2026-12-31T23:59:59.999+00:00", (31 * 86400 - 1) * 1000 + 999),
        ("2027-01-01T00:00:00.001+00:00", 1),
        ("2024-02-29T12:00:00.000+00:00", (28 * 86400 + 43200) * 1000),
    ],
)
def test_the_time_part_counts_from_the_months_start(
    monkeypatch: pytest.MonkeyPatch, now: str, expected_ms: int
) -> None:
    from datetime import datetime

    at_ms = round(datetime.fromisoformat(now).timestamp() * 1000)
    monkeypatch.setattr(time, "time_ns", lambda: at_ms * 1_000_000)
    assert int(UniqueIds().next()[20:28], 16) == expected_ms
    assert int(UniqueIds().block(1)[0][20:28], 16) == expected_ms
