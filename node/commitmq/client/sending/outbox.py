"""The outbox: the messages that a producer has accepted and not yet sent, their limits, and the linger.

It has no socket and no thread. Producers put messages into it, and the pump takes them out
(:mod:`commitmq.client.sending.pump`). The clock is an argument. A producer has one outbox for each lane. They share one lock,
so that no message overtakes another while its topic moves from one lane to the other. They also share the waiting threads.

Single messages wait in groups by topic, queue, ack and the key of what they ask for, so that a group becomes a run. A group
begins with its oldest message, and groups take turns. Batches wait in the order of their submission.

**Linger.** A thin stream would make small runs, and a small run costs the node and its consumers as much as a large one. So
messages that come within ``linger_s`` after the last runs wait until that time is over. The linger ends early when
FULL_RUN_BYTES are pending, while a thread waits for a result, for a flush or for room, and while batches use the connection.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from commitmq.client.routes import not_stored
from commitmq.client.sending.line import Line, Ticket, wake_all
from commitmq.client.sending.run import MAX_RUN_BYTES, NEVER_S, Finish, Group, Job, MakeError
from commitmq.client.sending.send_future import SendFuture, fail_all, run_callbacks
from commitmq.errors import CommitMQError, InvalidMessageError, SendError, send_error

FULL_RUN_BYTES: Final = 256 * 1024
MAX_RUN_MESSAGES: Final = 4096
# The fixed cost of a message in the count of pending bytes. It need not be exact.
OVERHEAD_BYTES: Final = 512
NO_WAKE: Final = 1 << 62
ANY_BYTES: Final = -NO_WAKE
_LONG_S: Final = 1.0
_FAIL_STEP: Final = 256

_new = object.__new__
_time_ns = time.time_ns


def too_large(size_bytes: int, limit: int) -> InvalidMessageError:
    """The error for a body of ``size_bytes``."""
    return InvalidMessageError(
        f"the body has {size_bytes} bytes, the node allows {limit} (commit_log.max_message_bytes)"
    )


class NoRoom(Exception):
    """There is no room, and the caller must not wait for it. ``pending`` counts the pending messages."""

    def __init__(self, pending: int) -> None:
        super().__init__(pending)
        self.pending = pending


class HasOutbox(Protocol):
    """A pump."""

    @property
    def outbox(self) -> Outbox: ...


class Waiters:
    """The lock of a producer's outboxes, and the threads that wait for something in them."""

    def __init__(self) -> None:
        # (An RLock, because concurrent.futures' helpers take the condition of each future that they wait for. All these
        # conditions are this lock.)
        self.lock = threading.RLock()
        self.outboxes: list[Outbox] = []
        self.result_waiters: set[Ticket] = set()
        """Tickets of threads that wait for a result."""
        self.tickets: list[Ticket] = []
        """Tickets of threads that wait for room or for a flush; lock held to wake them."""
        self.room: Callable[[], None] | None = None
        """Where it is set, no caller waits for room, because submit raises NoRoom. After that it is called when there may be
        room again, in any thread and with the lock held."""
        self.room_wanted = False

    def told(self) -> None:
        """Wake the waiting threads after an outcome (lock held)."""
        if self.tickets:
            wake_all(self.tickets)
        if self.room_wanted and self.room is not None:
            self.room_wanted = False
            self.room()

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``holds`` after some outcome; False when ``deadline`` passed before (lock not held)."""
        ticket = Line.ticket()
        tickets = self.tickets
        try:
            tickets.append(ticket)
            with self.lock:
                for outbox in self.outboxes:
                    outbox.end_linger()
            while not holds():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                ticket.acquire(timeout=min(left_s, _LONG_S))
            return True
        finally:
            tickets.remove(ticket)


class Outbox:
    """The messages that a producer has accepted and not yet sent. ``wake`` wakes or starts the pump; it is called with
    the lock held.

    ``pump_of_topic`` has the topics of other lanes. All outboxes of a producer share this dictionary.
    """

    def __init__(
        self,
        waiters: Waiters,
        *,
        max_pending: int,
        max_pending_bytes: int,
        linger_s: float,
        wake: Callable[[], None],
        in_pump: Callable[[], bool],
        pump_of_topic: Mapping[str, HasOutbox] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = waiters.lock
        self.result_waiters = waiters.result_waiters
        self.max_pending = max_pending
        self.max_pending_bytes = max_pending_bytes
        self.linger_s = linger_s
        self.max_message_bytes = 0
        """The node's limit for a body; 0 until it is known."""
        self.outstanding = 0
        """Messages pending or in flight; lock held to change."""
        self.has_pump = False
        """The pump's thread was started."""
        self.closed = False
        self.groups: dict[Group, deque[SendFuture]] = {}
        self.pending_bytes = 0
        """Bytes of single messages that were not passed on yet."""
        self.batches: deque[Job] = deque()
        """Batches with a run to send; lock held to change."""
        self.earliest = NEVER_S
        """No deadline in the outbox or in flight is earlier."""
        self.wakes_at = ANY_BYTES
        """A send that brings the pending bytes to this count must wake the pump, or start it."""
        self._waiters = waiters
        self._wake = wake
        self._in_pump = in_pump
        self._pump_of_topic = {} if pump_of_topic is None else pump_of_topic
        self._clock = clock
        self._outstanding_bytes = 0
        self._lingering: Ticket | None = None  # the pump sleeps on it while messages gather
        self._gathered_at = 0.0  # when the last runs of single messages began to leave
        self._gathered = 0  # groups that were pending then, and have not left yet
        waiters.outboxes.append(self)

    @property
    def is_full(self) -> bool:
        """Whether the outbox has no room for another message."""
        return self.outstanding >= self.max_pending or self._outstanding_bytes >= self.max_pending_bytes

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self.groups and not self.batches

    # ------------------------------------------------------------ producers

    def submit(
        self,
        topic: str,
        queue: int,
        ack: str,
        body: bytes,
        encoded_extras: tuple[bytes, int, int] | None,
        deadline: float,
        asked: str = "",
    ) -> SendFuture:
        """Add a message. ``encoded_extras``: as of SendFuture; they have the properties of what the message asks for already;
        ``asked`` is the key of that.

        Blocks while too much is pending; raises SendError when that lasts, or NoRoom at once where ``Waiters.room`` is set.
        Raises InvalidMessageError for a body that is known to be larger than the node allows.

        All of this is written out, because it bounds the rate of a stream of sends. An interruption (Ctrl-C) can come after
        any call, so no call stands between the changes of the counts.
        """
        future: SendFuture = _new(SendFuture)
        future.body = body
        future.encoded_extras = encoded_extras
        future.born = _time_ns() // 1_000_000
        size = len(body) + OVERHEAD_BYTES
        if encoded_extras is not None:
            size += len(encoded_extras[0])
        future.size_bytes = size
        future.deadline = deadline
        future._state = "PENDING"
        future._run = future._watch = None
        group = (topic, queue, ack, asked)
        while True:
            with self.lock:
                outbox = self
                if self._pump_of_topic:
                    other = self._pump_of_topic.get(topic)
                    if other is not None:
                        outbox = other.outbox
                if len(body) > outbox.max_message_bytes > 0:
                    raise too_large(len(body), outbox.max_message_bytes)
                if outbox.outstanding < outbox.max_pending and outbox._outstanding_bytes < outbox.max_pending_bytes:
                    if outbox.closed:
                        raise CommitMQError("the producer is closed")
                    waiting = outbox.groups.get(group)
                    if waiting is None:
                        waiting = deque()
                        outbox.groups[group] = waiting
                    future.sender = outbox
                    outbox.outstanding += 1
                    outbox._outstanding_bytes += size
                    outbox.pending_bytes += size
                    if deadline < outbox.earliest:
                        outbox.earliest = deadline
                    waiting.append(future)
                    if outbox.pending_bytes >= outbox.wakes_at:
                        outbox.wake_pump()
                    return future
                if self._waiters.room is not None:
                    self._waiters.room_wanted = True
                    raise NoRoom(outbox.outstanding)
            outbox._wait_for_room(deadline)

    def submit_batch(self, batch: Job) -> None:
        """Add a batch. Blocks while too much is pending; raises SendError when that lasts until the batch's deadline."""
        while True:
            with self.lock:
                if self.closed:
                    raise CommitMQError("the producer is closed")
                if not self.is_full:
                    self.earliest = min(self.earliest, batch.deadline)
                    count = len(batch)
                    # No call stands between these: an interruption finds all of them done, or none.
                    self.outstanding += count
                    self._outstanding_bytes += batch.size_bytes
                    batch.is_counted = True
                    self.batches.append(batch)
                    if self.wakes_at < NO_WAKE:
                        self.wake_pump()
                    return
            self._wait_for_room(batch.deadline)

    def add_waiter(self, ticket: Ticket) -> None:
        """A thread begins to wait for a result (lock held). At the end it takes its ticket out of ``result_waiters``."""
        self.result_waiters.add(ticket)
        self.end_linger()

    def forget(self, future: SendFuture) -> None:
        """A pending message was cancelled (lock held)."""
        self._settle(1, future.size_bytes)
        self.pending_bytes -= future.size_bytes

    def _wait_for_room(self, deadline: float) -> None:
        """Raises SendError (not stored) without room before ``deadline`` (lock not held)."""
        if self._in_pump() or not self._waiters.wait_until(lambda: not self.is_full, deadline):
            raise not_stored("CLIENT_BUFFER_FULL", f"{self.outstanding} messages of this producer are still pending")

    # ------------------------------------------------------------ linger

    def end_linger(self) -> None:
        """Make the pump send the pending messages at once, because a thread waits (lock held)."""
        if self.outstanding and (self._lingering is not None or not self.has_pump):
            self.wake_pump()

    def wake_pump(self) -> None:
        """Wake or start the pump (lock held)."""
        if self._lingering is not None:
            wake_all([self._lingering])
        else:
            self._wake()
        self.wakes_at = NO_WAKE

    def linger_left_s(self, *, batches_in_flight: bool) -> float:
        """The rest of the linger of the pending single messages, in seconds."""
        if not self.linger_s or self._gathered > 0 or self.pending_bytes >= FULL_RUN_BYTES:
            return 0.0
        if self.result_waiters or self._waiters.tickets:
            return 0.0
        if self.batches or batches_in_flight:
            return 0.0  # the pump waits for answers then, and would not look when the time is over
        return min(self._gathered_at + self.linger_s, self.earliest) - self._clock()

    def linger(self, *, batches_in_flight: bool) -> None:
        """Wait for the rest of the linger, in the pump's thread."""
        while True:
            with self.lock:
                left_s = self.linger_left_s(batches_in_flight=batches_in_flight)
                if self.closed or left_s <= 0:
                    self._lingering = None
                    self.wakes_at = NO_WAKE
                    return
                ticket = self._lingering = Line.ticket()
                self.wakes_at = FULL_RUN_BYTES
            ticket.acquire(timeout=left_s)

    # ------------------------------------------------------------ the pump

    def next_group(self) -> Group:
        """The group whose turn it is to leave."""
        if self._gathered <= 0:
            self._gathered, self._gathered_at = len(self.groups), self._clock()
        self._gathered -= 1
        return next(iter(self.groups))

    def postpone(self, group: Group) -> None:
        """Give all other groups their turn before ``group``."""
        with self.lock:
            waiting = self.groups.pop(group, None)
            if waiting is not None:
                self.groups[group] = waiting

    def take(self, group: Group) -> list[SendFuture]:
        """Take the next messages of ``group``; they are running now. Messages that are too large for the node fail here."""
        futures: list[SendFuture] = []
        refused: list[SendFuture] = []
        limit = self.max_message_bytes
        left = MAX_RUN_BYTES
        with self.lock:
            waiting = self.groups.pop(group)
            while waiting and len(futures) < MAX_RUN_MESSAGES:
                future = waiting[0]
                left -= future.size_bytes
                if left < 0 and futures:
                    left += future.size_bytes
                    break
                waiting.popleft()
                if future._state != "PENDING":
                    left += future.size_bytes
                elif future.size_bytes > limit and len(future.body) > limit:
                    left += future.size_bytes
                    self.pending_bytes -= future.size_bytes
                    future._state = "RUNNING"  # it cannot be cancelled any more, and so is taken off the count once
                    refused.append(future)
                else:
                    future._state = "RUNNING"
                    futures.append(future)
            self.pending_bytes -= MAX_RUN_BYTES - left
            if waiting:
                self.groups[group] = waiting  # at the end: other topics and queues have their turn first
        if refused:
            self.fail(
                refused, lambda: not_stored("MESSAGE_ILLEGAL", f"the body is larger than the {limit} bytes allowed")
            )
        return futures

    def put_back(self, group: Group, futures: list[SendFuture]) -> None:
        """Messages of a run that is not stored wait again, before those that came after them."""
        with self.lock:
            waiting = self.groups.setdefault(group, deque())
            for one in reversed(futures):
                if one._state == "RUNNING":
                    one._state = "PENDING"
                    self.pending_bytes += one.size_bytes
                    self.earliest = min(self.earliest, one.deadline)
                    waiting.appendleft(one)
            if not waiting:
                del self.groups[group]

    def put_back_batch(self, batch: Job) -> None:
        """A run of ``batch`` is to be sent again, before other batches. A batch that was not submitted stays its thread's."""
        with self.lock:
            if batch.is_counted and batch not in self.batches:
                self.batches.appendleft(batch)
                self.earliest = min(self.earliest, batch.deadline)

    def finish_batch(self, batch: Job) -> None:
        """Remove a batch without another run to send, and let it tell its outcome when nothing of it is in flight."""
        if batch.more:
            return
        if self.batches:
            with self.lock, contextlib.suppress(ValueError):
                self.batches.remove(batch)
        if not batch.in_flight:
            batch.finish()

    def move(self, topic: str, other: Outbox) -> None:
        """Move the pending messages of ``topic`` to another outbox, in their order (lock held)."""
        for group in [group for group in self.groups if group[0] == topic]:
            moved = [one for one in self.groups.pop(group) if one._state == "PENDING"]
            size = sum(one.size_bytes for one in moved)
            self.pending_bytes -= size
            self._settle(len(moved), size)
            for future in moved:
                other._enqueue(group, future)

    def _enqueue(self, group: Group, future: SendFuture) -> None:
        future.sender = self
        self.outstanding += 1
        size = future.size_bytes
        self._outstanding_bytes += size
        self.pending_bytes += size
        self.earliest = min(self.earliest, future.deadline)
        self.groups.setdefault(group, deque()).append(future)
        if self.pending_bytes >= self.wakes_at:
            self.wake_pump()

    # ------------------------------------------------------------ outcomes

    def resolve(self, futures: list[SendFuture], finish: Finish) -> None:
        """Resolve the futures of a stored run by ``finish``, a function like send_future.finish_run."""
        size_bytes = sum([one.size_bytes for one in futures])
        with self.lock:
            # Futures whose time was over before are settled already.
            called, before = finish(futures)
            self._settle(len(futures) - len(before), size_bytes - sum([one.size_bytes for one in before]))
        if called:
            run_callbacks(called)

    def fail(self, futures: list[SendFuture], make_error: MakeError) -> None:
        """Fail messages, each with an error of its own. Messages with an outcome keep it."""
        # In small steps, because each sending thread, perhaps one with an event loop, waits for the lock.
        for start in range(0, len(futures), _FAIL_STEP):
            with self.lock:
                live = [one for one in futures[start : start + _FAIL_STEP] if not one.done()]
                called = fail_all(live, make_error)
                self._settle(len(live), sum(one.size_bytes for one in live))
            run_callbacks(called)

    def fail_late(self, code: str, sentence: str, retry_after_ms: int | None = None, *, within_s: float = 0.0) -> None:
        """Fail all messages and batches that timed out and that are not in flight, as not stored.

        With ``within_s`` also those whose time will be over by then.
        """
        now = self._clock() + within_s
        if now >= self.earliest:  # (each sending thread waits for the lock)
            self._fail_messages(lambda one: one.deadline <= now, code, sentence, retry_after_ms)
        self._fail_batches(lambda one: one.deadline <= now, code, sentence, retry_after_ms)

    def fail_all(self, code: str, sentence: str) -> None:
        """Fail all messages and batches that are not in flight, as not stored."""
        self.fail_messages(code, sentence)
        self._fail_batches(lambda _: True, code, sentence)

    def fail_messages(self, code: str, sentence: str) -> None:
        """As :meth:`fail_all`, for single messages only. The caller need not own the connection."""
        self._fail_messages(lambda _: True, code, sentence)

    def fail_group(self, group: Group, error: SendError) -> None:
        """Fail the messages of one group, with the code and the outcome of ``error``."""
        with self.lock:
            waiting = [one for one in self.groups.pop(group, ()) if one._state == "PENDING"]
            for one in waiting:
                one._state = "RUNNING"
                self.pending_bytes -= one.size_bytes
        self.fail(waiting, lambda: send_error(error.code, error.message, error.outcome, error.retry_after_ms))

    def fail_free(self, error: SendError) -> None:
        """Fail the messages and batches that name no queue and were not passed on, with the code and outcome of
        ``error``."""
        with self.lock:
            groups = [group for group in self.groups if group[1] < 0]
        for group in groups:
            self.fail_group(group, error)
        for batch in list(self.batches):
            if batch.may_move:
                batch.fail(send_error(error.code, error.message, error.outcome, error.retry_after_ms))
                self.finish_batch(batch)

    def note_deadlines(self, in_flight: float) -> None:
        """Compute :attr:`earliest` again. ``in_flight`` is the earliest deadline of the runs in flight."""
        with self.lock:
            pending = min((one.deadline for waiting in self.groups.values() for one in waiting), default=NEVER_S)
            batches = min((one.deadline for one in self.batches), default=NEVER_S)
            self.earliest = min(in_flight, pending, batches)

    def settle_batch(self, batch: Job) -> None:
        """Return the room of a batch that has its outcome or was cancelled."""
        with self.lock:
            if batch.is_counted:
                batch.is_counted = False
                self._settle(len(batch), batch.size_bytes)

    def _fail_messages(
        self, is_late: Callable[[SendFuture], bool], code: str, sentence: str, retry_after_ms: int | None = None
    ) -> None:
        failed: list[SendFuture] = []
        with self.lock:
            for group, waiting in list(self.groups.items()):
                late = [one for one in waiting if is_late(one)]
                if not late:
                    continue
                gone = set(map(id, late))
                left = deque(one for one in waiting if id(one) not in gone)
                if left:
                    self.groups[group] = left
                else:
                    del self.groups[group]
                late = [one for one in late if one._state == "PENDING"]
                for one in late:
                    one._state = "RUNNING"
                    self.pending_bytes -= one.size_bytes
                failed += late
        self.fail(failed, lambda: not_stored(code, sentence, retry_after_ms))

    def _fail_batches(
        self, is_late: Callable[[Job], bool], code: str, sentence: str, retry_after_ms: int | None = None
    ) -> None:
        """Fail batches without a run in flight. The outcome of such a run fails the others."""
        for batch in list(self.batches):
            if not batch.in_flight and is_late(batch):
                batch.fail(not_stored(code, sentence, retry_after_ms))
                self.finish_batch(batch)

    def _settle(self, count: int, size_bytes: int) -> None:
        self.outstanding -= count
        self._outstanding_bytes -= size_bytes
        self._waiters.told()
