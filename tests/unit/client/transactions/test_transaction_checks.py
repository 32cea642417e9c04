"""Goal: a question is answered from what the producer knows, else by the listener, in a bounded number of threads.

Method: questions by hand; listeners that wait, raise and lie.
"""

from __future__ import annotations

import threading

from commitmq import HalfMessage, TransactionState
from commitmq.client.transactions import group as module
from commitmq.client.transactions.group import Question, TransactionChecker
from nodes import eventually


class Replies:
    def __init__(self) -> None:
        self.found: list[tuple[str, TransactionState]] = []

    def __call__(self, question: Question, state: TransactionState) -> None:
        self.found.append((question.message.unique_id, state))


def question(unique_id: str = "id") -> Question:
    return Question(HalfMessage("orders", 0, b"x", unique_id), 1, 2)


def test_what_is_decided_needs_no_listener() -> None:
    replies = Replies()
    checks = TransactionChecker(None, replies)
    checks.begin("id")
    checks.ask(question())
    assert replies.found == [], "the program is at work"
    checks.decide("id", TransactionState.COMMIT)
    checks.ask(question())
    assert replies.found == [("id", TransactionState.COMMIT)]
    checks.settle("id")
    checks.ask(question())
    assert len(replies.found) == 1


def test_the_listener_is_asked_about_the_others() -> None:
    replies = Replies()
    outcomes = {"a": TransactionState.COMMIT, "b": TransactionState.ROLLBACK, "c": TransactionState.UNKNOWN}
    checks = TransactionChecker(lambda message: outcomes[message.unique_id], replies)
    for name in outcomes:
        checks.ask(question(name))
    eventually(lambda: len(replies.found) == 2, "two are answered")
    assert dict(replies.found) == {"a": TransactionState.COMMIT, "b": TransactionState.ROLLBACK}
    checks.close()


def test_a_coroutine_function_is_awaited() -> None:
    replies = Replies()

    async def check(message: HalfMessage) -> TransactionState:
        return TransactionState.COMMIT

    checks = TransactionChecker(check, replies)
    checks.ask(question())
    eventually(lambda: replies.found == [("id", TransactionState.COMMIT)], "it is answered")
    checks.close()


def test_a_listener_that_raises_or_lies_is_asked_again() -> None:
    replies = Replies()
    answers: list[object] = ["maybe", None, 7, TransactionState.COMMIT]
    checks = TransactionChecker(lambda message: answers.pop(0), replies)
    for _ in range(4):
        checks.ask(question())
    eventually(lambda: replies.found == [("id", TransactionState.COMMIT)], "the last answer counts")
    checks.close()


def test_threads_and_waiting_questions_are_bounded() -> None:
    release = threading.Event()
    checks = TransactionChecker(lambda message: release.wait(30) and TransactionState.UNKNOWN, Replies())
    before = threading.active_count()
    for number in range(module._MOST_WAITING + 50):
        checks.ask(question(str(number)))
    assert threading.active_count() - before <= 2
    assert checks._waiting.qsize() <= module._MOST_WAITING
    checks.close()
    release.set()
