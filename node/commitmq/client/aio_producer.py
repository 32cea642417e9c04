"""The asyncio producer: a :class:`commitmq.Producer` that nothing keeps the loop waiting for.

A send that would have to wait, for what the node says of its topic or for room among the pending ones, stands in a line of
its topic, and those of the topic that come after it stand behind it: messages are handed over in the order of the calls. A
task of the loop empties each line; it asks in a thread, and is told when there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.message import Message, check_topic
from commitmq.client.producer import Producer
from commitmq.client.results import BatchResult, SendResult
from commitmq.client.routes import not_stored
from commitmq.client.sending.options import (
    BatchOptions,
    MessageOptions,
    OnDelivery,
    ProducerOptions,
    former_delivery,
    tell_delivery,
)
from commitmq.client.sending.outbox import NoRoom
from commitmq.errors import CommitMQError, SendError

_R = TypeVar("_R")

# How much is done between two turns of the loop.
_STEP: Final = 256
# A look-up takes so long at most: then the topics of other lines have their turn, and what is out of time is told.
_LOOK_UP_S: Final = 1.0


class _Pending(asyncio.Future[SendResult]):
    """What a task waits for; cancelling it withdraws the message where that is still possible."""

    sent: Future[SendResult] | None = None
    arrivals: _Arrivals

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done() and self.sent is not None:
            self.sent.cancel()
        return super().cancel(msg)

    def arrived(self, _sent: Future[SendResult]) -> None:
        """In the producer's thread, or where the message was cancelled."""
        self.arrivals.add(self)


