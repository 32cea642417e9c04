"""Goal: parked pulls cost memory only while they are parked, and answers that a client leaves unread are counted right.

Method: both containers are driven directly; what they still hold is looked at after everything was answered.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import cast

import pytest
from zmq import MessageTracker

from commitmq.network import router
from commitmq.network.router import UnsentAnswers
from commitmq.workers.reader.pulls import ParkedPulls, Pull


def pull(client: bytes = b"c", queue: int = 0, wait_ms: int = 30_000, filter_bytes: int = 0) -> Pull:
    return Pull(client, 1, "t", queue, 0, 0, 1, 1, wait_ms, False, None, filter_bytes=filter_bytes)


def test_answered_pulls_leave_nothing_behind() -> None:
    """A busy consumer parks and is woken a hundred thousand times before the first deadline."""
    parked = ParkedPulls(400_000, 1 << 20)
    stays = pull(b"other")
    parked.add(stays, 0)
    for number in range(100_000):
        one = pull(queue=number % 7)
        parked.add(one, number % 100)
        assert parked.waiting(one.key)[-1] is one
        parked.remove(one)
    assert len(parked) == 1
    assert parked.queues() == [stays.key]
    assert len(parked._heap) < 2_000
    assert parked._by_client == {b"other": 1}
    assert list(parked.due(30_199)) == [stays]
    assert parked.next_deadline_ms() is None
    assert (parked._by_queue, parked._by_client, parked._heap) == ({}, {}, [])


def test_deadlines() -> None:
    """Never early; short waits to the millisecond, long ones in steps of 200 ms so that they end together."""
    parked = ParkedPulls(400_000, 1 << 20)
    waits = [5_000 + 7 * number for number in range(50)] + [3, 999]
    for wait in waits:
        parked.add(pull(wait_ms=wait), 1)
    times = set()
    answered = 0
    while (deadline := parked.next_deadline_ms()) is not None:
        assert list(parked.due(deadline - 1)) == []
        due = list(parked.due(deadline))
        answered += len(due)
        times.add(deadline)
        assert all(1 + one.wait_ms <= deadline < 1 + one.wait_ms + 200 for one in due)
    assert answered == len(waits)
    assert {4, 1_000} < times
    assert len(times) <= 2 + 3


def test_room() -> None:
    parked = ParkedPulls(8, 1 << 20)
    first, second = pull(), pull()
    parked.add(first, 0)
    assert parked.has_room(pull())
    parked.add(second, 0)
    assert not parked.has_room(pull())
    for client in (b"d", b"e", b"f"):
        for _ in range(2):
            assert parked.has_room(pull(client))
            parked.add(pull(client), 0)
    assert not parked.has_room(pull(b"g"))
    parked.remove(first)
    assert parked.has_room(pull())
    assert parked.was_used()
    assert parked.was_used()  # still parked
    for one in parked.waiting(("t", 0)):
        parked.remove(one)
    assert not parked.was_used()


def test_room_for_filters() -> None:
    """Of a hundred thousand bytes one client gets a quarter, all get the whole; pulls without filters need none of it."""
    parked = ParkedPulls(400_000, 100_000)
    held = []
    for client in (b"a", b"b", b"c", b"d", b"e"):
        while parked.has_room(one := pull(client, filter_bytes=10_000)):
            parked.add(one, 0)
            held.append(one)
    assert Counter(one.client for one in held) == {b"a": 2, b"b": 2, b"c": 2, b"d": 2, b"e": 2}
    assert parked.has_room(pull(b"a"))
    for one in held:
        parked.remove(one)
    assert (parked._bytes, parked._bytes_by_client) == (0, {})


class Tracker:
    """Stands for pyzmq's tracker of one message: done once the socket let go of it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def leave(self) -> None:
        self._event.set()

    @property
    def done(self) -> bool:
        return self._event.is_set()


def send(answers: UnsentAnswers, client: bytes, size: int) -> Tracker | None:
    """Count one answer as the reader does; its tracker if it needed one."""
    if not answers.wants_tracker(client, size):
        return None
    tracker = Tracker()
    answers.add(client, cast("MessageTracker", tracker))
    return tracker


def test_unread_answers_are_counted() -> None:
    answers = UnsentAnswers(40 << 20)
    trackers = []
    sent = 0
    while not answers.is_over(b"a"):  # small ones, of which only every few have a tracker
        trackers.append(send(answers, b"a", 100_000))
        sent += 100_000
    assert 10 << 20 <= sent <= 12 << 20
    assert sum(one is not None for one in trackers) <= 10
    assert not answers.is_over(b"b")
    assert answers.worst() == b"a"
    for one in trackers:
        if one is not None:
            one.leave()
    assert not answers.is_over(b"a")
    assert len(answers) == 0


@pytest.mark.parametrize("clients", [1, 3, 10, 30])
def test_clients_that_never_read_leave_room_for_others(clients: int) -> None:
    """Each asks for 8 MiB again and again, in turn: none gets more than what is left, and newcomers are served."""
    answers = UnsentAnswers(256 << 20)
    for _ in range(40):
        for number in range(clients):
            client = b"%d" % number
            if not answers.is_over(client):
                assert send(answers, client, 8 << 20)
    assert len(answers) <= 256 << 20
    assert max(answers.holds(b"%d" % number) for number in range(clients)) <= (64 << 20) + (8 << 20)
    assert not answers.is_over(b"new")
    send(answers, b"new", 1 << 20)
    assert answers.is_over(b"0")


def test_clients_that_come_and_go_are_forgotten() -> None:
    answers = UnsentAnswers(256 << 20)
    for number in range(10_000):
        tracker = send(answers, b"%d" % number, 2 << 20 if number % 100 == 0 else 500)
        if tracker is not None:
            tracker.leave()
    assert answers.is_over(b"x") is False
    assert len(answers._untracked) == router._MAX_UNTRACKED_CLIENTS


def test_who_waits_for_the_log() -> None:
    """Pulls of memory topics do not count; what a pull was parked as counts, whatever its topic has become since."""
    parked = ParkedPulls(400_000, 1 << 20)
    in_memory, in_log = pull(queue=1), pull(queue=2)
    in_memory.in_memory = True
    parked.add(in_memory, 0)
    assert not parked.awaits_log
    parked.add(in_log, 0)
    assert parked.awaits_log
    in_memory.in_memory, in_log.in_memory = False, True
    parked.remove(in_memory)
    assert parked.awaits_log
    parked.remove(in_log)
    assert not parked.awaits_log


def test_the_clients_of_a_gateway_have_shares_of_their_own() -> None:
    def of(owner: str) -> Pull:
        return Pull(b"gateway", 1, "t", 0, 0, 0, 1, 1, 30_000, False, None, owner=owner)

    parked = ParkedPulls(8, 1 << 20)
    for _ in range(2):
        assert parked.has_room(of("one"))
        parked.add(of("one"), 0)
    assert not parked.has_room(of("one"))
    assert parked.has_room(of("other"))
    for one in parked.waiting(("t", 0)):
        parked.remove(one)
    assert parked._by_client == {}
