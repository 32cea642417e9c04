"""Brings messages back to their group: copies into the retry topic, or into the dead-letter topic after the last try.

Invariants
    * Not before its time: only what :class:`~commitmq.workers.pop.points.CheckPoints` gives as due, what a consumer gave
      back, and what a revive round finds due.
    * Not lost: a message is settled when its copy is flushed, or when it can have none permanently: then it is set
      aside.
    * No message holds up another one: what grows is 1ST_POP_TIME and ORIGIN_GROUP, and a copy that does not fit is a
      dead letter, or the message is set aside (:mod:`commitmq.semantics.derived`).
    * Once (``pop.exactly_once``): what the log had before a death is skipped
      (:mod:`commitmq.workers.runtime.run_mover`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.control import Word
from commitmq.errors import CorruptRecordError, InvalidMessageError, OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record
from commitmq.protocol import wire
from commitmq.semantics.pop_revive import (
    ACK_TAG,
    BATCH_ACK_TAG,
    REVIVE_GROUP,
    REVIVE_TOPIC_PREFIX,
    Ack,
    CheckPoint,
    CheckPointKey,
    DuePoint,
    ReviveRound,
    checked_topic,
    revive_topic,
)
from commitmq.semantics.retry import popped_topic
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.topic_config import validate_group
from commitmq.store.metadata.topic_files import TopicReader
from commitmq.workers.pop.orders import Orders
from commitmq.workers.pop.points import CheckPoints, OpenCheckPoint, Records, now_ms
from commitmq.workers.pop.shares import Shares
from commitmq.workers.reader.places import ReadableTopics
from commitmq.workers.reader.pulls import AnswerSocket, text_field
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.run_mover import (
    CoordinatorLine,
    MovedBefore,
    MovedRun,
    PutMessageResult,
    RunMover,
    is_of_message,
)
from commitmq.workers.runtime.set_aside import SetAside

_WARN_MS: Final = 10_000
_BAD: Final = ("MESSAGE_ILLEGAL", "PROPERTIES_SIZE_EXCEEDED", "FRAME_TOO_LARGE")
"""Codes of the writer for a message that it will never take."""


class ReviveOutcome(Enum):
    """What became of a message that comes back."""

    DONE = "done"
    """Its copy is stored, or it can have none permanently and is set aside."""
    AGAIN = "again"
    """The node cannot do it at this moment."""
    PUT_OFF = "put off"
    """The group or its topics do not allow it, until an operator changes that."""


class RevivedMessage(NamedTuple):
    """A message that comes back: the one at ``offset`` of ``check_point``. ``dead``: as a dead letter, whatever its
    tries. ``log``: a place in the log before the check point and behind the message; -1 for a check point of RocketMQ.
    """

    check_point: CheckPoint
    offset: int
    log: int = -1
    dead: bool = False


class Revival:
    """Brings messages back to their group, or makes them dead letters."""

    def __init__(
        self,
        context: WorkerContext,
        places: ReadableTopics,
        shares: Shares,
        records: Records,
        mover: RunMover,
        aside: SetAside,
    ) -> None:
        self._context, self._aside = context, aside
        self._places, self._shares, self._records, self._mover = places, shares, records, mover
        self.before = MovedBefore()
        self.came_back = self._put_off = 0
        self._warn_at_ms = 0

    def copy(self, returns: list[RevivedMessage]) -> list[ReviveOutcome]:
        """Append the copies. Returns what became of each message. Raises WriterLost."""
        outcomes = [ReviveOutcome.DONE] * len(returns)
        made: list[tuple[int, Record]] = []
        for number, one in enumerate(returns):
            try:
                record = self._made(one)
            except ProtocolError as error:  # the coordinator is away, or refuses the topics
                passes = error.retryable or error.retry_after_ms is not None
                outcomes[number] = ReviveOutcome.AGAIN if passes else ReviveOutcome.PUT_OFF
                self._warn(str(error), one)
                continue
            except Exception as error:
                if not is_of_message(error):
                    raise
                self._report(str(error) or repr(error), one)
                continue
            if record is not None:
                made.append((number, record))
        if not made:
            return outcomes
        if failpoints.ACTIVE:
            failpoints.hit("pop.before_copy")
        refused: list[tuple[int, Record]] = []
        for members, put in self._put(made):
            if put.code in _BAD and len(members) > 1:
                refused += members  # which of them it is, only a run of its own tells
                continue
            for number, _ in members:
                outcomes[number] = self._judged(put, returns[number])
        for one_refused in refused:
            ((_, put),) = self._put([one_refused])
            outcomes[one_refused[0]] = self._judged(put, returns[one_refused[0]])
        if failpoints.ACTIVE:
            failpoints.hit("pop.after_copy")
        return outcomes

    def _put(self, made: list[tuple[int, Record]]) -> list[tuple[list[tuple[int, Record]], PutMessageResult]]:
        runs = self._records.runs(record for _, record in made)
        puts = self._mover.put([run for run, _ in runs])
        return [([made[member] for member in members], put) for (_, members), put in zip(runs, puts, strict=True)]

    def _judged(self, put: PutMessageResult, one: RevivedMessage) -> ReviveOutcome:
        if not put.code:
            self.came_back += 1
            return ReviveOutcome.DONE
        sentence = f"{put.code}: {put.sentence}"
        if put.code in _BAD:
            self._report(sentence, one)
            return ReviveOutcome.DONE
        self._warn(sentence, one)
        # (The topic may be made at this moment.)
        return ReviveOutcome.AGAIN if put.retry or put.code == "TOPIC_NOT_EXIST" else ReviveOutcome.PUT_OFF

    def put_off(self, check_points: list[CheckPoint], revive_queue: int, now_ms: int) -> bool:
        """Store new check points of messages that cannot come back for now, in this order. False: they could not be
        stored. Raises WriterLost.
        """
        records = [self._records.check_point(one, revive_queue, now_ms) for one in check_points]
        runs: list[MovedRun] = [run for run, _ in self._records.runs(records)]
        if any(put.code for put in self._mover.put(runs)):
            return False
        self._put_off += len(check_points)
        self._context.tell(put_off=self._put_off)
        return True

    def passed_over(self, returns: list[RevivedMessage]) -> list[bool]:
        """Which of them the log had before a death."""
        return [self._was_moved(one) for one in returns]

    def _was_moved(self, one: RevivedMessage) -> bool:
        try:
            return self._is_there(one)
        except Exception as error:
            if not is_of_message(error):
                raise
            return False  # it can have no copy

    def _is_there(self, one: RevivedMessage) -> bool:
        if not len(self.before):
            return False
        record = self._record(one)
        # Whether it was a dead letter depends on a setting that may have changed.
        most = 0 if record is None else record.reconsume_times
        return record is not None and any(
            self.before.pass_over(self._records.encoded(self._records.again(record, one.check_point, limit)))
            for limit in (most + 1, most)
        )

    def _made(self, one: RevivedMessage) -> Record | None:
        """The copy of a message; None when it is there already, or can have none. Raises ProtocolError, and what belongs to
        the message, as InvalidMessageError, when no copy fits.
        """
        key = one.check_point.key
        topic = checked_topic(one.check_point)
        validate_group(key.group)
        if any(self._places.topics.get(name) is None for name in (topic, key.topic)) or self._is_of_deleted(one):
            self._report("its topic was deleted", one)
            return None
        record = self._record(one)
        if record is None:
            self._report("its record is not there any more", one)
            return None
        if self._is_there(one):
            return None
        most = self._shares.max_retries(key.group, topic)
        return self._records.again(record, one.check_point, 0 if one.dead else most)

    def _is_of_deleted(self, one: RevivedMessage) -> bool:
        """Whether the topic was deleted since, and recreated perhaps: another message may be at the offset."""
        return 0 <= one.log < max(self._places.floor(one.check_point.key.topic), self._tombstone(one.check_point))

    def is_deleted(self, point: OpenCheckPoint) -> bool:
        """Whether the messages of ``point`` were deleted with their topic; one of the same name may be there by now."""
        return 0 <= point.log < self._tombstone(point.check_point)

    def _tombstone(self, check_point: CheckPoint) -> int:
        """Below it in the log the messages are of a deleted topic: the one where they lie, or the one that the group pops."""
        topics = self._places.topics
        return max(topics.tombstone(check_point.key.topic), topics.tombstone(checked_topic(check_point)))

    def _record(self, one: RevivedMessage) -> Record | None:
        """The message; None when it is gone, or its topic is. Raises ProtocolError."""
        key = one.check_point.key
        places = self._places
        view = places.topics.get(key.topic)
        if view is None or view.is_memory or view.is_batch or self._is_of_deleted(one):
            return None
        try:
            bound, floor = places.bound(), places.floor(key.topic)
            at, units = places.queues.units(key.topic, key.queue_id, one.offset, 1, bound=bound, floor=floor)
            if at != one.offset or not len(units) or int(units["physical_offset"][0]) < floor:
                return None
            record = places.log.record(int(units["physical_offset"][0]))
        except (OffsetOutOfRangeError, CorruptRecordError):
            return None
        except StoreError as error:  # the files cannot be read now
            raise ProtocolError("SERVICE_NOT_AVAILABLE", str(error)) from error
        if one.log < 0 and places.topics.tombstone(key.topic) and record.store_timestamp > key.pop_time:
            return None  # the topic was recreated: this message was not there yet
        return record

    def _warn(self, why: str, one: RevivedMessage) -> None:
        now = monotonic_ms()
        if now >= self._warn_at_ms:
            self._warn_at_ms = now + _WARN_MS
            key = one.check_point.key
            self._context.log.warning("messages cannot come back now", why=why, group=key.group, topic=key.topic)

    def _report(self, why: str, one: RevivedMessage) -> None:
        key = one.check_point.key
        self._aside.note(
            why,
            group=key.group,
            topic=key.topic,
            queue=key.queue_id,
            queue_offset=one.offset,
            received=key.pop_time,
        )


_CODES: Final = np.array([java_string_hash(ACK_TAG), java_string_hash(BATCH_ACK_TAG)], np.int64)
_UNITS: Final = 2_000
_MOST: Final = 500_000
TURN_S: Final = 0.05
_SLACK_MS: Final = 60_000
"""An ack is stored after its messages were received. The clock may have been set back by so much in between."""


class AckSearch:
    """The acks of the timer topic that were found so far, by check point; beyond ``most`` the oldest are forgotten.

    It reads what was stored since the oldest check point was received that it was asked for: the check points lie in the
    revive topic behind its committed offset, so this bound outlives every death.
    """

    def __init__(
        self, places: ReadableTopics, revive_topic: str, beat: Callable[[], None], *, most: int = _MOST
    ) -> None:
        self._places, self._topic, self._beat, self._most = places, revive_topic, beat, most
        self._acks: dict[CheckPointKey, set[int]] = {}
        self._first = self._next = -1
        """What was read of the timer topic's queue: from the first offset up to the second one."""

    def acked(self, keys: Sequence[CheckPointKey]) -> dict[CheckPointKey, set[int]] | None:
        """The acknowledged offsets of each check point. None: there is more to read, ask in the next turn."""
        if keys and not self._has_read(min(key.pop_time for key in keys) - _SLACK_MS):
            return None
        return {key: self._acks.pop(key, set()) for key in keys}

    def _has_read(self, since_ms: int) -> bool:
        """Read what was stored since then, for TURN_S. True when all of it was read."""
        places = self._places
        bound, floor = places.bound(), places.floor(TIMER_TOPIC)
        start = places.queues.offset_by_time(TIMER_TOPIC, 0, since_ms, bound=bound, floor=floor)
        if start is None:
            return True
        if self._first < 0:
            self._first = self._next = start
        until = time.monotonic() + TURN_S
        while True:
            if start < self._first:  # backwards, part by part, so that what was read stays one range
                begin = max(start, self._first - _UNITS)
                at = begin
                while at < self._first and (end := self._read(at, self._first - at, bound, floor)) > at:
                    at = end
                self._first = begin
            else:
                behind = self._next
                self._next = self._read(behind, _UNITS, bound, floor)
                if self._next == behind:
                    return True
            if time.monotonic() >= until:
                return False

    def _read(self, start: int, count: int, bound: int, floor: int) -> int:
        """Take the acks of up to ``count`` messages from ``start`` on. Returns where the next one is, ``start`` at the end."""
        at, units = self._places.queues.units(TIMER_TOPIC, 0, start, count, bound=bound, floor=floor)
        if not len(units):
            return start
        mine = np.isin(units["tags_code"].astype(np.int64), _CODES) & (units["size"].astype(np.int64) > 0)
        for place in units["physical_offset"][mine].tolist():
            self._take(place)
        self._beat()
        return at + len(units)

    def _take(self, place: int) -> None:
        try:
            record = self._places.log.record(place)
            if record.properties.get(Property.REAL_TOPIC) != self._topic:
                return
            ack = Ack.parse(record.body)
        except (CorruptRecordError, OffsetOutOfRangeError, InvalidMessageError):
            return
        self._acks.setdefault(ack.key, set()).update(ack.acked)
        if len(self._acks) > self._most:
            del self._acks[next(iter(self._acks))]


