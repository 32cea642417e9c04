"""Check points, acks and the revival of what was not acked (spec 12.6, 18; remoting 5.8).

    pop     a check point (tag ``ck``) for the messages of one queue; due a second before they come again
    ack     an ack (tag ``ack``, several ``bAck``) that names the check point; due when they come again
    revive  the revive queue is read in order, acks are matched to check points, the rest is copied to the retry topic

Check points and acks are timer messages for the revive topic ``rmq_sys_REVIVE_LOG_<cluster>``: they lie in the timer
topic first. Their JSON has RocketMQ's members in alphabetical order.

One pass over a revive queue, as a state machine: which check points are due, with which acks (remoting 5.8).

    round = ReviveRound(committed offset)
    round.take(record)         each record of the queue from round.next_offset on
    round.idle(now_ms)         the queue's end is reached and the timer has nothing overdue
    for point in round.due(now_ms):
                               copy the messages of point.check_point.left() to the retry topic, store one that cannot be
                               copied as check_point.rewritten(…); then round.processed(point)
    commit round.position

The committed offset is that of the last *processed* check point (spec 18), so a pass reads again the acks behind it. An
ack lies behind its check point, because a check point is due a second earlier.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import RETRY_PREFIX, Host, Property
from commitmq.format.record import Record
from commitmq.semantics.derived import OPTIONAL, derived, fresh_order, lighter, made
from commitmq.semantics.retry import is_retry_topic, pop_retry_topic, popped_topic

REVIVE_TOPIC_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
"""The group whose offsets in the revive topic are the last processed ones; reading continues behind them (spec 18)."""
CHECK_POINT_TAG: Final = "ck"
ACK_TAG: Final = "ack"
BATCH_ACK_TAG: Final = "bAck"
EARLY_MS: Final = 1_000
"""A check point is due so long before its messages."""
REVIVE_LATE_MS: Final = 2_000
"""A check point is processed when the newest delivery seen is later than its time by more than this."""
REWRITE_INTERVALS_S: Final = (
    10, 20, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip
"""By how much a check point whose messages could not be copied is put off, by the number of failures."""

_MOST_MESSAGES: Final = 4_096  # RocketMQ's count is a byte
_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)
_TOO_MANY: Final = 127  # what RocketMQ takes for a rewrite count that is no number


def revive_topic(cluster: str) -> str:
    """The topic of check points and acks."""
    return REVIVE_TOPIC_PREFIX + cluster


class CheckPointKey(NamedTuple):
    """What an ack and its check point have in common."""

    topic: str
    group: str
    queue_id: int
    start_offset: int
    pop_time: int
    broker_name: str


@dataclass(frozen=True, slots=True)
class CheckPoint:
    """The messages of one queue that one pop delivered. Times are ms.

    ``deltas`` are their offsets relative to ``start_offset``; without them they are ``count`` consecutive ones.
    ``rewrites`` counts failed revivals. ``bits`` marks acked ones by their index, and ``revive_offset`` is RocketMQ's
    note in memory; a stored check point has 0 in both.
    """

    key: CheckPointKey
    invisible_ms: int
    deltas: tuple[int, ...]
    count: int = -1
    bits: int = 0
    revive_offset: int = 0
    rewrites: int | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            object.__setattr__(self, "count", len(self.deltas))

    @property
    def revive_ms(self) -> int:
        """When the messages come again."""
        return self.key.pop_time + self.invisible_ms

    @property
    def offsets(self) -> tuple[int, ...]:
        deltas = self.deltas or range(self.count)
        return tuple(self.key.start_offset + delta for delta in deltas)

    @property
    def unique_key(self) -> str:
        return _joined(self.key, self.key.start_offset, CHECK_POINT_TAG)

    def body(self) -> bytes:
        key = self.key
        values: dict[str, Any] = {
            "bm": self.bits,
            "bn": key.broker_name,
            "c": key.group,
            "d": list(self.deltas),
            "it": self.invisible_ms,
            "n": self.count,
            "pt": key.pop_time,
            "q": key.queue_id,
            "reviveTime": self.revive_ms,
            "ro": self.revive_offset,
            "so": key.start_offset,
            "t": key.topic,
        }
        if self.rewrites is not None:
            values["rp"] = str(self.rewrites)
        return _encoded(values)

    @classmethod
    def parse(cls, body: bytes) -> CheckPoint:
        """Inverse of :meth:`body`; unknown members are skipped. Raises InvalidMessageError for anything else."""
        values = _decoded(body)
        rewrites = values.get("rp")
        try:
            deltas = tuple(int(delta) for delta in values.get("d") or ())
            count = int(values.get("n", 0))
            if max(count, len(deltas)) > _MOST_MESSAGES:
                raise ValueError(f"{count} messages")
            return cls(
                _key_of(values, values["c"], values["t"]),
                int(values["it"]),
                deltas,
                count,
                int(values.get("bm", 0)),
                int(values.get("ro", 0)),
                None if rewrites is None else _rewrites(rewrites),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidMessageError(f"no check point: {body[:200]!r}") from error

    def acked(self, *offsets: int) -> CheckPoint:
        """This check point with the messages at ``offsets`` marked; the same for offsets that it does not have."""
        bits = self.bits
        for offset in offsets:
            index = self._index(offset)
            bits |= 1 << index if index >= 0 else 0
        return self if bits == self.bits else replace(self, bits=bits)

    def is_left(self, offset: int) -> bool:
        """Whether ``offset`` is one of :meth:`left`."""
        index = self._index(offset)
        return index >= 0 and not self.bits >> index & 1

    def _index(self, offset: int) -> int:
        """The place of the message at ``offset`` among all; -1 for an offset that it does not have."""
        delta = offset - self.key.start_offset
        deltas = self.deltas
        if deltas:
            if 0 <= delta < len(deltas) and deltas[delta] == delta:
                return delta  # without gaps, as most are
            return deltas.index(delta) if delta in deltas else -1
        return delta if 0 <= delta < self.count else -1

    def left(self) -> list[int]:
        """Offsets of the messages that are not acked."""
        return [offset for index, offset in enumerate(self.offsets) if not self.bits >> index & 1]

    def is_due(self, newest_ms: int) -> bool:
        """Whether it may be revived when ``newest_ms`` is the newest delivery time read from the revive queue."""
        return newest_ms - self.revive_ms > REVIVE_LATE_MS

    def rewritten(self, offset: int, now_ms: int) -> CheckPoint:
        """The check point for another try with the message at ``offset``, which could not be copied."""
        failures = self.rewrites or 0
        invisible_ms = self.invisible_ms
        if self.revive_ms <= now_ms:
            # RocketMQ counts from the old time. A check point that is long overdue would be due again at once, many times.
            invisible_ms = now_ms - self.key.pop_time
            invisible_ms += REWRITE_INTERVALS_S[min(failures, len(REWRITE_INTERVALS_S) - 1)] * 1000
        key = self.key._replace(start_offset=offset)
        return CheckPoint(key, invisible_ms, (0,), rewrites=failures + 1)


@dataclass(frozen=True, slots=True)
class Ack:
    """An ack of one message, or of several (``offsets``): then ``offset`` is -1."""

    key: CheckPointKey
    offset: int = -1
    offsets: tuple[int, ...] | None = field(default=None)

    @property
    def tag(self) -> str:
        return ACK_TAG if self.offsets is None else BATCH_ACK_TAG

    @property
    def acked(self) -> tuple[int, ...]:
        return (self.offset,) if self.offsets is None else self.offsets

    @property
    def unique_key(self) -> str:
        """UNIQ_KEY of the stored ack; one of several messages has -1 in it (spec 18)."""
        return _joined(self.key, self.offset, ACK_TAG)

    def body(self) -> bytes:
        key = self.key
        values: dict[str, Any] = {
            "ao": self.offset,
            "bn": key.broker_name,
            "c": key.group,
            "pt": key.pop_time,
            "q": key.queue_id,
            "so": key.start_offset,
            "t": key.topic,
        }
        if self.offsets is not None:
            values["aol"] = list(self.offsets)
        return _encoded(values)

    @classmethod
    def parse(cls, body: bytes) -> Ack:
        """Inverse of :meth:`body`, with RocketMQ's long names too. Raises InvalidMessageError for anything else."""
        values = {_LONG_NAMES.get(name, name): value for name, value in _decoded(body).items()}
        offsets = values.get("aol")
        try:
            return cls(
                _key_of(values, values["c"], values["t"]),
                int(values.get("ao", -1)),
                None if offsets is None else tuple(int(offset) for offset in offsets),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidMessageError(f"no ack: {body[:200]!r}") from error


_LONG_NAMES: Final = {
    "ackOffset": "ao",
    "ackOffsetList": "aol",
    "startOffset": "so",
    "consumerGroup": "c",
    "topic": "t",
    "queueId": "q",
    "popTime": "pt",
    "brokerName": "bn",
}


# ---------------------------------------------------------------- records


def check_point_record(check_point: CheckPoint, cluster: str, revive_queue: int, now_ms: int, host: Host) -> Record:
    """The message of ``check_point``; the put rules (``fresh``) make it a timer message."""
    properties = {
        Property.TAGS: CHECK_POINT_TAG,
        Property.TIMER_DELIVER_MS: str(check_point.revive_ms - EARLY_MS),
        Property.UNIQUE_KEY: check_point.unique_key,
    }
    return made(revive_topic(cluster), revive_queue, check_point.body(), properties, now_ms, host)


def ack_record(ack: Ack, invisible_ms: int, cluster: str, revive_queue: int, now_ms: int, host: Host) -> Record:
    """The message of ``ack``, of a pop with ``invisible_ms``; the put rules (``fresh``) make it a timer message."""
    properties = {
        Property.TAGS: ack.tag,
        Property.UNIQUE_KEY: ack.unique_key,
        Property.TIMER_DELIVER_MS: str(ack.key.pop_time + invisible_ms),
    }
    return made(revive_topic(cluster), revive_queue, ack.body(), properties, now_ms, host)


def retried(record: Record, check_point: CheckPoint, host: Host, *, queue_id: int = 0, v2: bool = False) -> Record:
    """The record that ``record``, a message without ack, becomes in the pop retry topic.

    ``host`` is the broker's address: it becomes the born host. Neither RETRY_TOPIC nor ORIGIN_MESSAGE_ID is set
    (spec 18); ``v2`` names the retry topic in the second form, and a message of a retry topic stays in its topic.
    """
    key = check_point.key
    topic = key.topic if is_retry_topic(key.topic) else pop_retry_topic(key.topic, key.group, v2=v2)
    properties: dict[str, str] = {}
    if Property.TAGS in record.properties:  # RocketMQ puts the tags first
        properties[Property.TAGS] = record.properties[Property.TAGS]
    properties.update(record.properties)
    if record.reconsume_times == 0 or Property.FIRST_POP_TIME not in properties:
        properties[Property.FIRST_POP_TIME] = str(key.pop_time)
    properties[Property.ORIGIN_GROUP] = key.group
    return derived(
        record,
        topic,
        queue_id,
        fresh_order(properties),
        born_host=host,
        reconsume_times=record.reconsume_times + 1,
    )


def retries(record: Record, check_point: CheckPoint, host: Host, *, v2: bool = False) -> Iterator[Record]:
    """:func:`retried`, and what takes its place where it does not fit (:mod:`commitmq.semantics.derived`).

    It grows by 1ST_POP_TIME and ORIGIN_GROUP. ORIGIN_GROUP tells whose a message is where two groups could have one retry
    topic: it stays there, and a message that has no room for it becomes a dead letter.
    """
    made = retried(record, check_point, host, v2=v2)
    names = made.topic.removeprefix(RETRY_PREFIX)
    is_of_one = "+" in names or names.count("_") < 2
    return lighter(made, (*OPTIONAL, Property.ORIGIN_GROUP) if is_of_one else OPTIONAL)


def checked_topic(check_point: CheckPoint) -> str:
    """The topic that must still exist for a revival: the one that the group popped."""
    return popped_topic(check_point.key.topic, check_point.key.group)


# ---------------------------------------------------------------- details


def _joined(key: CheckPointKey, offset: int, tag: str) -> str:
    return f"{key.topic}@{key.queue_id}@{offset}@{key.group}@{key.pop_time}@{key.broker_name}@{tag}"


def _encoded(values: dict[str, Any]) -> bytes:
    return _JSON.encode(values).encode()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except ValueError as error:
        raise InvalidMessageError(f"no JSON: {body[:200]!r}") from error
    if not isinstance(values, dict):
        raise InvalidMessageError(f"no JSON object: {body[:200]!r}")
    return values


def _key_of(values: dict[str, Any], group: Any, topic: Any) -> CheckPointKey:
    if not isinstance(group, str) or not isinstance(topic, str):
        raise TypeError("group and topic are text")
    return CheckPointKey(
        topic, group, int(values["q"]), int(values["so"]), int(values["pt"]), str(values.get("bn") or "")
    )


def _rewrites(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10 else _TOO_MANY


QUIET_MS: Final = 3_000
"""A queue without anything new counts as read up to now when its newest delivery is so long ago."""
_FAR_MS: Final = 60_000  # the two times of a check point are EARLY_MS apart


class DuePoint(NamedTuple):
    """A check point and its offset in the revive queue."""

    offset: int
    check_point: CheckPoint


class ReviveRound:
    """The check points and acks of a revive queue behind ``position``, the offset of the last processed one."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.next_offset = position + 1
        self.newest_ms = 0
        self._points: dict[CheckPointKey, DuePoint] = {}

    def take(self, record: Record) -> None:
        """Take the next record of the queue.

        An ack without its check point changes nothing: its messages were revived or are done. A check point with the
        key of another one takes its place, because it is the other one put off. Raises InvalidMessageError for a body
        that is no check point or ack; the record counts as taken.
        """
        self.next_offset = record.queue_offset + 1
        deliver = record.properties.get(Property.TIMER_DELIVER_MS, "")
        deliver_ms = int(deliver) if deliver.isascii() and deliver.isdigit() else 0
        self.newest_ms = max(self.newest_ms, deliver_ms)
        tag = record.properties.get(Property.TAGS)
        if tag == CHECK_POINT_TAG:
            point = CheckPoint.parse(record.body)
            if deliver_ms and point.revive_ms - deliver_ms > _FAR_MS:
                # It would hold up all others behind it, without an end.
                raise InvalidMessageError(f"the check point at {record.physical_offset} is due {point.revive_ms} ms")
            self._points.pop(point.key, None)  # so that the order stays the queue's
            self._points[point.key] = DuePoint(record.queue_offset, point)
        elif tag in (ACK_TAG, BATCH_ACK_TAG):
            ack = Ack.parse(record.body)
            found = self._points.get(ack.key)
            if found is not None:
                point = found.check_point
                for offset in ack.acked:
                    point = point.acked(offset)
                self._points[ack.key] = found._replace(check_point=point)
        else:
            raise InvalidMessageError(f"the record at {record.physical_offset} is neither check point nor ack: {tag!r}")

    def idle(self, now_ms: int) -> None:
        """Nothing more is in the queue, and the timer delivers nothing that is overdue."""
        if self.newest_ms and now_ms - self.newest_ms > QUIET_MS:
            self.newest_ms = now_ms

    def due(self, now_ms: int) -> list[DuePoint]:
        """The check points to process now, in the queue's order, up to the first that is not due.

        After a clock was set back a delivery later than ``now_ms`` makes nothing due, and a check point of such a time, which
        was delivered a moment before it, holds up nothing.
        """
        newest_ms = min(self.newest_ms, now_ms)
        found = []
        for point in self._points.values():
            if not point.check_point.is_due(newest_ms) and point.check_point.revive_ms <= now_ms + _FAR_MS:
                break
            found.append(point)
        return found

    def processed(self, point: DuePoint) -> None:
        """``point`` is done: its messages are acked, copied, or in a new check point."""
        self._points.pop(point.check_point.key, None)
        self.position = max(self.position, point.offset)

    def waiting(self) -> int:
        """How many check points were taken and not processed."""
        return len(self._points)