class _Arrivals:
    """Results on their way from the producer's thread to one loop: one call of the loop for all of a run.

    ``asyncio.wrap_future`` makes one for each message, and a system call that wakes the loop with each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[_Pending] = deque()
        self._is_called = False

    def add(self, pending: _Pending) -> None:
        """In any thread."""
        self._done.append(pending)
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._land)

    def _land(self) -> None:
        self._is_called = False  # before the look: what comes behind it calls again
        for _ in range(_STEP):
            if not self._done:
                return
            pending = self._done.popleft()
            sent = pending.sent
            if pending.done() or sent is None:
                continue
            if sent.cancelled():
                pending.cancel()
            elif error := sent.exception(0):
                pending.set_exception(error)
            else:
                pending.set_result(sent.result(0))
        self._is_called = True
        self.loop.call_soon(self._land)  # the rest after the loop's next turn: others wait for theirs


class _TopicUnknownError(Exception):
    """The coordinator has to be asked for the queues of the topic."""


class _Waiting:
    """A send that stands in a line."""

    __slots__ = ("body", "deadline", "fields", "pending")

    def __init__(self, pending: _Pending, body: bytes | Message, fields: MessageOptions, deadline: float) -> None:
        self.pending = pending
        self.body = body
        self.fields = fields
        self.deadline = deadline


class AsyncProducer:
    """:class:`commitmq.Producer` for asyncio; same arguments, same errors.

    ``send`` waits for its ack; many tasks that send at the same time share runs. ``submit`` returns a future at once.
    Nothing here blocks the loop: a send beyond ``max_pending``, or to a topic of which the node says nothing, waits for its
    turn by itself, and fails when its ``timeout_s`` is over. (What a program submits without awaiting any of it is kept all
    the same: ``max_pending`` bounds what the connection's thread has.)
    ``linger_ms`` is 0 unless it is given: who awaits a future cannot be told from who does not.

    It serves one loop at a time, that of the last call. What waits for its turn in another loop then fails as not stored.
    """

    def __init__(
        self,
        node: str | None = None,
        *,
        idempotent: bool = False,
        producer_id: str | None = None,
        producer_epoch: int = 0,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """Arguments as of :class:`commitmq.Producer`."""
        if idempotent or producer_id is not None or producer_epoch:
            given = settings.get("delivery")
            settings["delivery"] = former_delivery(given, idempotent, producer_id, producer_epoch)
        settings.setdefault("linger_ms", 0.0)
        self._producer = Producer(node, **settings)
        self._producer._lanes.waiters.room = self._has_room
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-producer")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-routes")
        self._arrivals: _Arrivals | None = None
        self._lines: dict[str, deque[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches: set[asyncio.Task[BatchResult]] = set()
        self._room: asyncio.Event | None = None
        self._closing = False
        self._is_closed = False

    async def send(
        self,
        topic: str,
        body: bytes | Message,
        *,
        multi_dispatch: Iterable[str] | None = None,
        **fields: Unpack[MessageOptions],
    ) -> SendResult:
        """Send one message and wait for its ack; ``fields`` as in :meth:`commitmq.Producer.send`."""
        if multi_dispatch is not None:
            return await self._run(partial(self._producer.send, topic, body, multi_dispatch=multi_dispatch, **fields))
        return await self.send_async(topic, body, **fields)

    def send_async(
        self,
        topic: str,
        body: bytes | Message,
        *,
        on_delivery: OnDelivery | None = None,
        **fields: Unpack[MessageOptions],
    ) -> asyncio.Future[SendResult]:
        """Send one message; the future gets its result. The loop must be running. (:meth:`submit` is the same.)

        Arguments as of :meth:`commitmq.Producer.send_async`; ``on_delivery`` is called in the loop. What is wrong with the
        message itself is raised here, or by the future when the message had to wait.
        """
        loop = asyncio.get_running_loop()
        arrivals = self._arrivals
        if arrivals is None or arrivals.loop is not loop:
            arrivals = self._settle_in(loop)
        if self._closing:
            raise CommitMQError("the producer is closed")
        if on_delivery is not None:
            checks.callback("on_delivery", on_delivery)
        pending = _Pending(loop=loop)
        pending.arrivals = arrivals
        if on_delivery is not None:
            pending.add_done_callback(partial(tell_delivery, on_delivery))
        line = self._lines.get(topic)
        if line is None:
            try:
                self._hand_over(pending, topic, body, fields)
                return pending
            except (NoRoom, _TopicUnknownError):
                line = self._lines[topic] = deque()
                task = loop.create_task(self._empty(topic, line))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        line.append(_Waiting(pending, body, fields, time.monotonic() + self._producer._limit(fields.get("timeout_s"))))
        return pending

    submit = send_async

    async def send_batch(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> BatchResult:
        """Send many messages; see :meth:`commitmq.Producer.send_batch`. A cancelled one goes on in its thread."""
        return await self._run(partial(self._producer.send_batch, topic, messages, **fields))

    def send_batch_async(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> asyncio.Future[BatchResult]:
        """Send many messages; the future gets their result. The loop must be running.

        See :meth:`commitmq.Producer.send_batch_async`: batches are stored in the order of the calls. What that method raises,
        the future raises.
        """
        self._settle_in(asyncio.get_running_loop())
        if self._closing:
            raise CommitMQError("the producer is closed")
        # At once, not in the task's first turn: a flush or a close that comes next must find it.
        taken = self._thread.submit(self._producer.send_batch_async, topic, messages, **fields)
        batch = asyncio.ensure_future(self._batch(taken))
        self._batches.add(batch)
        batch.add_done_callback(self._batches.discard)
        return batch

    async def _batch(self, taken: Future[Future[BatchResult]]) -> BatchResult:
        submitting: asyncio.Future[Future[BatchResult]] = asyncio.wrap_future(taken)
        return await asyncio.wrap_future(await asyncio.shield(submitting))

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every submitted send is done. Raises TimeoutError as :meth:`commitmq.Producer.flush`."""
        self._settle_in(asyncio.get_running_loop())
        limit = self._producer._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        if not await self._lines_empty(deadline):
            waiting = sum(map(len, self._lines.values())) + self._producer._lanes.all_in_flight()
            raise TimeoutError(f"{waiting} messages are still pending after {limit} s")
        await self._run(partial(self._producer.flush, max(deadline - time.monotonic(), 0)))
        if self._batches:
            await asyncio.wait(self._batches, timeout=max(deadline - time.monotonic(), 0))

    async def close(self, timeout_s: float | None = None) -> None:
        """Send what is pending, close everything. Closing twice is allowed."""
        if self._is_closed:
            return
        self._settle_in(asyncio.get_running_loop())
        self._closing = True
        deadline = time.monotonic() + (self._producer._timeout_s if timeout_s is None else timeout_s)
        try:
            if not await self._lines_empty(deadline):
                await self._turn_away()
            await self._run(partial(self._producer.close, max(deadline - time.monotonic(), 0)))
        finally:
            if not self._is_closed:
                self._thread.submit(self._producer.close, 0)  # nothing is left to do, unless this was interrupted
            self._is_closed = True
            for task in self._tasks:
                task.cancel()
            self._asking.shutdown(wait=False)
            self._thread.shutdown(wait=False)

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ the lines

    def _settle_in(self, loop: asyncio.AbstractEventLoop) -> _Arrivals:
        """Serve ``loop``. The lines of the loop before it are given up: a loop that runs no more hands nothing over."""
        arrivals = self._arrivals
        if arrivals is not None and arrivals.loop is loop:
            return arrivals
        lines, self._lines = list(self._lines.values()), {}
        tasks, self._tasks = self._tasks, set()
        self._batches = set()
        now = self._arrivals = _Arrivals(loop)
        self._room = asyncio.Event()
        if arrivals is not None and (lines or tasks):
            try:
                arrivals.loop.call_soon_threadsafe(_give_up, lines, tasks)
            except RuntimeError:  # it is closed
                _give_up_closed(lines, tasks)
        return now

    def _hand_over(self, pending: _Pending, topic: str, body: bytes | Message, fields: MessageOptions) -> None:
        """Raises NoRoom or _TopicUnknownError instead of waiting; else as :meth:`commitmq.Producer.send_async`."""
        if self._producer._would_ask(check_topic(topic), body, fields):
            raise _TopicUnknownError
        pending.sent = self._producer.send_async(topic, body, **fields)
        pending.sent.add_done_callback(pending.arrived)

    def _has_room(self) -> None:
        """In any thread, with the producer's lock: there is room for another message, or was a moment ago."""
        arrivals, room = self._arrivals, self._room
        if arrivals is not None and room is not None:
            with contextlib.suppress(RuntimeError):
                arrivals.loop.call_soon_threadsafe(room.set)

    async def _empty(self, topic: str, line: deque[_Waiting]) -> None:
        """Hand over what stands in ``line``, in its order, until nothing does."""
        try:
            done = 0
            while line:
                done += 1
                if done % _STEP == 0:
                    await asyncio.sleep(0)
                first = line[0]
                if not first.pending.done():
                    problem = await self._try(topic, first)
                    if problem is not None:
                        await self._tell_late(line, problem)
                        continue
                line.popleft()
        finally:
            if self._lines.get(topic) is line:
                del self._lines[topic]
            for one in line:  # this task was cancelled: nobody else would send them
                one.pending.cancel()

    async def _try(self, topic: str, first: _Waiting) -> SendError | None:
        """Hand over one, or find out what is wrong with it; else wait a while, and return what it waits for."""
        left_s = first.deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise not_stored("TIMEOUT", "not sent in time")
            self._hand_over(first.pending, topic, first.body, {**first.fields, "timeout_s": left_s})
        except NoRoom as error:
            await self._wait_for_room(left_s)
            return not_stored("CLIENT_BUFFER_FULL", f"{error.pending} messages of this producer are still pending")
        except _TopicUnknownError:
            refusal = await self._look_up(topic, min(left_s, _LOOK_UP_S))
            if refusal is None or refusal.code == "NODE_UNAVAILABLE":
                return refusal or not_stored("TIMEOUT", "not sent in time")
            if not first.pending.done():
                first.pending.set_exception(refusal)
        except Exception as error:
            first.pending.set_exception(error)
        return None

    async def _wait_for_room(self, longest_s: float) -> None:
        room = self._room
        assert room is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(longest_s, _LOOK_UP_S)):
                await room.wait()
        room.clear()

    async def _look_up(self, topic: str, longest_s: float) -> SendError | None:
        """Have the producer ask for ``topic`` in a thread; returns what stood in the way."""
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def tell(_asked: Future[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(answered.set)

        asked = self._asking.submit(self._producer._lanes.routes.queues, topic, time.monotonic() + longest_s)
        asked.add_done_callback(tell)
        await answered.wait()
        try:
            asked.result()
        except SendError as error:
            return error
        return None

    async def _tell_late(self, line: deque[_Waiting], problem: SendError) -> None:
        """Fail those in ``line`` whose time is over, whatever stands before them."""
        now = time.monotonic()
        for at, one in enumerate(list(line)):
            if at % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            if one.deadline <= now and not one.pending.done():
                one.pending.set_exception(not_stored(problem.code, problem.message))

    async def _lines_empty(self, deadline: float) -> bool:
        """Wait until nothing stands in a line; False when ``deadline`` passed before that."""
        while self._tasks:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.wait(set(self._tasks), timeout=left_s)
        return True

    async def _turn_away(self) -> None:
        for line in list(self._lines.values()):
            for at, one in enumerate(list(line)):
                if at % _STEP == _STEP - 1:
                    await asyncio.sleep(0)
                if not one.pending.done():
                    one.pending.set_exception(
                        not_stored("CLIENT_CLOSED", "the producer was closed before the message was sent")
                    )

    async def _run(self, work: Callable[[], _R]) -> _R:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))


def _give_up(lines: Iterable[deque[_Waiting]], tasks: Iterable[asyncio.Task[None]]) -> None:
    """In their loop: nobody will hand over what stands in ``lines``."""
    for line in lines:
        for one in line:
            if not one.pending.done():
                one.pending.set_exception(
                    not_stored(
                        "CLIENT_CLOSED", "the producer went on in another event loop before the message was sent"
                    )
                )
    for task in tasks:
        task.cancel()


def _give_up_closed(lines: Iterable[deque[_Waiting]], tasks: Iterable[asyncio.Task[None]]) -> None:
    """As :func:`_give_up`, for a loop that is closed: it takes no calls, so none of those that wait there are woken."""
    for line in lines:
        for one in line:
            if not one.pending.done():
                with contextlib.suppress(RuntimeError):
                    one.pending.set_exception(
                        not_stored("CLIENT_CLOSED", "the event loop was closed before the message was sent")
                    )
        line.clear()
    for task in tasks:
        coroutine = task.get_coro()
        if coroutine is not None:
            with contextlib.suppress(RuntimeError):
                coroutine.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own word for: nobody need be told
