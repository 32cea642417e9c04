"""Goal: a SendFuture behaves as a concurrent.futures.Future to everyone who waits for one.

Method: a sender of the test's own resolves futures from another thread, while callers wait in each of the ways that
concurrent.futures and asyncio have.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable

import pytest

from commitmq import Outcome, SendError
from commitmq.client.results import RunAck
from commitmq.client.sending.line import Ticket
from commitmq.client.sending.send_future import SendFuture, fail_all, finish_run, run_callbacks

ANSWER = {
    "queue_offset": 5,
    "physical_offset": 100,
    "store_timestamp": 1,
    "msg_id": "A" * 16 + "0" * 16,
    "ack": "memory",
}


class Sender:
    """What a producer does with futures, by hand."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.result_waiters: set[Ticket] = set()
        self.forgotten: list[SendFuture] = []

    def future(self) -> SendFuture:
        return SendFuture(self, b"x", None, 0, 1, time.monotonic() + 9)

    def forget(self, future: SendFuture) -> None:
        self.forgotten.append(future)

    def add_waiter(self, ticket: Ticket) -> None:
        self.result_waiters.add(ticket)

    def start(self, *futures: SendFuture) -> None:
        for one in futures:
            assert one._state == "PENDING"
            one._state = "RUNNING"

    def finish(self, *futures: SendFuture) -> None:
        ack = RunAck("T", 2, "memory", [10] * len(futures), ["U"] * len(futures), ANSWER)
        with self.lock:
            called, _ = finish_run(list(futures), ack)
        run_callbacks(called)

    def fail(self, *futures: SendFuture) -> None:
        with self.lock:
            called = fail_all(futures, lambda: SendError("CODE", "why", outcome=Outcome.NOT_STORED))
        run_callbacks(called)


@pytest.fixture
def sender() -> Sender:
    return Sender()


def later(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Timer(0.05, work)
    thread.start()
    return thread


def test_a_result_is_made_from_the_runs_answer(sender: Sender) -> None:
    futures = [sender.future() for _ in range(3)]
    sender.start(*futures)
    assert futures[0].running()
    assert not futures[0].done()
    sender.finish(*futures)
    assert [one.result().queue_offset for one in futures] == [5, 6, 7]
    assert [one.result(0).physical_offset for one in futures] == [100, 110, 120]
    assert futures[0].exception() is None
    assert futures[0].body == b"", "what was sent is let go"
    assert "finished returned SendResult" in repr(futures[0])


def test_one_whose_time_was_over_is_left_as_it_is(sender: Sender) -> None:
    early, late = sender.future(), sender.future()
    sender.start(early, late)
    sender.fail(late)
    with sender.lock:
        called, before = finish_run([late, early], RunAck("T", 2, "memory", [10, 10], ("U" * 28, 7), ANSWER))
    assert (called, before) == ([], [late])
    assert isinstance(late.exception(), SendError)
    assert (early.result().queue_offset, early.result().unique_id) == (6, "U" * 28 + "0008")


def test_result_waits(sender: Sender) -> None:
    future = sender.future()
    sender.start(future)
    thread = later(lambda: sender.finish(future))
    assert future.result(5).queue == 2
    thread.join()


def test_result_times_out_and_can_be_asked_again(sender: Sender) -> None:
    future = sender.future()
    with pytest.raises(TimeoutError, match="still pending"):
        future.result(0.01)
    sender.start(future)
    sender.finish(future)
    assert future.result().queue == 2


def test_a_failure_is_raised_by_result(sender: Sender) -> None:
    future, other = sender.future(), sender.future()
    sender.start(future, other)
    sender.fail(future, other)
    with pytest.raises(SendError, match="why") as caught:
        future.result()
    assert caught.value.outcome is Outcome.NOT_STORED
    assert future.exception() is not other.exception(), "errors carry tracebacks; each future has its own"


def test_cancel_works_until_the_message_is_handed_over(sender: Sender) -> None:
    pending, started = sender.future(), sender.future()
    sender.start(started)
    assert pending.cancel()
    assert pending.cancel()
    assert pending.cancelled()
    assert pending.done()
    assert not started.cancel()
    assert sender.forgotten == [pending]
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result()
    with pytest.raises(concurrent.futures.CancelledError):
        pending.exception()


def test_wait_and_as_completed(sender: Sender) -> None:
    futures = [sender.future() for _ in range(4)]
    sender.start(*futures)
    sender.finish(futures[0])
    thread = later(lambda: sender.finish(*futures[1:3]))
    done, rest = concurrent.futures.wait(futures[:3], timeout=5)
    thread.join()
    assert (len(done), len(rest)) == (3, 0)
    thread = later(lambda: sender.fail(futures[3]))
    assert len(list(concurrent.futures.as_completed(futures, timeout=5))) == 4  # type: ignore[arg-type]
    thread.join()
    done, rest = concurrent.futures.wait([*futures, sender.future()], return_when=concurrent.futures.FIRST_COMPLETED)
    assert len(rest) == 1


def test_wait_notices_a_cancelled_one(sender: Sender) -> None:
    future = sender.future()
    thread = later(future.cancel)
    done, _ = concurrent.futures.wait([future], timeout=5)
    thread.join()
    assert done == {future}


def test_callbacks_run_once_each_and_a_failing_one_hurts_nobody(
    sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    future = sender.future()
    seen: list[object] = []
    future.add_done_callback(seen.append)
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(seen.append)
    sender.start(future)
    sender.finish(future)
    future.add_done_callback(seen.append)
    assert seen == [future, future, future]
    assert "a callback of a send failed" in caplog.text


def test_asyncio_can_wait_for_it(sender: Sender) -> None:
    async def main() -> int:
        future = sender.future()
        sender.start(future)
        thread = later(lambda: sender.finish(future))
        result = await asyncio.wait_for(asyncio.wrap_future(future), 5)
        thread.join()
        return result.queue

    assert asyncio.run(main()) == 2


def test_a_cancelled_task_withdraws_the_message(sender: Sender) -> None:
    future = sender.future()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.01)

    asyncio.run(main())
    assert future.cancelled()
