"""The future of one asynchronous send: a ``concurrent.futures.Future`` that costs a fraction of one.

The standard class makes a condition variable for each object. At 60,000 sends a second that is the largest single cost. Here
all futures of a producer share the producer's lock. A future keeps the fields that ``concurrent.futures.wait``,
``as_completed`` and ``asyncio.wrap_future`` look at, and makes its lists when a thread waits. It also holds the message, so a
send allocates one object; all fields are slots.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Final, Protocol

from commitmq.client.results import RunAck, SendResult
from commitmq.errors import SendError

if TYPE_CHECKING:
    from commitmq.client.sending.line import Ticket

    Callback = Callable[[Future[SendResult]], object]

# The helpers of concurrent.futures compare the state with these strings.
_PENDING = "PENDING"
_RUNNING = "RUNNING"
_CANCELLED = "CANCELLED"
_CANCELLED_AND_NOTIFIED = "CANCELLED_AND_NOTIFIED"
_FINISHED = "FINISHED"
_DONE = frozenset((_CANCELLED, _CANCELLED_AND_NOTIFIED, _FINISHED))

_LONG_S: Final = 1.0

_log = logging.getLogger("commitmq.client")


class FutureOwner(Protocol):
    """The outbox that sends the message of a future."""

    lock: threading.RLock
    result_waiters: set[Ticket]
    """Tickets of threads that wait for a result."""

    def forget(self, future: SendFuture) -> None:
        """``future`` was cancelled (lock held)."""

    def add_waiter(self, ticket: Ticket) -> None:
        """A thread begins to wait for a result (lock held): put its ``ticket`` into ``result_waiters``."""


class _Watch:
    """The callbacks and the waiters of a future."""

    __slots__ = ("callbacks", "waiters")

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self.waiters: list[Any] = []


class SendFuture(Future[SendResult]):
    """Result of a pending send. States: pending (may be cancelled), running (passed to the connection), finished.

    Cancelling works only while the message was not passed to the connection; then it is not stored.
    """

    __slots__ = (
        "_exception",
        "_index",
        "_run",
        "_state",
        "_watch",
        "body",
        "born",
        "deadline",
        "encoded_extras",
        "sender",
        "size_bytes",
    )

    _index: int

    def __init__(  # (the base class's __init__ is what this class avoids)
        self,
        sender: FutureOwner,
        body: bytes,
        encoded_extras: tuple[bytes, int, int] | None,
        born: int,
        size_bytes: int,
        deadline: float,
    ) -> None:
        """``encoded_extras``: encoded properties, flag and compression bits of the sysFlag; None for a message without any.

        Outbox.submit does the same without the call.
        """
        self.sender = sender
        self.body = body
        self.encoded_extras = encoded_extras
        self.born = born
        self.size_bytes = size_bytes
        self.deadline = deadline
        self._state = _PENDING
        self._run: RunAck | None = None
        self._watch: _Watch | None = None

    # ------------------------------------------------------------ what concurrent.futures' helpers look at

    @property
    def _condition(self) -> threading.RLock:  # type: ignore[override]
        # The helpers lock it. They neither wait on it nor notify it: the waiters wake them.
        return self.sender.lock

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return self._watched().waiters

    @property
    def _result(self) -> SendResult | None:  # type: ignore[override]
        return self._run.result(self._index) if self._run is not None else None

    def _watched(self) -> _Watch:
        if self._watch is None:
            self._watch = _Watch()
        return self._watch

    # ------------------------------------------------------------ the public interface of Future

    def cancel(self) -> bool:
        """Withdraw the message if the connection does not have it yet. True when it will never be sent."""
        with self.sender.lock:
            if self._state in (_CANCELLED, _CANCELLED_AND_NOTIFIED):
                return True
            if self._state != _PENDING:
                return False
            self._state = _CANCELLED_AND_NOTIFIED
            self.sender.forget(self)
            if self._watch is not None:
                for waiter in self._watch.waiters:
                    waiter.add_cancelled(self)
        run_callbacks((self,))
        return True

    def cancelled(self) -> bool:
        return self._state in (_CANCELLED, _CANCELLED_AND_NOTIFIED)

    def running(self) -> bool:
        return self._state == _RUNNING

    def done(self) -> bool:
        return self._state in _DONE

    def result(self, timeout: float | None = None) -> SendResult:
        """The result; raises SendError, CancelledError, or TimeoutError after ``timeout`` seconds (still pending)."""
        run = self._run
        if run is not None:  # (a stream of sends asks for thousands of results that are there)
            return run.result(self._index)
        return self.result_by(_deadline(timeout))

    def result_by(self, deadline: float | None) -> SendResult:
        """:meth:`result` with a time of ``time.monotonic()`` instead of seconds."""
        run = self._run
        if run is None:
            if self._state not in _DONE:
                self._wait(deadline)
            run = self._run
        if run is not None:
            return run.result(self._index)
        if self._state != _FINISHED:
            raise CancelledError
        assert self._exception is not None
        try:
            raise self._exception
        finally:
            # The traceback refers to this frame: without the cycle the error is freed at once.
            self = None  # type: ignore[assignment]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of a failed send, None for a stored one; raises as :meth:`result` for the other cases."""
        if self._state not in _DONE:
            self._wait(_deadline(timeout))
        if self.cancelled():
            raise CancelledError
        return self._exception

    def add_done_callback(self, fn: Callback) -> None:
        """Call ``fn(future)`` when the future is done: at once if it is done already, else in the producer's thread."""
        with self.sender.lock:
            if self._state not in _DONE:
                self._watched().callbacks.append(fn)
                return
        _call(fn, self)

    def _wait(self, deadline: float | None) -> None:
        ticket = _thread.allocate_lock()
        ticket.acquire()

        def wake(_future: Future[SendResult]) -> None:
            ticket.release()

        sender = self.sender
        result_waiters = sender.result_waiters
        try:
            with sender.lock:
                if self._state in _DONE:
                    return
                callbacks = self._watched().callbacks
                callbacks.append(wake)
                sender.add_waiter(ticket)
            while self._state not in _DONE:
                left_s = _LONG_S if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    break
                ticket.acquire(timeout=min(left_s, _LONG_S))
        finally:
            result_waiters.discard(ticket)
        if (
            self._state in _DONE
        ):  # without the lock: all that wake together would wait for it, and nothing undoes a state
            return
        with sender.lock:
            if self._state in _DONE:
                return
            if wake in callbacks:
                callbacks.remove(wake)
        raise FutureTimeoutError("the send is still pending")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def finish_run(futures: list[SendFuture], run: RunAck) -> tuple[list[SendFuture], list[SendFuture]]:
    """Resolve all futures of a stored run, lock held.

    Returns the futures whose callbacks must run afterwards, and the futures that were done before because their time was over.
    """
    called: list[SendFuture] = []
    before: list[SendFuture] = []
    for index, future in enumerate(futures):
        if future._state == _RUNNING:
            future._index = index
            future._exception = None
            future._run = run
            future._state = _FINISHED
            # The program may keep the future for long. It should not keep the message too.
            future.body = b""
            future.encoded_extras = None
            if future._watch is not None:
                for waiter in future._watch.waiters:
                    waiter.add_result(future)
                called.append(future)
        else:
            before.append(future)
    return called, before


def fail_all(futures: Iterable[SendFuture], make_error: Callable[[], SendError]) -> list[SendFuture]:
    """Fail all futures that are not done, lock held, each with an error of its own; returns as finish_run."""
    called = []
    for future in futures:
        if future._state in _DONE:
            continue
        future._exception = make_error()
        future._state = _FINISHED
        future.body = b""
        future.encoded_extras = None
        if future._watch is not None:
            for waiter in future._watch.waiters:
                waiter.add_exception(future)
            called.append(future)
    return called


def run_callbacks(futures: Iterable[SendFuture]) -> None:
    """Call the done callbacks, without the lock: a callback may send."""
    for future in futures:
        if future._watch is not None:
            callbacks, future._watch.callbacks = future._watch.callbacks, []
            for callback in callbacks:
                _call(callback, future)


def _call(callback: Callback, future: SendFuture) -> None:
    try:
        callback(future)
    except Exception:
        _log.exception("a callback of a send failed", extra={"fields": {}})
