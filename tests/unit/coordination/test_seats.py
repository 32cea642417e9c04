"""Goal: the end of a member's connection shortens its session, and nobody else's; being heard again undoes that.

Method: the real groups on an empty store, with the test's clock and invented connections; hypothesis plays any order of
requests, ends of connections and names, beside a model of who speaks through what.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.config import load
from commitmq.coordination.groups import GroupCoordinator, Seats
from commitmq.store.layout import StoreLayout

SESSION_MS, GRACE_MS = 6_000, 2_000


@pytest.fixture
def groups(tmp_path: Path) -> GroupCoordinator:
    layout = StoreLayout(tmp_path)
    layout.config.mkdir(parents=True)
    layout.own.mkdir(parents=True)
    return GroupCoordinator.load(
        layout, lambda _topic: (0, 1), load(None).groups, first_generation=1, now_ms=0, committed=[]
    )


def join(groups: GroupCoordinator, member: str) -> None:
    groups.join("g", member, ["t"], [], SESSION_MS, 0)


def test_an_address_that_was_not_known_at_first_is_asked_for_again(groups: GroupCoordinator) -> None:
    # The first request of a connection can come before the connection is known; the member had no address for its life.
    seats = Seats(groups, GRACE_MS)
    seats.take(b"1", "g", "a", lambda: ("ann", ""))
    assert seats.who("g", "a") == ("ann", "")
    seats.take(b"1", "g", "a", lambda: ("ann", "10.0.0.1"))
    seats.take(b"1", "g", "a", lambda: pytest.fail("it is known"))
    assert seats.who("g", "a") == ("ann", "10.0.0.1")


def test_a_member_is_given_up_a_while_after_its_connection(groups: GroupCoordinator) -> None:
    seats = Seats(groups, GRACE_MS)
    for member, peer in (("a", b"1"), ("b", b"2")):
        join(groups, member)
        seats.take(peer, "g", member)
    seats.ended([b"1", b"unknown"], 500)
    assert groups.expire(500 + GRACE_MS - 1) == []
    assert groups.expire(500 + GRACE_MS) == [("g", "a")]
    assert groups.expire(SESSION_MS - 1) == []
    assert groups.expire(SESSION_MS + 1_000) == [("g", "b")]


def test_a_member_that_is_heard_again_stays(groups: GroupCoordinator) -> None:
    seats = Seats(groups, GRACE_MS)
    join(groups, "a")
    seats.take(b"1", "g", "a")
    seats.ended([b"1"], 500)
    membership = groups.membership("g")
    assert membership is not None
    groups.heartbeat("g", "a", membership.generation, [], 600)
    seats.take(b"2", "g", "a")
    assert groups.expire(600 + SESSION_MS - 1) == []
    seats.ended([b"1"], 5_000)  # the old one again
    assert groups.expire(600 + SESSION_MS - 1) == []
    assert groups.expire(600 + SESSION_MS) == [("g", "a")]


def test_the_end_of_a_former_connection_says_nothing(groups: GroupCoordinator) -> None:
    seats = Seats(groups, GRACE_MS)
    join(groups, "a")
    seats.take(b"1", "g", "a")
    seats.take(b"2", "g", "a")
    seats.ended([b"1"], 500)
    assert groups.expire(SESSION_MS - 1) == []
    assert len(seats) == 1


def test_without_a_grace_only_the_session_counts(groups: GroupCoordinator) -> None:
    seats = Seats(groups, 0)
    join(groups, "a")
    seats.take(b"1", "g", "a")
    seats.ended([b"1"], 500)
    assert groups.expire(SESSION_MS - 1) == []
    assert len(seats) == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "end"]), st.sampled_from([b"1", b"2", b"3"]), st.sampled_from("abc")),
    max_size=30,
)


class Told:
    """Groups that note whose connection ended."""

    def __init__(self) -> None:
        self.gone: list[str] = []

    def connection_ended(self, group: str, member: str, now_ms: int, grace_ms: int) -> None:
        assert (group, grace_ms) == ("g", GRACE_MS)
        self.gone.append(member)


@given(STEPS)
@settings(max_examples=200)
def test_a_connection_counts_for_the_last_member_that_spoke_through_it(steps: list[tuple[str, bytes, str]]) -> None:
    told = Told()
    seats = Seats(told, GRACE_MS)  # type: ignore[arg-type]
    model: dict[bytes, str] = {}
    expected = []
    for number, (step, peer, member) in enumerate(steps):
        if step == "take":
            seats.take(peer, "g", member)
            model = {one: whose for one, whose in model.items() if whose != member}
            model[peer] = member
        else:
            seats.ended([peer], number)
            if peer in model:
                expected.append(model.pop(peer))
        assert told.gone == expected
        assert len(seats) == len(model)
