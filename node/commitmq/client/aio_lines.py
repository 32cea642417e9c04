"""Sends of an asyncio producer that wait for their turn, and results on their way back to the event loop.

A send waits where the producer would block: for the queues of its topic, or for room among the pending messages. It stands in
the line of its topic, and later sends to the topic stand behind it. So the producer gets messages in the order of the calls. A
task of the loop empties each line.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final

from commitmq.client.message import Message
from commitmq.client.results import SendResult
from commitmq.client.routes import not_stored
from commitmq.client.sending.options import MessageOptions
from commitmq.client.sending.outbox import NoRoom
from commitmq.errors import SendError

# Sends and results between two turns of the loop.
_STEP: Final = 256
# The longest wait for one look-up or for room. After it the sends that are out of time fail, and other topics have their turn.
_LONGEST_WAIT_S: Final = 1.0


class PendingSend(asyncio.Future[SendResult]):
    """The future that the program awaits. Cancelling it withdraws the message if the connection does not have it yet."""

    sent: Future[SendResult] | None = None
    arrivals: Arrivals

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done() and self.sent is not None:
            self.sent.cancel()
        return super().cancel(msg)

    def arrived(self, _sent: Future[SendResult]) -> None:
        """The message has its outcome. Called in the producer's thread, or in the thread that cancels."""
        self.arrivals.add(self)


