"""Check points: in memory, in the log, and on their way there.

:class:`CheckPoints` has what was delivered and is not done, and the limits of that.

A check point stays here until its copy in the revive topic was met, also when it is done: so the process knows of each
check point it made, and never takes one for RocketMQ's. Done ones beyond ``MAX_DONE`` are forgotten,
in the order in which they were done. Times are of the wall clock, and the process's clock jumps between two turns only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from commitmq import counting, failpoints
from commitmq.config import NodeConfig, PopConfig
from commitmq.control import Word
from commitmq.counting import CountTable
from commitmq.format.constants import Host, Property
from commitmq.format.record import Record, encode_record
from commitmq.protocol import wire
from commitmq.semantics.derived import first_that_fits
from commitmq.semantics.pop_revive import (
    Ack,
    CheckPoint,
    CheckPointKey,
    ack_record,
    check_point_record,
    checked_topic,
    retries,
)
from commitmq.semantics.retry import TO_DEAD_LETTERS, copies
from commitmq.semantics.timer import TIMER_TOPIC, TimerRules, timer_request
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.reader.pulls import POP, AnswerSocket, OutCounts
from commitmq.workers.runtime.clocks import SteadyClock
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.run_mover import MovedRun, PutMessageResult, RunMover

CLOCK: Final = SteadyClock()


def now_ms() -> int:
    """Milliseconds since 1970."""
    return CLOCK.now_ms()


class _DeliveredMessages(Protocol):
    @property
    def topic(self) -> str: ...
    @property
    def offsets(self) -> Any: ...
    @property
    def frames(self) -> Any: ...


class PopCounts:
    """What the pop process counts: messages in flight, and messages delivered. Without ``metrics.enable`` none of this
    exists."""

    def __init__(self, table: CountTable) -> None:
        self._table = table
        self._out = OutCounts(table, POP)
        table.reset(counting.POP_IN_FLIGHT)

    @classmethod
    def of(cls, context: WorkerContext) -> PopCounts | None:
        """None where nothing is counted. The process knows of nothing that is in flight yet."""
        table = context.counts
        return None if table is None else cls(table)

    def in_flight(self, topic: str, group: str, change: int) -> None:
        """This many messages more of ``topic``, or fewer, are in flight."""
        self._table.count(counting.POP_IN_FLIGHT, topic, group).add(change)

    def handed_out(self, group: str, portions: Iterable[_DeliveredMessages]) -> None:
        """``group`` got these messages."""
        for one in portions:
            self._out.add(one.topic, group, len(one.offsets), sum(map(len, one.frames)))


_RUN_BYTES: Final = 1 << 20


class Records:
    """Check points, acks and revived messages as runs for the writer (spec 12.6). Makes the records of one node.
    ``cluster`` names the revive topic.
    """

    def __init__(self, config: NodeConfig, cluster: str) -> None:
        self.cluster = cluster
        self.broker_name = config.network.broker_name
        self.host = Host(config.network.store_host, config.network.store_port)
        self.v6 = ":" in config.network.store_host
        self._crc = config.commit_log.append_properties_crc
        self._rules = TimerRules(max_delay_s=1 << 40)  # an ack comes when its check point does, whatever the clock said
        self._v2 = config.pop.retry_topics_v2
        self._run_bytes = min(_RUN_BYTES, config.commit_log.max_run_bytes)

    def check_point(self, point: CheckPoint, revive_queue: int, now_ms: int) -> Record:
        """The record of ``point``, in the timer topic."""
        return self._timer(check_point_record(point, self.cluster, revive_queue, now_ms, self.host), now_ms)

    def ack(self, ack: Ack, invisible_ms: int, revive_queue: int, now_ms: int) -> Record:
        """The record of ``ack``: in the timer topic, or in the revive topic when the messages are overdue."""
        return self._timer(ack_record(ack, invisible_ms, self.cluster, revive_queue, now_ms, self.host), now_ms)

    def _timer(self, record: Record, now_ms: int) -> Record:
        return timer_request(record, now_ms, self._rules, fresh=True) or record

    def again(self, record: Record, point: CheckPoint, max_retries: int) -> Record:
        """What ``record`` becomes that was not acked: a message of the retry topic; a dead letter after the last try, and
        where no retry fits. Raises InvalidMessageError when that does not fit either.
        """
        return first_that_fits(self._copies(record, point, max_retries), self.encoded)[0]

    def _copies(self, record: Record, point: CheckPoint, max_retries: int) -> Iterator[Record]:
        if record.reconsume_times < max_retries:
            yield from retries(record, point, self.host, v2=self._v2)
        popped = {**record.properties}
        popped.setdefault(Property.RETRY_TOPIC, checked_topic(point))
        source = replace(record, properties=popped)
        for dead in copies(source, point.key.group, 0, delay_level=TO_DEAD_LETTERS):
            yield replace(dead.record, born_host=self.host)

    def encoded(self, record: Record) -> bytes:
        """The bytes that the writer gets."""
        if record.store_host != self.host:
            record = replace(record, store_host=self.host)
        return encode_record(record, buckets=None, properties_crc=self._crc)

    def runs(self, records: Iterable[Record]) -> list[tuple[MovedRun, list[int]]]:
        """``records`` as runs, each of one queue and layout, with the numbers of its records; order is kept in a queue."""
        by_place: dict[tuple[str, int, bool], list[tuple[int, bytes]]] = {}
        for number, record in enumerate(records):
            place = record.topic, record.queue_id, ":" in record.born_host.ip
            by_place.setdefault(place, []).append((number, self.encoded(record)))
        return [
            (MovedRun(topic, queue, run, v6), numbers)
            for (topic, queue, v6), many in by_place.items()
            for run, numbers in self._parts(many)
        ]

    def _parts(self, many: list[tuple[int, bytes]]) -> Iterator[tuple[CheckedRun, list[int]]]:
        start = size = 0
        for index, (_, data) in enumerate(many):
            if index > start and size + len(data) > self._run_bytes:
                yield _run(many[start:index])
                start, size = index, 0
            size += len(data)
        if start < len(many):
            yield _run(many[start:])


def _run(many: list[tuple[int, bytes]]) -> tuple[CheckedRun, list[int]]:
    records = [data for _, data in many]
    ends = np.array(list(accumulate(map(len, records))), np.int64)
    return CheckedRun(np.frombuffer(b"".join(records), np.uint8), ends, len(many)), [number for number, _ in many]


MAX_DONE: Final = 100_000
OVERDUE_MS: Final = 60_000

_Key = TypeVar("_Key")


@dataclass(slots=True, eq=False)
class OpenCheckPoint:
    """``log``: the end of the log before the check point was stored. ``open``: how many of its messages are not done."""

    check_point: CheckPoint
    revive_queue: int
    client: bytes
    log: int
    open: int = 0
    due_ms: int = 0
    """When its messages come back, by the clock of now. (That of the check point may have been another.)"""

    @property
    def queue(self) -> tuple[str, str, int]:
        key = self.check_point.key
        return key.group, key.topic, key.queue_id


@dataclass(slots=True)
class CheckPoints:
    """All of them, in the order of the log."""

    limits: PopConfig
    by_key: dict[CheckPointKey, OpenCheckPoint] = field(default_factory=dict)
    open: int = 0
    """Messages in flight."""
    counts: PopCounts | None = None
    _groups: Counter[str] = field(default_factory=Counter)
    _queues: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    _clients: Counter[bytes] = field(default_factory=Counter)
    _heap: list[tuple[int, int, OpenCheckPoint]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _done: dict[OpenCheckPoint, None] = field(default_factory=dict)

    @classmethod
    def of(cls, context: WorkerContext) -> CheckPoints:
        """Nothing is in flight yet."""
        return cls(context.config.pop, counts=PopCounts.of(context))

    def room(self, group: str, topic: str, queue: int, client: bytes, *, taken: int, of_queue: int) -> int:
        """How many more messages of the queue ``client`` may get, who is getting ``taken``, ``of_queue`` of this queue."""
        limits = self.limits
        return max(
            0,
            min(
                limits.max_in_flight - self.open - taken,
                limits.max_in_flight_of_group - self._groups[group] - taken,
                limits.max_in_flight_of_queue - self._queues[group, topic, queue] - of_queue,
                limits.max_in_flight_of_client - self._clients[client] - taken,
            ),
        )

    def is_full(self, client: bytes) -> bool:
        """Whether ``client`` has as many messages as it may have."""
        return self._clients[client] >= self.limits.max_in_flight_of_client

    def in_flight_of(self, group: str) -> int:
        """Messages of ``group`` that are not done."""
        return self._groups[group]

    def queues_of(self, group: str) -> dict[tuple[str, int], int]:
        """How many messages of each topic and queue ``group`` has in flight."""
        return {(topic, queue): count for (name, topic, queue), count in self._queues.items() if name == group}

    def add(self, point: OpenCheckPoint, due_ms: int | None = None) -> None:
        """A check point that is being stored. ``due_ms``: when its messages come back, if not at the time in it."""
        self.by_key[point.check_point.key] = point
        self._count(point, len(point.check_point.left()))
        point.due_ms = point.check_point.revive_ms if due_ms is None else due_ms
        heapq.heappush(self._heap, (point.due_ms, next(self._numbers), point))

    def shift(self, jump_ms: int) -> None:
        """The clock was set forward by so much: everything is due as soon from now on as it was."""
        self._heap = [(due_ms + jump_ms, number, point) for due_ms, number, point in self._heap]
        for point in self.by_key.values():
            point.due_ms += jump_ms

    def drop(self, point: OpenCheckPoint) -> None:
        """It was not stored, or its copy in the revive topic was met."""
        if self.by_key.get(point.check_point.key) is not point:
            return
        del self.by_key[point.check_point.key]
        self._done.pop(point, None)
        self._count(point, -point.open)

    def settle(self, point: OpenCheckPoint, *offsets: int) -> None:
        """The messages at ``offsets`` are acked, or were copied to the retry topic."""
        before = point.check_point
        point.check_point = before.acked(*offsets)
        done = (point.check_point.bits ^ before.bits).bit_count()
        if not done or self.by_key.get(before.key) is not point:
            return
        self._count(point, -done)
        if not point.open:
            self._done[point] = None
            if len(self._done) > MAX_DONE:
                self.drop(next(iter(self._done)))

    def has(self, key: CheckPointKey, offset: int) -> OpenCheckPoint | None:
        """The check point under whose key the message at ``offset`` is in flight."""
        point = self.by_key.get(key)
        return point if point is not None and point.check_point.is_left(offset) else None

    def due(self, now_ms: int, most: int) -> list[OpenCheckPoint]:
        """Take out up to ``most`` whose time has come and that have messages left."""
        found: dict[OpenCheckPoint, None] = {}
        while self._heap and self._heap[0][0] <= now_ms and len(found) < most:
            point = heapq.heappop(self._heap)[2]
            if point.open and self.by_key.get(point.check_point.key) is point:
                found[point] = None
        if len(self._heap) > 2 * len(self.by_key) + 1_024:
            self._heap = [entry for entry in self._heap if entry[2].open]
            heapq.heapify(self._heap)
        return list(found)

    def forget_old(self, now_ms: int) -> None:
        """Forget the oldest that are done and whose copies are overdue in the revive topic: the node runs no timer."""
        while self.by_key:
            first = next(iter(self.by_key.values()))
            if first.open or first.due_ms + OVERDUE_MS > now_ms:
                return
            self.drop(first)

    def again(self, point: OpenCheckPoint, at_ms: int) -> None:
        """It could not be revived: :meth:`due` gives it at ``at_ms``."""
        heapq.heappush(self._heap, (at_ms, next(self._numbers), point))

    def next_due_ms(self) -> int | None:
        """When the next one is due; it may turn out to be done."""
        return self._heap[0][0] if self._heap else None

    def log(self) -> int | None:
        """Where the log begins to have one of them; None without any."""
        first = next(iter(self.by_key.values()), None)
        return None if first is None else first.log

    def _count(self, point: OpenCheckPoint, change: int) -> None:
        point.open += change
        self.open += change
        _change(self._groups, point.check_point.key.group, change)
        _change(self._queues, point.queue, change)
        _change(self._clients, point.client, change)
        if self.counts is not None:
            self.counts.in_flight(point.check_point.key.topic, point.check_point.key.group, change)


def _change(counter: Counter[_Key], key: _Key, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]


_PATIENCE_MS: Final = 1_500
_LOOK_MS: Final = 5


class Unflushed:
    """What the pop process has stored and the device does not have yet, where the node flushes asynchronously.

    Receives and acks then wait for the log only, as RocketMQ's do. Committed offsets must not: they are durable at once, and
    after a power cut an offset behind a check point that is lost would pass over its messages. So a commit waits until
    everything that was stored before it is flushed. The append before a commit asks for that.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._control = context, context.control
        self._sync_flush = context.config.sync_flush
        self._end = 0
        self._wants_flush = False

    def ack(self) -> str:
        return "flushed" if self._sync_flush or self._wants_flush else "memory"

    def stored(self, ack: str) -> None:
        """An append has come back with ``ack``."""
        if ack == "memory":
            self._end = self._control.get(Word.WRITTEN)
        else:
            self._end, self._wants_flush = 0, False

    def is_nothing(self) -> bool:
        """Whether the device has everything. If not, the next append waits for it."""
        if self._end and self._control.get(Word.FLUSHED) >= self._end:
            self._end = 0
        self._wants_flush = self._end > 0
        return not self._end

    def wait(self) -> bool:
        """Wait a moment for the device; whether it has everything then."""
        deadline = monotonic_ms() + _PATIENCE_MS
        while not self.is_nothing() and monotonic_ms() < deadline and not self._context.stopping:
            self._context.wait(_LOOK_MS, nap=True)
        return self.is_nothing()


