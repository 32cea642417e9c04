"""The future of one asynchronous send: a ``concurrent.futures.Future`` that costs a fraction of one.

The standard class makes a condition variable per object, which at 60,000 sends a second is the largest single cost.
Here all futures of a producer share the producer's lock; each keeps the fields that ``concurrent.futures.wait``,
``as_completed`` and ``asyncio.wrap_future`` look at, and makes its lists only when somebody waits. The message to be
sent lives in the same object, so that a send allocates once.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from commitmq.client.results import RunAck, SendResult
from commitmq.errors import SendError

if TYPE_CHECKING:
    Callback = Callable[[Future[SendResult]], object]

# The names concurrent.futures uses; its helpers compare with these strings.
_PENDING = "PENDING"
_RUNNING = "RUNNING"
_CANCELLED = "CANCELLED"
_CANCELLED_AND_NOTIFIED = "CANCELLED_AND_NOTIFIED"
_FINISHED = "FINISHED"
_DONE = frozenset((_CANCELLED, _CANCELLED_AND_NOTIFIED, _FINISHED))

_log = logging.getLogger("commitmq.client")


class SendFuture(Future[SendResult]):
    """Result of a pending send. States: pending (may be cancelled), running (handed to the connection), finished.

    Cancelling works only while the message was not handed to the connection; then it is certainly not stored.
    """

    # Class-level defaults: an instance holds only what differs.
    _state = _PENDING
    _exception: BaseException | None = None
    _run: RunAck | None = None
    _index = 0
    _list_of_waiters: list[Any] | None = None
    _list_of_callbacks: list[Any] | None = None

    def __init__(  # (the base class's __init__ is what this class avoids)
        self,
        condition: threading.Condition,
        body: bytes,
        properties: bytes,
        unique_id: str,
        flag: int,
        sys_flag: int,
        born: int,
        size_bytes: int,
        deadline: float,
        forget: Callable[[SendFuture], None],
    ) -> None:
        self._condition = condition
        self.body = body
        self.properties = properties
        self.unique_id = unique_id
        self.flag = flag
        self.sys_flag = sys_flag
        self.born = born
        self.size_bytes = size_bytes
        self.deadline = deadline
        self._forget = forget

    # ------------------------------------------------------------ what concurrent.futures' helpers look at

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        waiters = self._list_of_waiters
        if waiters is None:
            waiters = self._list_of_waiters = []
        return waiters

    @property
    def _result(self) -> SendResult | None:  # type: ignore[override]
        return self._run.result(self._index) if self._run is not None else None

    # ------------------------------------------------------------ the public interface of Future

    def cancel(self) -> bool:
        """Withdraw the message if it was not handed to the connection yet; True when it will never be sent."""
        with self._condition:
            if self._state in (_CANCELLED, _CANCELLED_AND_NOTIFIED):
                return True
            if self._state != _PENDING:
                return False
            self._state = _CANCELLED_AND_NOTIFIED
            self._forget(self)
            for waiter in self._list_of_waiters or ():
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
        if self._state not in _DONE:
            self._wait(timeout)
        if self._run is not None:
            return self._run.result(self._index)
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                # The traceback refers to this frame: without the cycle the error is freed at once.
                self = None  # type: ignore[assignment]
        raise CancelledError

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of a failed send, None for a stored one; raises as :meth:`result` for the other cases."""
        if self._state not in _DONE:
            self._wait(timeout)
        if self.cancelled():
            raise CancelledError
        return self._exception

    def add_done_callback(self, fn: Callback) -> None:
        """Have ``fn(future)`` called once it is done: in the producer's thread, or here and now if it is already."""
        with self._condition:
            if self._state not in _DONE:
                if self._list_of_callbacks is None:
                    self._list_of_callbacks = []
                self._list_of_callbacks.append(fn)
                return
        _call(fn, self)

    def _wait(self, timeout: float | None) -> None:
        lock = _thread.allocate_lock()
        lock.acquire()
        with self._condition:
            if self._state in _DONE:
                return
            if self._list_of_callbacks is None:
                self._list_of_callbacks = []

            def wake(_future: Future[SendResult]) -> None:
                lock.release()

            self._list_of_callbacks.append(wake)
        if lock.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            return
        with self._condition:
            if self._state in _DONE:
                return
            if self._list_of_callbacks is not None and wake in self._list_of_callbacks:
                self._list_of_callbacks.remove(wake)
        raise FutureTimeoutError(f"the send is still pending after {timeout} s")

    # ------------------------------------------------------------ for the producer; the condition must be held

    def start(self) -> bool:
        """Mark it handed over; False when it was cancelled."""
        if self._state != _PENDING:
            return False
        self._state = _RUNNING
        return True

    def expired(self) -> bool:
        return time.monotonic() >= self.deadline


def finish_run(futures: list[SendFuture], run: RunAck) -> list[SendFuture]:
    """Resolve all futures of a stored run, condition held; returns those whose callbacks must run afterwards."""
    called = []
    for index, future in enumerate(futures):
        if future._state != _RUNNING:
            continue
        future._run = run
        future._index = index
        future._state = _FINISHED
        # What was sent is not needed any more; a kept future should not keep the message.
        future.body = future.properties = b""
        if future._list_of_waiters is not None:
            for waiter in future._list_of_waiters:
                waiter.add_result(future)
        if future._list_of_callbacks is not None:
            called.append(future)
    return called


def fail_all(futures: Iterable[SendFuture], make_error: Callable[[], SendError]) -> list[SendFuture]:
    """Fail all futures that are not done, condition held, each with an error of its own; returns as finish_run."""
    called = []
    for future in futures:
        if future._state in _DONE:
            continue
        future._exception = make_error()
        future._state = _FINISHED
        future.body = future.properties = b""
        if future._list_of_waiters is not None:
            for waiter in future._list_of_waiters:
                waiter.add_exception(future)
        if future._list_of_callbacks is not None:
            called.append(future)
    return called


def run_callbacks(futures: Iterable[SendFuture]) -> None:
    """Call the done callbacks, without the lock: a callback may send."""
    for future in futures:
        callbacks, future._list_of_callbacks = future._list_of_callbacks, None
        for callback in callbacks or ():
            _call(callback, future)


def _call(callback: Callback, future: SendFuture) -> None:
    try:
        callback(future)
    except Exception:
        _log.exception("a callback of a send failed", extra={"fields": {}})
