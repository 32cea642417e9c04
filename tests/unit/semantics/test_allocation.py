"""Goal: a member gets the queues that RocketMQ's client gives it, by each strategy, and every queue has one owner.

Method: the results of RocketMQ's own unit tests and documentation; a second, plain reading of the specified rules; for
every strategy, generated queues and members are shared out without a gap and without a double.
"""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.semantics.allocation import (
    STRATEGIES,
    MessageQueue,
    Strategy,
    averagely,
    averagely_by_circle,
    by_configuration,
    consistent_hash,
    machine_room,
    machine_room_nearby,
    ring_place,
    sorted_members,
)


def queues(count: int, broker: str = "brokerName") -> list[MessageQueue]:
    return [MessageQueue("topic", broker, number) for number in range(count)]


def members(count: int) -> list[str]:
    return [f"CID_PREFIX{number}" for number in range(count)]


def ids(found: list[MessageQueue]) -> list[int]:
    return [queue.queue_id for queue in found]


def shares(strategy: Strategy, count: int, people: int) -> list[list[int]]:
    return [ids(strategy(me, queues(count), members(people))) for me in members(people)]


# ---------------------------------------------------------------- averagely


@pytest.mark.parametrize(
    ("count", "people", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (6, 6, [[0], [1], [2], [3], [4], [5]]),
        (2, 4, [[0], [1], [], []]),
    ],
)
def test_averagely_gives_contiguous_shares_and_the_first_ones_more(
    count: int, people: int, expected: list[list[int]]
) -> None:
    assert shares(averagely, count, people) == expected


@given(st.integers(1, 60), st.integers(1, 20))
def test_averagely_is_the_formula_of_the_specification(n: int, c: int) -> None:
    for i, me in enumerate(members(c)):
        m = n % c
        size = 1 if n <= c else (n // c + 1 if (m > 0 and i < m) else n // c)
        start = i * size if (m > 0 and i < m) else i * size + m
        taken = max(0, min(size, n - start))
        assert averagely(me, queues(n), members(c)) == queues(n)[start : start + taken]


# ---------------------------------------------------------------- by circle


@pytest.mark.parametrize(
    ("count", "people", "expected"),
    [(5, 2, [[0, 2, 4], [1, 3]]), (2, 3, [[0], [1], []]), (7, 3, [[0, 3, 6], [1, 4], [2, 5]])],
)
def test_by_circle_deals_the_queues_out(count: int, people: int, expected: list[list[int]]) -> None:
    assert shares(averagely_by_circle, count, people) == expected


# ---------------------------------------------------------------- consistent hash


def test_the_ring_hashes_by_the_first_four_bytes_of_md5() -> None:
    assert ring_place("") == 0xD41D8CD9
    assert ring_place("CID-0") == int(hashlib.md5(b"CID-0").hexdigest()[:8], 16)
    assert str(MessageQueue("T", "B", 3)) == "MessageQueue [topic=T, brokerName=B, queueId=3]"


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 10))
def test_consistent_hash_takes_the_next_place_on_the_ring(count: int, people: int, nodes: int) -> None:
    ring = sorted((ring_place(f"{one}-{node}"), one) for one in members(people) for node in range(nodes))
    for queue in queues(count):
        place = ring_place(str(queue))
        owner = next((one for at, one in ring if at >= place), ring[0][1])
        for me in members(people):
            found = consistent_hash(me, queues(count), members(people), virtual_nodes=nodes)
            assert (queue in found) == (me == owner)


def test_consistent_hash_moves_only_the_queues_of_a_member_that_goes() -> None:
    before = {me: consistent_hash(me, queues(40), members(5)) for me in members(5)}
    left = members(5)[1:]
    for me in left:
        now = consistent_hash(me, queues(40), left)
        assert set(before[me]) <= set(now)
        assert set(now) - set(before[me]) <= set(before["CID_PREFIX0"])


# ---------------------------------------------------------------- machine rooms


def test_machine_room_takes_the_queues_of_its_rooms_only() -> None:
    """The results of RocketMQ's own test: three rooms' queues, two of them ours, shared by two members."""
    everything = [
        MessageQueue("topic", name, number) for number in range(4) for name in ("a@b0", "b@b0", "plain", "a@b@c")
    ]
    strategy = machine_room({"a", "c"})
    found = [strategy(me, everything, members(2)) for me in members(2)]
    assert [ids(one) for one in found] == [[0, 1], [2, 3]]
    assert {queue.broker_name for one in found for queue in one} == {"a@b0"}


def test_machine_room_gives_the_rest_to_the_first_members() -> None:
    strategy = machine_room({"r"})
    found = [ids(strategy(me, queues(8, "r@b"), members(3))) for me in members(3)]
    assert found == [[0, 1, 6], [2, 3, 7], [4, 5]]


def room(text: str | MessageQueue) -> str:
    name = text if isinstance(text, str) else text.broker_name
    return name.partition("-")[0]


NEARBY = machine_room_nearby(averagely, room, room)


def test_machine_room_nearby_shares_a_room_among_its_members() -> None:
    everything = [*queues(4, "IDC1-b"), *queues(4, "IDC2-b"), *queues(3, "IDC3-b")]
    people = ["IDC1-c0", "IDC1-c1", "IDC2-c0"]
    found = {me: NEARBY(me, everything, people) for me in people}
    # The room without a member is shared by all.
    assert [str(queue.broker_name[:4]) + str(queue.queue_id) for queue in found["IDC1-c0"]] == [
        "IDC10",
        "IDC11",
        "IDC30",
    ]
    assert [str(queue.broker_name[:4]) + str(queue.queue_id) for queue in found["IDC2-c0"]] == [
        *("IDC20", "IDC21", "IDC22", "IDC23"),
        "IDC32",
    ]


def test_machine_room_nearby_refuses_an_unknown_room() -> None:
    strategy = machine_room_nearby(averagely, lambda _: "", room)
    with pytest.raises(InvalidMessageError, match="machine room"):
        strategy("IDC1-c0", queues(1), ["IDC1-c0"])


# ---------------------------------------------------------------- by configuration, and all


def test_by_configuration_is_a_fixed_list() -> None:
    strategy = by_configuration({"a": queues(2)})
    assert strategy("a", queues(9), ["a", "b"]) == queues(2)
    assert strategy("b", queues(9), ["a", "b"]) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_who_is_no_member_gets_nothing(name: str) -> None:
    assert STRATEGIES[name]("nobody", queues(4), members(2)) == []
    assert STRATEGIES[name]("nobody", queues(4), []) == []
    assert STRATEGIES[name]("CID_PREFIX0", [], members(2)) == []


@pytest.mark.parametrize(
    "strategy", [*STRATEGIES.values(), machine_room({"r"}), machine_room_nearby(averagely, lambda _: "r", room)]
)
@given(count=st.integers(1, 30), people=st.integers(1, 12))
def test_every_queue_has_exactly_one_owner(strategy: Strategy, count: int, people: int) -> None:
    everyone = [f"{'qr'[number % 2]}-{number}" for number in range(people)]
    everyone = sorted_members(everyone)
    found = [queue for me in everyone for queue in strategy(me, queues(count, "r@b"), everyone)]
    assert sorted(found) == queues(count, "r@b")


def test_members_are_sorted_as_java_sorts_text() -> None:
    # By UTF-16 units a character outside the BMP comes before U+FF21, by code points behind it.
    assert sorted_members(["Ａ", "🚀", "b", "a"]) == ["a", "b", "🚀", "Ａ"]
