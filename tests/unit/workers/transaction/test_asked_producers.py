"""Goal: a live producer of the group is asked, each in its turn, and the number of producers is bounded.

Method: registrations with a clock that is handed in.
"""

from __future__ import annotations

import pytest

from commitmq.errors import ProtocolError
from commitmq.workers.transaction.checks import ProducerManager, Registrant


def test_producers_of_a_group_take_turns() -> None:
    producers = ProducerManager(timeout_ms=100, most=10, most_of_user=10)
    for name in (b"a", b"b", b"c"):
        producers.register(Registrant(name), ["g"], 0)
    producers.register(Registrant(b"x"), ["h"], 0)
    assert [producers.pick("g", 1, lambda _: True) for _ in range(4)] == [b"a", b"b", b"c", b"a"]
    assert producers.pick("h", 1, lambda _: True) == b"x"
    assert producers.pick("none", 1, lambda _: True) is None


def test_one_that_is_silent_or_gone_is_not_asked() -> None:
    producers = ProducerManager(timeout_ms=100, most=10, most_of_user=10)
    producers.register(Registrant(b"a"), ["g"], 0)
    producers.register(Registrant(b"b"), ["g"], 50)
    assert producers.pick("g", 120, lambda _: True) == b"b"
    assert producers.pick("g", 120, lambda who: who.peer != b"b") is None
    producers.register(Registrant(b"a"), ["g"], 130)
    assert producers.pick("g", 160, lambda _: True) == b"a"
    producers.leave(b"a")
    producers.leave(b"a")
    assert producers.pick("g", 160, lambda _: True) is None


def test_a_gateway_has_many_groups() -> None:
    producers = ProducerManager(timeout_ms=100, most=10, most_of_user=10)
    producers.register(Registrant(b"a"), ["g"], 0)
    producers.register(Registrant(b"a"), ["h"], 50)
    assert [producers.pick(group, 60, lambda _: True) for group in ("g", "h")] == [b"a", b"a"]
    producers.expire(120)
    assert [producers.pick(group, 120, lambda _: True) for group in ("g", "h")] == [None, b"a"], "each has a time"
    producers.register(Registrant(b"a"), ["g"], 120)
    producers.leave(b"a", "h")
    assert len(producers) == 1
    producers.leave(b"a")
    assert len(producers) == 0


def test_their_number_is_bounded() -> None:
    producers = ProducerManager(timeout_ms=100, most=2, most_of_user=2)
    producers.register(Registrant(b"a"), ["g"], 0)
    producers.register(Registrant(b"b"), ["g"], 50)
    with pytest.raises(ProtocolError, match="max_producers"):
        producers.register(Registrant(b"c"), ["g"], 60)
    producers.register(Registrant(b"b"), ["g"], 60)
    producers.register(Registrant(b"c"), ["g"], 101)
    assert len(producers) == 2, "the one whose time is over made room"


def test_a_user_takes_no_place_of_others() -> None:
    producers = ProducerManager(timeout_ms=100, most=10, most_of_user=3)
    gateway, thief = Registrant(b"gw", "shop"), Registrant(b"gw", "thief")
    producers.register(thief, ["z"], 0)
    with pytest.raises(ProtocolError, match="max_producers_per_user"):
        producers.register(thief, ["a", "b", "c", "d", "z"], 50)
    assert len(producers) == 3
    assert producers.pick("z", 120, lambda _: True) == b"gw", (
        "what has a place is registered again, whatever is refused"
    )
    producers.register(gateway, ["a", "e", "f"], 60)
    assert producers.pick("a", 61, lambda who: who.user == "shop") == b"gw"
    producers.register(Registrant(b"node"), ["a", "b", "c", "d"], 60)
    with pytest.raises(ProtocolError, match="max_producers\\)"):
        producers.register(Registrant(b"node"), ["e"], 60)
    producers.leave(b"gw")
    producers.register(thief, ["x", "y", "z"], 70)


def test_who_may_not_see_the_message_is_not_asked() -> None:
    producers = ProducerManager(timeout_ms=100, most=10, most_of_user=10)
    producers.register(Registrant(b"a", "thief"), ["g"], 0)
    assert producers.pick("g", 1, lambda who: who.user != "thief") is None
    producers.register(Registrant(b"b", "shop"), ["g"], 0)
    assert [producers.pick("g", 1, lambda who: who.user != "thief") for _ in range(3)] == [b"b"] * 3
