"""Goal: a live producer of the group is asked, each in its turn, and the number of producers is bounded.

Method: registrations with a clock that is handed in.
"""

from __future__ import annotations

import pytest

from commitmq.errors import ProtocolError
from commitmq.workers.transaction.producers import Producers


def test_producers_of_a_group_take_turns() -> None:
    producers = Producers(timeout_ms=100, most=10)
    for name in (b"a", b"b", b"c"):
        producers.register(name, "g", 0)
    producers.register(b"x", "h", 0)
    assert [producers.pick("g", 1, lambda _: True) for _ in range(4)] == [b"a", b"b", b"c", b"a"]
    assert producers.pick("h", 1, lambda _: True) == b"x"
    assert producers.pick("none", 1, lambda _: True) is None


def test_one_that_is_silent_or_gone_is_not_asked() -> None:
    producers = Producers(timeout_ms=100, most=10)
    producers.register(b"a", "g", 0)
    producers.register(b"b", "g", 50)
    assert producers.pick("g", 120, lambda _: True) == b"b"
    assert producers.pick("g", 120, lambda peer: peer != b"b") is None
    producers.register(b"a", "g", 130)
    assert producers.pick("g", 160, lambda _: True) == b"a"
    producers.leave(b"a")
    producers.leave(b"a")
    assert producers.pick("g", 160, lambda _: True) is None


def test_a_gateway_has_many_groups() -> None:
    producers = Producers(timeout_ms=100, most=10)
    producers.register(b"a", "g", 0)
    producers.register(b"a", "h", 50)
    assert [producers.pick(group, 60, lambda _: True) for group in ("g", "h")] == [b"a", b"a"]
    producers.expire(120)
    assert [producers.pick(group, 120, lambda _: True) for group in ("g", "h")] == [None, b"a"], "each has a time"
    producers.register(b"a", "g", 120)
    producers.leave(b"a", "h")
    assert len(producers) == 1
    producers.leave(b"a")
    assert len(producers) == 0


def test_their_number_is_bounded() -> None:
    producers = Producers(timeout_ms=100, most=2)
    producers.register(b"a", "g", 0)
    producers.register(b"b", "g", 50)
    with pytest.raises(ProtocolError, match="max_producers"):
        producers.register(b"c", "g", 60)
    producers.register(b"b", "g", 60)
    producers.register(b"c", "g", 101)
    assert len(producers) == 2, "the one whose time is over made room"