class PopStep(NamedTuple):
    """What a request has in a turn: ``records``, by their numbers.

    ``settle`` is told which of them are stored, and takes back what is not; False refuses the request. ``answer`` makes header
    and frames of what is promised; before that, so it changes nothing.
    """

    client: bytes
    request: int
    records: range
    settle: Callable[[list[bool]], bool]
    answer: Callable[[], tuple[bytes, list[Any]]]


NO_RECORDS: Final = range(0)


def nothing(_stored: list[bool]) -> bool:
    return True


@dataclass(slots=True)
class PopTurn:
    """What one turn of the pop process stores and answers: one append for the requests of many clients.

    An answer leaves when what it promises is stored (:mod:`commitmq.workers.pop.points`). The timer topic's part is appended
    first, a run behind the other, up to one that the writer refuses, as on a full disk: so what is stored of it is its
    beginning. No check point lies behind a gap, and no ack of one that was replaced (extend) is stored without its successor.
    Each step is told which of its records are stored.
    """

    records: list[Record] = field(default_factory=list)
    steps: list[PopStep] = field(default_factory=list)
    claimed: dict[tuple[CheckPointKey, int], None] = field(default_factory=dict)
    """Messages of which a request of this turn has spoken: a second one comes too late."""

    def mark(self) -> tuple[int, int, int]:
        """How much a turn has before a request; :meth:`roll_back` takes away what came since."""
        return len(self.records), len(self.steps), len(self.claimed)

    def roll_back(self, mark: tuple[int, int, int]) -> None:
        """A request has failed half way: it stores nothing, and the others of the turn do not notice."""
        records, steps, claimed = mark
        del self.records[records:], self.steps[steps:]
        for one in list(self.claimed)[claimed:]:
            del self.claimed[one]

    def store(self, made: Records, mover: RunMover, answers: AnswerSocket, unflushed: Unflushed) -> bool:
        """Append and answer. False when not everything could be stored. Raises WriterLost."""
        if failpoints.ACTIVE and self.records:
            failpoints.hit("pop.before_put")
        stored, refused = [False] * len(self.records), None
        promised: list[tuple[bytes, list[Any]]] = []

        def promise() -> None:
            promised.extend(step.answer() for step in self.steps)

        if self.records:
            ack = unflushed.ack()
            refused = self._append(made, mover, ack, promise, stored)
            unflushed.stored(ack)
        else:
            promise()
        if failpoints.ACTIVE and self.records:
            failpoints.hit("pop.after_put")
        for step, (header, frames) in zip(self.steps, promised, strict=True):
            is_stored = step.settle([stored[number] for number in step.records])
            if refused is None or is_stored:
                answers.send(step.client, header, frames)
            else:
                sentence = f"it could not be stored: {refused.sentence}"
                more = {"retry_after_ms": 500} if refused.retry else {}
                answers.send(step.client, wire.error(step.request, refused.code, sentence, **more))
        self._clear()
        return refused is None

    def _append(
        self, made: Records, mover: RunMover, ack: str, promise: Callable[[], None], stored: list[bool]
    ) -> PutMessageResult | None:
        """Marks in ``stored`` what is stored. Returns the first refusal. ``promise`` is called once. Raises WriterLost."""
        runs = made.runs(self.records)
        timed = [[one] for one in runs if one[0].topic == TIMER_TOPIC]
        others = [one for one in runs if one[0].topic != TIMER_TOPIC]
        meanwhile: Callable[[], None] | None = promise
        for part in [*timed, others] if others else timed:
            refused = None
            puts = mover.put([run for run, _ in part], ack, meanwhile)
            meanwhile = None
            for (_, numbers), put in zip(part, puts, strict=True):
                refused = refused or (put if put.code else None)
                for number in numbers:
                    stored[number] = not put.code
            if refused is not None:
                return refused
        return None

    def lose(self, answers: AnswerSocket) -> None:
        """The writer was lost: whether anything is stored is open."""
        for step in self.steps:
            answers.send(
                step.client,
                wire.error(
                    step.request, "SERVICE_NOT_AVAILABLE", "the writer ended in the meantime", retry_after_ms=200
                ),
            )
        self._clear()

    def _clear(self) -> None:
        self.records.clear()
        self.steps.clear()
        self.claimed.clear()
