"""Goal: an end of a transaction gets an answer or an error in time, whatever happens in the connection's thread.

Method: a link whose turns fail with an error that nobody expects; one without a thread, whose turns the test takes.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.client.results import SendResult
from commitmq.client.transactions.group import TransactionGroup, TransactionLink
from commitmq.client.transactions.transaction import Transaction
from commitmq.errors import CommitMQError, Outcome, RequestError, SendError


class FailingLink(TransactionLink):
    """Every turn fails, behind its look at what is overdue."""

    def _turn(self) -> None:
        self._take_new()
        self._expire(time.monotonic())
        time.sleep(0.01)
        raise RuntimeError("can't start new thread")


def test_an_unexpected_error_leaves_no_end_waiting() -> None:
    link = FailingLink("tcp://127.0.0.1:1", "group", lambda _: None)
    first = link.end({"decision": "commit"}, time.monotonic() + 0.1)
    with pytest.raises(SendError) as raised:
        first.result(5)
    assert raised.value.outcome is Outcome.UNKNOWN
    second = link.end({"decision": "commit"}, time.monotonic() + 0.1)
    assert isinstance(second.exception(5), SendError), "the thread goes on"
    link.close(5)
    assert isinstance(link.end({}, time.monotonic()).exception(5), SendError)


class QuietLink(TransactionLink):
    """Without a thread: the test takes its turns. ``sent`` are the requests that went out."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:1", "group", lambda _: None)
        self.sent: list[dict[str, Any]] = []
        self._channel = SimpleNamespace(next_id=itertools.count(1).__next__, close=lambda: None)  # type: ignore[assignment]

    def start(self) -> None:
        pass

    def _put(self, header: dict[str, Any]) -> bool:
        self.sent.append(header)
        return True

    def turn(self, now: float) -> None:
        self._take_new()
        self._expire(now)
        self._send(now)

    def answer(self, **answer: Any) -> None:
        """To the oldest request without an answer."""
        number, end = next(iter(self._sent.items()))
        del self._sent[number]
        self._answered(end, answer)


def test_a_refused_end_is_sent_again_when_the_node_said() -> None:
    link = QuietLink()
    now = time.monotonic()
    later = link.end({"decision": "commit"}, now + 60)
    other = link.end({"decision": "commit", "other": True}, now + 60)
    link.turn(now)
    link.answer(ok=False, code="SYSTEM_BUSY", retry_after_ms=20_000)
    link.turn(now)
    assert len(link.sent) == 2, "not yet"
    assert link._pause(now) <= 1.0
    link.turn(time.monotonic() + 21)
    assert len(link.sent) == 3
    assert not link.sent[2].get("other")
    link.answer(ok=True)
    link.answer(ok=True)
    assert (later.result(0)["ok"], other.result(0)["ok"]) == (True, True)
    link.close(0)


def test_an_end_is_overdue_wherever_it_waits() -> None:
    link = QuietLink()
    now = time.monotonic()
    futures = [link.end({"decision": "commit", "number": number}, now + 10 + number) for number in range(3)]
    link.turn(now)
    link.answer(ok=False, code="SYSTEM_BUSY", retry_after_ms=5_000)  # the first one waits to be sent again
    link.turn(now + 10.5)
    assert [one.done() for one in futures] == [True, False, False]
    link.turn(now + 11.5)
    assert [one.done() for one in futures] == [True, True, False]
    assert len(link._sent) == 1
    assert [header["number"] for header in link.sent] == [0, 1, 2], "an overdue one is not sent again"
    link._lose()
    link._channel = SimpleNamespace(next_id=itertools.count(9).__next__, close=lambda: None)  # type: ignore[assignment]
    link.turn(now + 11.6)
    assert link.sent[-1]["number"] == 2, "what has no answer is sent over the next connection"
    link.answer(ok=True)
    assert futures[2].result(0)["ok"]
    link._channel = None
    link.close(0)


def test_the_cost_of_a_turn_does_not_grow_with_what_is_pending() -> None:
    """A thousand ends come and are answered, one a turn, while few or many others wait for their answers."""

    def steps(pending: int) -> int:
        link = QuietLink()
        now = time.monotonic()
        for number in range(pending):
            link.end({"decision": "commit", "number": number}, now + 60)
        link.turn(now)
        seen = 0

        def count(*_: object) -> None:
            nonlocal seen
            seen += 1

        sys.setprofile(count)
        try:
            for _ in range(300):
                link.end({"decision": "commit"}, now + 60)
                link.turn(now)
                link._pause(now)
                link.answer(ok=True)
        finally:
            sys.setprofile(None)
        link._channel = None
        link._fail_all(RequestError("CLIENT_CLOSED", "the end"))
        return seen

    few, many = steps(10), steps(8_000)
    assert few > 3_000
    assert many < 1.3 * few


def test_a_forked_child_does_not_wait_for_the_parents_thread() -> None:
    group = TransactionGroup("tcp://127.0.0.1:1", "group", None)
    half = SendResult("orders", 0, 1, 2, 3, "", "id", "flushed")
    transaction = Transaction(group, 60, lambda: half, lambda: (b"", {}))
    with pytest.raises(ZeroDivisionError), transaction:
        child = os.fork()
        if not child:
            outcomes = []
            for step in (transaction.commit, transaction.rollback):
                try:
                    step()
                except CommitMQError as error:
                    outcomes.append("before a fork" in str(error))
            os._exit(0 if outcomes == [True, True] else 1)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert ended == (child, 0), "the child waits for ever"
        transaction.unknown()
        raise ZeroDivisionError
    group.close(1)
