"""Goal: receives that wait are woken by growth, first come first, end at their time, and are bounded for each client.

Method: pops by hand, and a clock that is handed in.
"""

from __future__ import annotations

from commitmq.semantics.pop import RetryNames
from commitmq.workers.pop.requests import ParkedPops, PopRequest


def pop(
    client: bytes = b"c", group: str = "g", topics: tuple[str, ...] = ("orders",), wait_ms: int = 100
) -> PopRequest:
    return PopRequest(client, 1, group, list(topics), 32, 60_000, wait_ms, None, "earliest")


def test_growth_wakes_the_groups_that_wait_for_the_topic() -> None:
    parked = ParkedPops(10)
    first, second, other, retry = pop(), pop(), pop(group="h"), pop(topics=("else",))
    for one in (first, second, other, retry):
        parked.add(one, 0)
    parked.wake("orders")
    assert [parked.next_woken(), parked.next_woken()] == [[first, second], [other]]
    assert not parked.has_woken
    parked.wake("%RETRY%g_else")
    assert parked.next_woken() == [retry]
    parked.wake("unknown")
    assert not parked.has_woken


def test_the_rest_of_a_group_is_looked_at_later() -> None:
    parked = ParkedPops(10)
    many = [pop() for _ in range(4)]
    for one in many:
        parked.add(one, 0)
    parked.wake_group("orders", "g")
    parked.wake_group("orders", "nobody")
    assert parked.next_woken() == many
    parked.look_later(many[1:])
    parked.remove(many[1])
    assert parked.has_woken
    assert parked.next_woken() == many[2:]
    assert not parked.has_woken
    parked.look_later([])
    assert not parked.has_woken
    parked.wake("orders")
    parked.next_woken()
    parked.look_later(many[3:])
    parked.wake("orders")
    assert parked.next_woken() == [many[0], *many[2:]], "growth begins with the first one again"


def test_one_that_was_answered_is_not_woken() -> None:
    parked = ParkedPops(10)
    one = pop()
    parked.add(one, 0)
    parked.wake("orders")
    parked.remove(one)
    assert parked.next_woken() == []
    assert len(parked) == 0
    assert parked.next_deadline_ms() is None


def test_time_ends_a_wait() -> None:
    parked = ParkedPops(10)
    long, short = pop(wait_ms=500), pop(wait_ms=100)
    parked.add(long, 0)
    parked.add(short, 0)
    assert parked.next_deadline_ms() == 100
    assert parked.due(99) == []
    assert parked.due(100) == [short]
    assert parked.all() == [long]


def test_a_client_has_a_share() -> None:
    parked = ParkedPops(8)
    for _ in range(2):
        assert parked.has_room(b"c")
        parked.add(pop(), 0)
    assert not parked.has_room(b"c")
    for number in range(6):
        assert parked.has_room(b"%d" % number)
        parked.add(pop(b"%d" % number), 0)
    assert not parked.has_room(b"another")


def test_a_message_that_comes_back_wakes_under_both_forms_of_its_retry_topic() -> None:
    parked = ParkedPops(10, RetryNames(v2=True))
    one = pop()
    for topic in ("%RETRY%g+orders", "%RETRY%g_orders"):
        parked.add(one, 0)
        parked.wake(topic)
        assert parked.next_woken() == [one]
        parked.wake_retries("orders", "g")
        assert parked.next_woken() == [one]
        parked.next_woken()
        parked.remove(one)
    assert not parked._waiting
    usual = ParkedPops(10)
    usual.add(one, 0)
    usual.wake("%RETRY%g+orders")
    assert not usual.has_woken
