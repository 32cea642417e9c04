"""Messages and batches of a producer with several nodes that are on their way, and the thread that moves them between nodes.

A try at a node is a future of that node's producer. When it fails, the effort decides. The outcome comes in the sending
thread of one node, which must not wait for the room of another. So a thread of its own, the mover, makes each further try.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Final, Generic, TypeVar

from commitmq.client.producing.effort import Effort
from commitmq.client.producing.node import Node
from commitmq.client.results import BatchResult, BatchSendError, SendResult
from commitmq.client.routes import not_stored
from commitmq.client.sending.outbox import Waiters
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import SendError

_LONG_S: Final = 60.0
_JOIN_S: Final = 1.0
_T = TypeVar("_T")
_B = TypeVar("_B", BatchResult, BatchSendError)
_log = logging.getLogger("commitmq.client")

HandOver = Callable[[Node, float], "Future[_T]"]
"""Gives the message to the producer of a node, which has so many seconds for it. May block for room, and raises as
``send_async``."""
Place = Callable[[_T, Node], _T]
"""The result with the node in it."""


class Moving(Future[_T], Generic[_T]):
    """The future of the program. Cancelling it withdraws a message that was not handed to a connection yet."""

    def __init__(self, effort: Effort, hand_over: HandOver[_T], place: Place[_T], movers: Movers) -> None:
        super().__init__()
        self.effort = effort
        self.tried: Future[_T] | None = None
        """The present try; None between two."""
        self._hand_over = hand_over
        self._place = place
        self._movers = movers

    def try_next(self) -> float:
        """Hand the message to its next node, until one takes it. Returns 0, or the pause before the next try.

        Raises the error of a message that no node takes.
        """
        effort = self.effort
        while True:
            node = effort.next()
            try:
                tried = self._hand_over(node, effort.time_s(time.monotonic()))
            except SendError as error:
                pause_s = effort.failed(error, time.monotonic())
                if pause_s:
                    return pause_s
                continue
            self.tried = tried
            tried.add_done_callback(self._done)
            return 0.0

    def _done(self, tried: Future[_T]) -> None:
        """The present try has its outcome. Called in the sending thread of its node."""
        effort = self.effort
        node = effort.node
        assert node is not None
        try:
            result = tried.result(0)
        except CancelledError:
            self._cancelled()
            return
        except SendError as error:
            if isinstance(error, BatchSendError):
                placed_batch(error, node)
            if not may_move(error):
                self.fail(error)
                return
            try:
                pause_s = effort.failed(error, time.monotonic())
            except SendError as last:
                self.fail(last)
            else:
                self.tried = None
                self._movers.put(self, pause_s)
            return
        except BaseException as error:
            self.fail(error)
            return
        self.finish(lambda: self.set_result(self._place(result, node)))

    def fail(self, error: BaseException) -> None:
        """The message has failed."""
        self.finish(lambda: self.set_exception(error))

    def finish(self, tell: Callable[[], None]) -> None:
        """Tell the outcome, which a cancelled future does not take."""
        try:
            if not self.done() and self.set_running_or_notify_cancel():
                tell()
        finally:
            self._movers.ended(self)

    def cancel(self) -> bool:
        tried = self.tried
        if tried is not None:
            return tried.cancel()  # (its callback cancels this one)
        return self.cancelled() or (self._movers.withdraw(self) and self._cancelled())

    def _cancelled(self) -> bool:
        """The message was withdrawn."""
        self._movers.ended(self)
        return super().cancel() and not self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> _T:
        self._hurry()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._hurry()
        return super().exception(timeout)

    def _hurry(self) -> None:
        """A thread waits: end the linger of the node's messages."""
        tried = self.tried
        if isinstance(tried, SendFuture) and not tried.done():
            outbox: Any = tried.sender
            with outbox.lock:
                outbox.end_linger()


def may_move(error: SendError) -> bool:
    """Whether all of what failed with ``error`` may go to another node: no part of a batch is known to be stored."""
    return not (isinstance(error, BatchSendError) and error.stored)


class Movers:
    """The messages on their way, and the mover. Any thread may call the methods."""

    def __init__(self) -> None:
        self.waiters = Waiters()
        self.open: set[Moving[Any]] = set()
        """What has no outcome yet."""
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, Moving[Any]]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None
        self._bell = threading.Event()
        self._closed = False

    def begin(self, moving: Moving[_T]) -> Moving[_T]:
        """Make the first try, in the calling thread. Raises the error of a message that no node takes."""
        self.open.add(moving)
        try:
            pause_s = moving.try_next()
        except BaseException:
            self.ended(moving)
            raise
        if pause_s:
            self.put(moving, pause_s)
        return moving

    def put(self, moving: Moving[Any], pause_s: float) -> None:
        """Make the next try of ``moving`` after ``pause_s``, in the mover."""
        with self._lock:
            if not self._closed:
                heapq.heappush(self._due, (time.monotonic() + pause_s, next(self._count), moving))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="commitmq-producer-mover", daemon=True)
                    self._thread.start()
                self._bell.set()
                return
        moving.fail(_closed())

    def withdraw(self, moving: Moving[Any]) -> bool:
        """Take ``moving`` out of the line; False when it does not wait there."""
        with self._lock:
            left = [one for one in self._due if one[2] is not moving]
            found = len(left) < len(self._due)
            heapq.heapify(left)
            self._due = left
        return found

    def ended(self, moving: Moving[Any]) -> None:
        """``moving`` has its outcome."""
        self.open.discard(moving)
        if self.waiters.tickets:
            with self.waiters.lock:
                self.waiters.told()

    def flush(self, deadline: float) -> bool:
        """Wait until everything has its outcome; False when ``deadline`` passed before that."""
        return self.waiters.wait_until(lambda: not self.open, deadline)

    def is_mover(self) -> bool:
        """True in the mover. A wait for a send could last for ever there."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread, and fail the messages between two nodes, as not stored."""
        with self._lock:
            self._closed = True
            left, self._due = self._due, []
            self._bell.set()
        for _, _, moving in left:
            moving.fail(_closed())
        if self._thread is not None and not self.is_mover():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._bell.clear()
                now = time.monotonic()
                moving = heapq.heappop(self._due)[2] if self._due and self._due[0][0] <= now else None
                left_s = self._due[0][0] - now if self._due else _LONG_S
            if moving is None:
                self._bell.wait(max(left_s, 0))
                continue
            try:
                self._move(moving)
            except Exception as error:
                _log.exception("a message could not be moved to another node", extra={"fields": {}})
                moving.fail(error)

    def _move(self, moving: Moving[Any]) -> None:
        if moving.done():
            self.ended(moving)
            return
        if time.monotonic() >= moving.effort.deadline:
            moving.fail(moving.effort.out_of_time())
            return
        try:
            pause_s = moving.try_next()
        except Exception as error:
            moving.fail(error)
            return
        if pause_s:
            self.put(moving, pause_s)


def _closed() -> SendError:
    return not_stored("CLIENT_CLOSED", "the producer was closed before the message was sent")


def placed_batch(result: _B, node: Node) -> _B:
    """``result`` with the node that has its messages."""
    for ack in result.acks:
        ack.node = node.address
    return result


def placed(result: SendResult, node: Node) -> SendResult:
    """``result`` with the node that has the message."""
    return result._replace(node=node.address)
