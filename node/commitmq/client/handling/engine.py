"""What the handlers, the fetching loop and the thread that sends messages back have in common: the backlog under one lock.

Three parties use it. The fetching loop opens, fills and drops queues. The pool (:mod:`threads` or :mod:`tasks`) takes
entries and says what came of them. A thread of the engine's own sends failed messages back, so that no handler waits for the
node; it also wakes the pool when an entry is due again.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

from commitmq.client.handling.consume_result import ConsumeResult, HandlerResult, delay_of
from commitmq.client.handling.send_back import SendBackRequest, SendBackResult, request_of
from commitmq.client.handling.settings import HandlerCounts, Settings
from commitmq.client.message import Message
from commitmq.log import get_log


class Limits(NamedTuple):
    """The most unfinished messages, bytes and span of offsets of one queue; ``span`` None: no limit."""

    messages: int
    size_bytes: int
    span: int | None


class UnfinishedMessage:
    """One unfinished message."""

    __slots__ = ("message", "offset", "queue", "size_bytes")

    def __init__(self, queue: ProcessQueue, message: Message) -> None:
        self.queue = queue
        self.message = message
        self.offset = message.queue_offset
        self.size_bytes = len(message.raw_body)


class ProcessQueue:
    """The unfinished messages of one queue: RocketMQ's ProcessQueue. Pure: the caller brings the clock, and one lock for all
    calls.

    An entry *waits*, or it is *out*: with a handler, or on its way back to the node. ``first`` is the lowest unfinished
    offset, above which nothing may be committed.

    In ``ordered`` mode one entry is out at most, and it is the first.
    """

    def __init__(self, limits: Limits, *, ordered: bool) -> None:
        self.limits = limits
        self.ordered = ordered
        self.size_bytes = 0
        self.out = 0  # entries that a handler has, or that are on their way back
        self.is_revoked = False  # it is wanted back: nothing starts
        self.is_dropped = False  # it was taken away: nothing starts, and nothing counts any more
        self.is_held = False  # its limits keep it from being fetched
        self._unfinished: OrderedDict[int, UnfinishedMessage] = OrderedDict()
        self._waiting: deque[UnfinishedMessage] = deque()
        self._later: list[tuple[float, int, UnfinishedMessage]] = []  # heap: to be tried again, with the time
        self._suspended_until = 0.0  # ordered mode
        self._last = -1  # the highest offset that was fetched

    def __len__(self) -> int:
        """The unfinished messages."""
        return len(self._unfinished)

    @property
    def first(self) -> int | None:
        """The lowest unfinished offset."""
        return next(iter(self._unfinished), None)

    def add(self, messages: Iterable[Message]) -> None:
        """Messages that were fetched, in the order of their offsets. One that is here already is skipped."""
        for message in messages:
            if message.queue_offset in self._unfinished:
                continue
            entry = UnfinishedMessage(self, message)
            self._unfinished[entry.offset] = entry
            self._last = entry.offset
            self.size_bytes += entry.size_bytes
            self._waiting.append(entry)

    def take(self, now: float) -> UnfinishedMessage | None:
        """The next entry to be handled, which is out from now on."""
        if not self.is_startable(now):
            return None
        if self._later and self._later[0][0] <= now:
            entry = heapq.heappop(self._later)[2]
        else:
            entry = self._waiting.popleft()
        self.out += 1
        return entry

    def is_startable(self, now: float) -> bool:
        """Whether :meth:`take` has an entry."""
        if self.is_revoked or self.is_dropped:
            return False
        if self.ordered:
            return bool(self._waiting) and not self.out and self._suspended_until <= now
        return bool(self._waiting) or bool(self._later and self._later[0][0] <= now)

    def next_at(self) -> float | None:
        """When an entry that is tried again here is due; None: there is none."""
        if self.ordered:
            return self._suspended_until if self._waiting and not self.out else None
        return self._later[0][0] if self._later else None

    def finish(self, entry: UnfinishedMessage) -> None:
        """An entry that was out is done."""
        self.out -= 1
        if self._unfinished.pop(entry.offset, None) is not None:
            self.size_bytes -= entry.size_bytes

    def put_back(self, entry: UnfinishedMessage, at: float) -> None:
        """An entry that was out is tried again here, not before ``at``. In ordered mode the queue waits for it."""
        self.out -= 1
        if self.is_dropped:
            return
        if self.ordered:
            self._waiting.appendleft(entry)
            self._suspended_until = at
        else:
            heapq.heappush(self._later, (at, entry.offset, entry))

    def give_up(self, entry: UnfinishedMessage) -> None:
        """An entry that was out came to no end: it stays unfinished, and nothing starts it again."""
        self.out -= 1

    def drop(self) -> None:
        """The queue was taken away. What is out may come back, without an effect."""
        self.is_dropped = True
        self._unfinished.clear()
        self._waiting.clear()
        self._later.clear()
        self.size_bytes = 0

    def room(self) -> tuple[int, int]:
        """How many messages and bytes more the limits allow; 0 messages when the queue is full."""
        messages = self.limits.messages - len(self._unfinished)
        if self.limits.span is not None:
            # RocketMQ measures it to the highest unfinished offset, which bounds nothing when all but the first are done. Here
            # it bounds what is handled again after a crash. Offsets that a filter omitted count too.
            first = self.first
            messages = min(messages, self.limits.span - (0 if first is None else self._last - first))
        size_bytes = self.limits.size_bytes - self.size_bytes
        return (messages, size_bytes) if messages > 0 and size_bytes > 0 else (0, 0)


class Backlog:
    """The unfinished messages of all queues of a consumer, and whose turn it is. Pure, as :mod:`process_queue`.

    Queues that have something to start take turns, so that a queue with much does not keep another one waiting: the
    retry topic's messages come between those of the others.

    :meth:`open` makes its queues.
    """

    def __init__(self, limits: Limits, *, ordered: bool) -> None:
        self._limits = limits
        self._ordered = ordered
        self._ready: OrderedDict[ProcessQueue, None] = OrderedDict()  # those that may have something to start
        self._later: list[tuple[float, int, ProcessQueue]] = []  # heap: when to look at which queue
        self._count = itertools.count()
        self._queues: set[ProcessQueue] = set()

    def open(self) -> ProcessQueue:
        """A queue that was assigned, or is again."""
        queue = ProcessQueue(self._limits, ordered=self._ordered)
        self._queues.add(queue)
        return queue

    def drop(self, queue: ProcessQueue) -> None:
        """The queue was taken away."""
        queue.drop()
        self._queues.discard(queue)
        self._ready.pop(queue, None)

    def revoke(self, queue: ProcessQueue, wanted_back: bool) -> None:
        """The queue is wanted back, or stays after all."""
        queue.is_revoked = wanted_back
        self._look_at(queue)

    def add(self, queue: ProcessQueue, messages: Iterable[Message]) -> None:
        """Messages of ``queue`` that were fetched."""
        queue.add(messages)
        self._look_at(queue)

    def take(self, now: float) -> UnfinishedMessage | None:
        """The next entry to be handled, which is out from now on."""
        self.due(now)
        while self._ready:
            queue, _ = self._ready.popitem(last=False)
            entry = queue.take(now)
            if entry is not None:
                if queue.is_startable(now):
                    self._ready[queue] = None  # behind the others
                return entry
            self._plan(queue)
        return None

    def finish(self, entry: UnfinishedMessage) -> None:
        """See :meth:`ProcessQueue.finish`."""
        entry.queue.finish(entry)
        self._look_at(entry.queue)

    def put_back(self, entry: UnfinishedMessage, at: float) -> None:
        """See :meth:`ProcessQueue.put_back`."""
        entry.queue.put_back(entry, at)
        self._plan(entry.queue)

    def due(self, now: float) -> int:
        """Look at the queues in which something is due again; returns how many they are."""
        count = 0
        while self._later and self._later[0][0] <= now:
            self._look_at(heapq.heappop(self._later)[2])
            count += 1
        return count

    def next_at(self) -> float | None:
        """When something is due that cannot start now; None: nothing is."""
        return self._later[0][0] if self._later else None

    @property
    def unfinished(self) -> int:
        """The unfinished messages of all queues."""
        return sum(map(len, self._queues))

    @property
    def out(self) -> int:
        """The entries that are out, of the queues that were not taken away."""
        return sum(queue.out for queue in self._queues)

    def _look_at(self, queue: ProcessQueue) -> None:
        if not queue.is_dropped:
            self._ready[queue] = None

    def _plan(self, queue: ProcessQueue) -> None:
        at = queue.next_at()
        if at is not None and not queue.is_dropped:
            heapq.heappush(self._later, (at, next(self._count), queue))


SEND_BACK_PAUSE_S: Final = 5.0
"""So long a message waits that could not be sent back, before it is tried again here (RocketMQ's rule)."""
SUSPEND_S: Final = 1.0
"""So long a queue waits in ordered mode (RocketMQ's suspendCurrentQueueTimeMillis)."""
_MOST_REQUESTS: Final = 100  # that are under way to the node at a time

_log = get_log("consumer")


class SendBackProtocol(Protocol):
    """:class:`~commitmq.client.handling.send_back.SendBack`, as far as the engine uses it."""

    def exchange(self, requests: list[SendBackRequest]) -> list[SendBackResult]: ...
    def close(self) -> None: ...


class Engine:
    """What handlers, the fetching loop and the sender of returns share. ``lock`` guards everything; a pool's
    condition shares it.
    """

    def __init__(
        self, settings: Settings, sender: SendBackProtocol, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.lock = threading.RLock()  # a signal handler in the loop's thread may ask for the counts
        self.wake: Callable[[int], None] = lambda count: None
        """Set by the pool. Called with the lock held: that many entries may be taken now."""
        self.ring: Callable[[], None] = lambda: None
        """Set by the loop: a queue that was full has room again, or nothing runs any more."""
        self.is_stopping = False
        self._sender = sender
        self._clock = clock
        span = None if settings.ordered else settings.max_unfinished_span
        limits = Limits(settings.max_unfinished, settings.max_unfinished_bytes, span)
        self._backlog = Backlog(limits, ordered=settings.ordered)
        self._enough = max(1, min(settings.max_unfinished, settings.max_unfinished_span) // 2)
        self._running = self._handled = self._failed = self._dead = 0
        self._back: deque[tuple[UnfinishedMessage, SendBackRequest]] = deque()  # to be sent back
        self._exchanging = 0
        self._max_retries = 0
        self._is_closed = False
        self._changed = threading.Condition(self.lock)  # for the engine's thread
        self._thread = threading.Thread(target=self._keep, name="commitmq-send-back", daemon=True)

    # ------------------------------------------------------------ the loop's side

    def start(self, max_retries: int) -> None:
        """Start the thread that sends messages back. ``max_retries``: the group's own number, for a program without one."""
        self._max_retries = max_retries if self.settings.max_retries is None else self.settings.max_retries
        self._thread.start()

    def open(self) -> ProcessQueue:
        """A queue that was assigned."""
        with self.lock:
            return self._backlog.open()

    def drop(self, queue: ProcessQueue) -> None:
        """The queue was taken away."""
        with self.lock:
            self._backlog.drop(queue)

    def revoke(self, queue: ProcessQueue, wanted_back: bool) -> None:
        """The queue is wanted back, or stays after all."""
        with self.lock:
            if queue.is_revoked != wanted_back:
                self._backlog.revoke(queue, wanted_back)
                self.wake(len(queue))

    def add(self, queue: ProcessQueue, messages: Iterable[Message]) -> None:
        """Messages of ``queue`` that were fetched."""
        with self.lock:
            before = len(queue)
            self._backlog.add(queue, messages)
            self.wake(len(queue) - before)

    def room(self, queue: ProcessQueue) -> tuple[int, int]:
        """How many messages and bytes more of ``queue`` may be fetched; see :meth:`ring` for one without."""
        with self.lock:
            room = queue.room()
            queue.is_held = not room[0]
            return room

    def first_unfinished(self, queue: ProcessQueue) -> int | None:
        """The lowest offset of ``queue`` that must not be passed; None: all that was fetched is done."""
        with self.lock:
            return queue.first

    def is_idle(self, queue: ProcessQueue) -> bool:
        """Whether nothing of ``queue`` is with a handler or on its way back."""
        with self.lock:
            return not queue.out

    def stop(self) -> None:
        """Start nothing more."""
        with self.lock:
            self.is_stopping = True
            self.wake(self.settings.workers)
            self._changed.notify()

    @property
    def is_quiet(self) -> bool:
        """Whether no handler runs, and nothing is on its way back."""
        with self.lock:
            return not self._running and not self._back and not self._exchanging

    def close(self) -> None:
        """End the thread. What is not sent back by now comes again, to whoever gets its queue."""
        with self.lock:
            self.is_stopping = self._is_closed = True
            self.ring = lambda: None  # the bell is closed with the consumer, and a handler may still run
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._sender.close()

    @property
    def counts(self) -> HandlerCounts:
        with self.lock:
            return HandlerCounts(self._handled, self._failed, self._dead, self._running, self._backlog.unfinished)

    # ------------------------------------------------------------ the pool's side

    def take(self) -> UnfinishedMessage | None:
        """The next entry, for a handler that runs from now on. The lock is held by the caller."""
        if self.is_stopping:
            return None
        entry = self._backlog.take(self._clock())
        if entry is not None:
            self._running += 1
        return entry

    def judge(self, entry: UnfinishedMessage, verdict: HandlerResult) -> None:
        """The handler that had ``entry`` has ended."""
        delay_s = verdict.delay_s
        if verdict.result is ConsumeResult.RETRY and delay_s is None:
            delay_s = self._delay_of(entry)
        with self.lock:
            self._running -= 1
            if verdict.result is ConsumeResult.DONE:
                self._handled += 1
            else:
                self._failed += 1
            if entry.queue.is_dropped:
                pass  # the next owner gets the message again
            elif verdict.result is ConsumeResult.DONE:
                self._finish(entry)
            elif self.settings.ordered and not self._is_dead(entry, verdict):
                self._put_back(entry, SUSPEND_S if delay_s is None else delay_s)
            else:
                dead = self.settings.ordered or verdict.result is ConsumeResult.DEAD
                most = self._max_retries
                request = request_of(entry.message, dead=dead, delay_s=delay_s, max_retries=most)
                self._back.append((entry, request))
                self._changed.notify()
            self._tell_the_end()

    def abandon(self, entry: UnfinishedMessage) -> None:
        """The handler that had ``entry`` was cancelled: its message stays unfinished."""
        with self.lock:
            self._running -= 1
            entry.queue.give_up(entry)
            self._tell_the_end()

    def _is_dead(self, entry: UnfinishedMessage, verdict: HandlerResult) -> bool:
        """Ordered mode: whether the message has had its tries."""
        return verdict.result is ConsumeResult.DEAD or entry.message.reconsume_times >= self._max_retries

    def _delay_of(self, entry: UnfinishedMessage) -> float | None:
        """The delay before the next try by the program's back-off, whose function may fail."""
        try:
            return delay_of(self.settings.backoff, entry.message.reconsume_times, self.settings.longest_delay_s)
        except Exception as error:
            _log.warning("the back-off function failed: RocketMQ's delay is taken", error=repr(error))
            return None

    def _finish(self, entry: UnfinishedMessage) -> None:
        self._backlog.finish(entry)
        if entry.queue.is_held and entry.queue.room()[0] >= self._enough:
            entry.queue.is_held = False
            self.ring()
        elif entry.queue.is_revoked and not entry.queue.out:
            self.ring()

    def _put_back(self, entry: UnfinishedMessage, delay_s: float) -> None:
        entry.message.reconsume_times += 1
        self._backlog.put_back(entry, self._clock() + delay_s)
        self._changed.notify()  # its thread waits until something is due
        if entry.queue.is_revoked and not entry.queue.out:
            self.ring()

    def _tell_the_end(self) -> None:
        if self.is_stopping and not self._running:
            self.ring()
            self._changed.notify()

    # ------------------------------------------------------------ the engine's thread

    def _keep(self) -> None:
        try:
            while batch := self._next_batch():
                self._send(batch)
        finally:
            self._sender.close()

    def _next_batch(self) -> list[tuple[UnfinishedMessage, SendBackRequest]]:
        """Wait for what is to be sent back; empty at the end. Wakes the pool in the meantime for what is due again."""
        with self.lock:
            while not self._is_closed:
                while self._back and self._back[0][0].queue.is_dropped:
                    self._back.popleft()  # the next owner gets the message again
                if self._back:
                    batch = [self._back.popleft() for _ in range(min(len(self._back), _MOST_REQUESTS))]
                    self._exchanging = len(batch)
                    return batch
                now = self._clock()
                due = self._backlog.due(now)
                if due:
                    self.wake(due)
                at = self._backlog.next_at()
                self._changed.wait(None if at is None else at - now)
            return []

    def _send(self, batch: list[tuple[UnfinishedMessage, SendBackRequest]]) -> None:
        try:
            answers = self._sender.exchange([request for _, request in batch])
        except Exception as error:
            # This thread must live: without it no failed message would ever be done.
            _log.exception("sending messages back failed")
            answers = [SendBackResult(error=error)] * len(batch)
        with self.lock:
            self._exchanging = 0
            for (entry, _), answer in zip(batch, answers, strict=True):
                self._dead += answer.is_dead
                if answer.error is None:
                    self._finish(entry)
                    if self.settings.ordered:
                        self.wake(1)  # the queue continues
                else:
                    _log.warning(
                        "a message could not be sent back: it is tried again here",
                        topic=entry.message.topic, queue=entry.message.queue_id, offset=entry.offset,
                        error=str(answer.error),
                    )  # fmt: skip
                    self._put_back(entry, SEND_BACK_PAUSE_S)
            self._tell_the_end()