class Arrivals:
    """Results on their way from the producer's thread to one loop. One call of the loop takes all results of a run.

    ``asyncio.wrap_future`` makes one call for each message, and each call wakes the loop by a system call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[PendingSend] = deque()
        self._is_called = False

    def add(self, pending: PendingSend) -> None:
        """Hand over one result, in any thread."""
        self._done.append(pending)
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._land)

    def _land(self) -> None:
        self._is_called = False  # before the look: a result that comes after it calls again
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
        self.loop.call_soon(self._land)  # the loop has a turn for other tasks before the rest


class TopicUnknownError(Exception):
    """The coordinator has to be asked for the queues of the topic."""


class QueuedSend:
    """A send that stands in a line. ``deadline`` is in monotonic seconds."""

    __slots__ = ("body", "deadline", "fields", "pending")

    def __init__(self, pending: PendingSend, body: bytes | Message, fields: MessageOptions, deadline: float) -> None:
        self.pending = pending
        self.body = body
        self.fields = fields
        self.deadline = deadline

    def fail(self, code: str, sentence: str) -> None:
        """The message is not stored. A send that has its outcome keeps it."""
        if not self.pending.done():
            self.pending.set_exception(not_stored(code, sentence))


HandOver = Callable[[PendingSend, str, bytes | Message, MessageOptions], None]
"""Gives a send to the producer. Raises NoRoom or TopicUnknownError where the producer would block."""
Ask = Callable[[str, float], Future[int]]
"""Asks for the queues of a topic, in a thread and until a deadline."""


class Lines:
    """The lines of one event loop, by topic. All methods but :meth:`note_room` and :meth:`give_up` are called in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hand_over: HandOver, ask: Ask) -> None:
        self.loop = loop
        self.arrivals = Arrivals(loop)
        self.by_topic: dict[str, deque[QueuedSend]] = {}
        """A topic is here while a send to it has to stand in its line."""
        self._hand_over = hand_over
        self._ask = ask
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        """Sends that stand in a line."""
        return sum(map(len, self.by_topic.values()))

    def add(self, topic: str, send: QueuedSend) -> None:
        """Put ``send`` at the end of the line of ``topic``."""
        line = self.by_topic.get(topic)
        if line is None:
            line = self.by_topic[topic] = deque()
            task = self.loop.create_task(self._empty(topic, line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        line.append(send)

    def note_room(self) -> None:
        """There is room for another message, or was a moment ago. Called in any thread, with the producer's lock."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._room.set)

    # ------------------------------------------------------------ the end

    async def wait_until_empty(self, deadline: float) -> bool:
        """Wait until nothing stands in a line; False when ``deadline`` passed before that."""
        while self._tasks:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.wait(set(self._tasks), timeout=left_s)
        return True

    async def turn_away(self) -> None:
        """Fail every send that stands in a line: the producer is closed."""
        for line in list(self.by_topic.values()):
            for at, one in enumerate(list(line)):
                if at % _STEP == _STEP - 1:
                    await asyncio.sleep(0)
                one.fail("CLIENT_CLOSED", "the producer was closed before the message was sent")

    def cancel(self) -> None:
        """End the tasks. Each cancels the sends of its line."""
        for task in self._tasks:
            task.cancel()

    def give_up(self) -> None:
        """Fail every send that stands in a line: the producer serves another loop from now on. Called in that other loop."""
        lines, self.by_topic = list(self.by_topic.values()), {}
        tasks, self._tasks = self._tasks, set()
        if not (lines or tasks):
            return
        try:
            self.loop.call_soon_threadsafe(_fail_lines, lines, tasks)
        except RuntimeError:  # the loop is closed
            _fail_lines_of_a_closed_loop(lines, tasks)

    # ------------------------------------------------------------ the task of one line

    async def _empty(self, topic: str, line: deque[QueuedSend]) -> None:
        """Hand over the sends of ``line``, in their order, until none is left."""
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
                        await self._fail_late(line, problem)
                        continue
                line.popleft()
        finally:
            if self.by_topic.get(topic) is line:
                del self.by_topic[topic]
            for one in line:  # this task was cancelled: nobody else would send them
                one.pending.cancel()

    async def _try(self, topic: str, first: QueuedSend) -> SendError | None:
        """Hand over ``first``, or fail it; else wait a while, and return the problem that it waits for."""
        left_s = first.deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise not_stored("TIMEOUT", "not sent in time")
            self._hand_over(first.pending, topic, first.body, {**first.fields, "timeout_s": left_s})
        except NoRoom as error:
            await self._wait_for_room(left_s)
            return not_stored("CLIENT_BUFFER_FULL", f"{error.pending} messages of this producer are still pending")
        except TopicUnknownError:
            refusal = await self._look_up(topic, min(left_s, _LONGEST_WAIT_S))
            if refusal is None or refusal.code == "NODE_UNAVAILABLE":
                return refusal or not_stored("TIMEOUT", "not sent in time")
            if not first.pending.done():
                first.pending.set_exception(refusal)
        except Exception as error:
            first.pending.set_exception(error)
        return None

    async def _wait_for_room(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(longest_s, _LONGEST_WAIT_S)):
                await self._room.wait()
        self._room.clear()

    async def _look_up(self, topic: str, longest_s: float) -> SendError | None:
        """Ask for the queues of ``topic`` in a thread; returns the error of a look-up that failed."""
        loop = self.loop
        answered = asyncio.Event()

        def tell(_asked: Future[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(answered.set)

        asked = self._ask(topic, time.monotonic() + longest_s)
        asked.add_done_callback(tell)
        await answered.wait()
        try:
            asked.result()
        except SendError as error:
            return error
        return None

    async def _fail_late(self, line: deque[QueuedSend], problem: SendError) -> None:
        """Fail the sends in ``line`` whose time is over, in any place of it."""
        now = time.monotonic()
        for at, one in enumerate(list(line)):
            if at % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            if one.deadline <= now:
                one.fail(problem.code, problem.message)


def _fail_lines(lines: Iterable[deque[QueuedSend]], tasks: Iterable[asyncio.Task[None]]) -> None:
    """Fail the sends of ``lines``. Called in their own loop."""
    for line in lines:
        for one in line:
            one.fail("CLIENT_CLOSED", "the producer went on in another event loop before the message was sent")
    for task in tasks:
        task.cancel()


def _fail_lines_of_a_closed_loop(lines: Iterable[deque[QueuedSend]], tasks: Iterable[asyncio.Task[None]]) -> None:
    """As :func:`_fail_lines`. A closed loop takes no calls, so this wakes none of the tasks that wait there."""
    for line in lines:
        for one in line:
            with contextlib.suppress(RuntimeError):
                one.fail("CLIENT_CLOSED", "the event loop was closed before the message was sent")
        line.clear()
    for task in tasks:
        coroutine = task.get_coro()
        if coroutine is not None:
            with contextlib.suppress(RuntimeError):
                coroutine.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own word for: nobody need be told
