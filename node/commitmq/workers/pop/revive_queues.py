"""The revive topic: reads its queues in rounds, as RocketMQ does, and brings back what nobody else did (remoting 5.8).

Check points of this process are known in memory and are done when they come here. What is unknown is RocketMQ's, or was
made before a death of which the log's part is gone: its messages come back here. What the group or its topics do not allow now
gets a new check point, which is due later, so that it holds up no others. The committed offset of
``CID_RMQ_SYS_REVIVE_GROUP`` is that of the last processed record.

Acks that the timer has not delivered yet, found where they wait.

A revive round judges a check point by the acks in the revive queue. After a long stop everything is overdue, and the timer may
have delivered a check point and not yet its acks. So the acks of an unknown check point are looked for in the timer topic too:
RocketMQ would bring such a message back although it was acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final

import numpy as np

from commitmq.config import NodeConfig
from commitmq.control import Word
from commitmq.errors import CorruptRecordError, InvalidMessageError, OffsetOutOfRangeError, ProtocolError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.protocol import wire
from commitmq.semantics.pop_revive import (
    ACK_TAG,
    BATCH_ACK_TAG,
    REVIVE_GROUP,
    REVIVE_TOPIC_PREFIX,
    Ack,
    CheckPointKey,
    DuePoint,
    ReviveRound,
    revive_topic,
)
from commitmq.semantics.retry import popped_topic
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.topic_files import TopicReader
from commitmq.workers.pop.orders import Orders
from commitmq.workers.pop.points import Point, Points, now_ms
from commitmq.workers.pop.revival import Fate, Return, Revival
from commitmq.workers.reader.places import Places
from commitmq.workers.reader.pulls import Answers, text_field
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.coordinator_line import CoordinatorLine
from commitmq.workers.runtime.isolation import is_of_message

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

    def __init__(self, places: Places, revive_topic: str, beat: Callable[[], None], *, most: int = _MOST) -> None:
        self._places, self._topic, self._beat, self._most = places, revive_topic, beat, most
        self._acks: dict[CheckPointKey, set[int]] = {}
        self._first = self._next = -1
        """What was read of the timer topic's queue: from the first offset up to the second one."""

    def acked(self, keys: Sequence[CheckPointKey]) -> dict[CheckPointKey, set[int]] | None:
        """The acknowledged offsets of each of these check points; each is asked for once. None: there is more to read, ask
        again in the next turn.
        """
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
    """See the module."""

    def __init__(self, context: WorkerContext, places: Places, topic: str, points: Points, revival: Revival) -> None:
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
        """Begin anew at the committed offsets. Raises ProtocolError."""
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
        """Bring back what is left of ``due``. The first one that cannot be processed now holds up the others: the offset may
        not pass it.
        """
        by_key = self._points.by_key
        points = [found.check_point for found in due]
        unknown = [one.key for one in points if one.key not in by_key and one.left()]
        acks = self._acks.acked(unknown) if unknown else {}
        if acks is None:
            self._look_at_ms = 0
            return
        for key, acked in acks.items():
            self._done.setdefault(key, set()).update(acked)
        returns: list[Return] = []
        owners: list[int] = []
        for number, found in enumerate(due):
            point = by_key.get(found.check_point.key)
            done_with = self._done.get(found.check_point.key, ())
            known = None if point is None else set(point.check_point.left())
            for offset in found.check_point.left():
                if offset not in done_with if known is None else offset in known:
                    returns.append(Return(found.check_point, offset, -1 if point is None else point.log))
                    owners.append(number)
        held: set[int] = set()
        put_off: dict[int, list[int]] = {}
        for entry, number, fate in zip(returns, owners, self._revival.copy(returns), strict=True):
            if fate is Fate.DONE:
                self._came_back(due[number].check_point.key, entry.offset)
            elif fate is Fate.PUT_OFF:
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
        """Give the messages at ``offsets``, the last ones of a check point, new check points with a later time.

        False: these cannot be stored now. The one with the old key is stored last: it replaces the old check point.
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
            self._points.add(Point(check_point, queue, b"", log))
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
    """The operation ``in_flight``: what the consumers of a group have received and not acknowledged, for an administrator.

    It only reads what the process counts anyway.
    """

    def __init__(self, points: Points, orders: Orders, queues: ReviveQueues, answers: Answers) -> None:
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