_LOOK_MS: Final = 500
_NEVER: Final = -2


def cluster_of(layout: StoreLayout, config: NodeConfig) -> tuple[str, int]:
    """The cluster and the number of queues: of the revive topic that the store has, else of the configuration."""
    table = TopicReader(layout).everything().topics
    wanted = revive_topic(config.network.cluster_name)
    if wanted in table:
        return config.network.cluster_name, table[wanted].read_queues
    for name, topic in sorted(table.items()):
        if name.startswith(REVIVE_TOPIC_PREFIX):
            return name.removeprefix(REVIVE_TOPIC_PREFIX), topic.read_queues
    return config.network.cluster_name, config.pop.revive_queues


class ReviveQueues:
    """The revive topic: reads its queues in rounds, as RocketMQ does, and brings back what nobody else did (remoting 5.8).

    Check points of this process are known in memory and are done when they come here. What is unknown is RocketMQ's, or was
    made before a death of which the log's part is gone: its messages come back here. What the group or its topics do not
    allow now gets a new check point, which is due later, so that it holds up no others. The committed offset of
    ``CID_RMQ_SYS_REVIVE_GROUP`` is that of the last processed record.

    Acks that the timer has not delivered yet, found where they wait.

    A revive round judges a check point by the acks in the revive queue. After a long stop everything is overdue, and the
    timer may have delivered a check point and not yet its acks. So the acks of an unknown check point are looked for in the
    timer topic too: RocketMQ would bring such a message back although it was acknowledged.
    """

    def __init__(
        self, context: WorkerContext, places: ReadableTopics, topic: str, points: CheckPoints, revival: Revival
    ) -> None:
        self._context = context
        self._places, self._topic, self._points, self._revival = places, topic, points, revival
        self._rounds: dict[int, ReviveRound] = {}
        self._committed: dict[int, int] = {}
        self._seen = -1
        self._look_at_ms = 0
        self._ends: dict[int, int] = {}
        self._acks = AckSearch(places, topic, context.heartbeat)
        self._done: dict[CheckPointKey, set[int]] = {}
        """Of due check points that are not of this process: messages that were acked or came back, until all are done."""

    def load(self, line: CoordinatorLine) -> None:
        """Start over at the committed offsets. Raises ProtocolError."""
        self._rounds.clear()
        self._done.clear()
        self._seen = -1
        topic = self._places.topics.get(self._topic)
        if topic is None:
            return
        queues = [(self._topic, queue) for queue in range(topic.read_queues)]
        answer = line.one({"op": "offset.fetch", "group": REVIVE_GROUP, "queues": queues})
        for _, queue, offset in answer["offsets"]:
            self._committed[queue] = offset
            self._rounds[queue] = ReviveRound(offset)
            self._ends[queue] = self._end(queue)

    @property
    def has_queues(self) -> bool:
        return bool(self._rounds)

    @property
    def is_waiting(self) -> bool:
        """Whether a check point was read that is not processed."""
        return any(one.waiting() for one in self._rounds.values())

    @property
    def is_behind_start(self) -> bool:
        """Whether everything was processed that was in the queues when :meth:`load` was called."""
        return all(one.next_offset >= self._ends[q] and not one.waiting() for q, one in self._rounds.items())

    def lag(self) -> dict[str, Any]:
        """``topic``: the revive topic. ``unread``: its records that were not read yet. ``waiting``: check points that were
        read and not processed; those whose messages are done wait too, until their time.
        """
        unread = sum(max(0, self._end(queue) - max(one.next_offset, 0)) for queue, one in self._rounds.items())
        waiting = sum(one.waiting() for one in self._rounds.values())
        return {"topic": self._topic, "unread": unread, "waiting": waiting}

    def _end(self, queue: int) -> int:
        bounds = self._places.queues.bounds(
            self._topic, queue, bound=self._places.bound(), floor=self._places.floor(self._topic)
        )
        return 0 if bounds is None else bounds[1]

    def turn(self, now_ms: int, monotonic_ms: int) -> None:
        """Read what is new, and process what is due. Raises WriterLost."""
        bound = self._places.bound()
        if monotonic_ms < self._look_at_ms or (bound == self._seen and not self.is_waiting):
            return
        self._look_at_ms = monotonic_ms + _LOOK_MS
        self._seen = bound
        for queue, one in self._rounds.items():
            if self._read(queue, one, bound):
                one.idle(now_ms)
            else:
                self._look_at_ms = 0
            due = list(takewhile(lambda found: not self._is_out(found, now_ms), one.due(now_ms)))
            if due:
                self._process(queue, one, due)

    def _is_out(self, found: DuePoint, now_ms: int) -> bool:
        """Whether its messages are with a consumer for longer yet: the clock was set forward, and the timer went by it."""
        point = self._points.by_key.get(found.check_point.key)
        return point is not None and point.open > 0 and point.due_ms > now_ms

    def _read(self, queue: int, one: ReviveRound, bound: int) -> bool:
        """Take records; True at the queue's end."""
        floor = self._places.floor(self._topic)
        at, units = self._places.queues.units(self._topic, queue, one.next_offset, _UNITS, bound=bound, floor=floor)
        for number, place in enumerate(units["physical_offset"].tolist()):
            one.next_offset = at + number + 1
            if place < floor or not int(units["size"][number]):
                continue
            try:
                one.take(self._places.log.record(place))
            except OffsetOutOfRangeError:
                continue
            except Exception as error:
                if not is_of_message(error):
                    raise
                self._context.log.error("a record of the revive topic says nothing", error=str(error))
        return len(units) < _UNITS

    def _process(self, queue: int, one: ReviveRound, due: list[DuePoint]) -> None:
        """Bring back what is left of ``due``. One that cannot be processed holds up all: the offset may not pass it."""
        by_key = self._points.by_key
        points = [found.check_point for found in due]
        unknown = [one.key for one in points if one.key not in by_key and one.left()]
        acks = self._acks.acked(unknown) if unknown else {}
        if acks is None:
            self._look_at_ms = 0
            return
        for key, acked in acks.items():
            self._done.setdefault(key, set()).update(acked)
        returns: list[RevivedMessage] = []
        owners: list[int] = []
        for number, found in enumerate(due):
            point = by_key.get(found.check_point.key)
            done_with = self._done.get(found.check_point.key, ())
            known = None if point is None else set(point.check_point.left())
            for offset in found.check_point.left():
                if offset not in done_with if known is None else offset in known:
                    returns.append(RevivedMessage(found.check_point, offset, -1 if point is None else point.log))
                    owners.append(number)
        held: set[int] = set()
        put_off: dict[int, list[int]] = {}
        for entry, number, outcome in zip(returns, owners, self._revival.copy(returns), strict=True):
            if outcome is ReviveOutcome.DONE:
                self._came_back(due[number].check_point.key, entry.offset)
            elif outcome is ReviveOutcome.PUT_OFF:
                put_off.setdefault(number, []).append(entry.offset)
            else:
                held.add(number)
        for number, found in enumerate(due):
            if number in held or (number in put_off and not self._put_off(queue, found, put_off[number])):
                return
            point = by_key.get(found.check_point.key)
            if point is not None and not point.open:
                self._points.drop(point)
            self._done.pop(found.check_point.key, None)
            one.processed(found)

    def _put_off(self, queue: int, found: DuePoint, offsets: list[int]) -> bool:
        """Give the messages at ``offsets``, the last ones of a check point, new check points with a later time. False:
        these cannot be stored now. The one with the old key is stored last: it replaces the old check point.
        """
        now, log = now_ms(), self._context.control.get(Word.WRITTEN)
        first = found.check_point.key.start_offset
        made = [found.check_point.rewritten(one, now) for one in sorted(offsets, key=lambda one: (one == first, one))]
        if not self._revival.put_off(made, queue, now):
            return False
        old = self._points.by_key.get(found.check_point.key)
        if old is not None:
            self._points.drop(old)
        for check_point in made:
            self._points.add(OpenCheckPoint(check_point, queue, b"", log))
        return True

    def _came_back(self, key: CheckPointKey, offset: int) -> None:
        """The copy is stored. A round that could not process all of its check points comes to this one again."""
        point = self._points.by_key.get(key)
        if point is not None:
            self._points.settle(point, offset)
        else:
            self._done.setdefault(key, set()).add(offset)

    def commits(self) -> list[dict[str, Any]]:
        """Requests for the coordinator that commit what was processed."""
        moved = [
            (self._topic, queue, one.position)
            for queue, one in self._rounds.items()
            if one.position > self._committed.get(queue, _NEVER)
        ]
        return [{"op": "offset.commit", "group": REVIVE_GROUP, "offsets": moved}] if moved else []

    def committed(self, requests: list[dict[str, Any]]) -> None:
        """These :meth:`commits` are durable."""
        for request in requests:
            for _, queue, offset in request["offsets"]:
                self._committed[queue] = max(self._committed.get(queue, _NEVER), offset)


_MOST_ROWS: Final = 500


class InFlight:
    """The operation ``in_flight``: what the consumers of a group have received and not acknowledged, for an
    administrator. It only reads what the process counts anyway.
    """

    def __init__(self, points: CheckPoints, orders: Orders, queues: ReviveQueues, answers: AnswerSocket) -> None:
        self._points, self._orders, self._queues, self._answers = points, orders, queues, answers

    def answer(self, client: bytes, header: dict[str, Any]) -> None:
        """A page of ``[topic, stored topic, queue, messages]``, in the order of stored topics and queues.

        ``revive``: how far messages that nobody acknowledged are from coming back, for all groups together. ``late_ms``:
        for how long the first check point has been due.
        """
        group = text_field(header, "group")
        after = header.get("after")
        if after is not None and (type(after) is not list or [type(one) for one in after] != [str, int]):
            raise ProtocolError("INVALID_PARAMETER", "after must be the value of next in the page before")
        now = now_ms()
        counts = self._points.queues_of(group)
        for queue, count in self._orders.out_of(group).items():
            counts[queue] = counts.get(queue, 0) + count
        behind = sorted(key for key in counts if after is None or key > tuple(after))
        page = behind[:_MOST_ROWS]
        rows = [[popped_topic(topic, group), topic, queue, counts[topic, queue]] for topic, queue in page]
        due = self._points.next_due_ms()
        self._answers.send(
            client,
            wire.ok(
                header["id"],
                queues=rows,
                next=list(page[-1]) if len(behind) > len(page) else None,
                messages=sum(counts.values()),
                revive={**self._queues.lag(), "late_ms": 0 if due is None else max(0, now - due)},
            ),
        )
