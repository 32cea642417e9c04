"""Timer messages: any delay, stored in ``rmq_sys_wheel_timer`` until they are due (spec 12.2, 18; remoting 3.8).

A message goes these steps:

1. request      a property says when; :func:`timer_request` rounds the time and gives the record for the timer topic
2. enqueuing    :func:`slot_time` picks the slot of the wheel; a time too far away *rolls*: it takes an earlier slot
3. due          :func:`due_units` sorts a slot's units; cancellations come first
4. re-put       :func:`delivered` goes to the real topic, :func:`rolled` to the timer topic for another round

Times are milliseconds and handed in; "precision" is the width of a slot.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record
from commitmq.format.timer_log import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL, TimerUnit
from commitmq.format.timer_wheel import NO_POSITION, SLOTS, SLOTS_TO_COME, Slot
from commitmq.semantics.derived import broker_order, derived, fresh_order

TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
REQUESTS: Final = (Property.TIMER_DELAY_SECONDS, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
"""The properties that ask for a timer; the first one present wins."""
LATE_ENQUEUE_MS: Final = (1 << 63) - 1
"""TIMER_ENQUEUE_MS of a message that was due before it was enqueued and so never was in the wheel."""

_SPARE_SLOTS: Final = 60  # RocketMQ keeps a message so many slots shorter in the wheel than the wheel could
_LONG: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)


class TimerRefusedError(InvalidMessageError):
    """The store takes no timer like this. ``code`` is RocketMQ's PutMessageStatus."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class TimerRules:
    """RocketMQ's settings of the same meaning, with its defaults (spec 12.2)."""

    precision_ms: int = 1000
    max_delay_s: int = 259_200
    roll_window_slots: int = 172_800
    congest_count: int = 2**31 - 1

    @property
    def window_ms(self) -> int:
        """How far ahead a slot may be; what is due later rolls."""
        most = SLOTS_TO_COME - _SPARE_SLOTS
        slots = self.roll_window_slots if 2 <= self.roll_window_slots <= most else most
        return slots * self.precision_ms

    @property
    def turn_ms(self) -> int:
        """The time to come that the wheel can hold."""
        return SLOTS_TO_COME * self.precision_ms


# ---------------------------------------------------------------- the request


def asks_for_timer(topic: str, properties: Mapping[str, str]) -> bool:
    """Whether a message for ``topic`` wants a timer (spec 12.2): it has a request, no DELAY above 0, and is none yet."""
    if topic == TIMER_TOPIC or Property.TIMER_OUT_MS in properties:
        return False
    return delay_level(properties) <= 0 and any(name in properties for name in REQUESTS)


def delay_level(properties: Mapping[str, str]) -> int:
    """The delay level that DELAY has, 0 without one. Raises TimerRefusedError for text that is no number."""
    text = properties.get(Property.DELAY)
    return 0 if text is None else _long(Property.DELAY, text)


def without_requests(properties: Mapping[str, str]) -> dict[str, str]:
    """``properties`` without the requests for a timer: a DELAY above 0 wins over them, they are not stored."""
    return {name: value for name, value in properties.items() if name not in REQUESTS}


def asked_time(properties: Mapping[str, str], now_ms: int) -> int:
    """When a message with a request is to be delivered. Raises TimerRefusedError for a request that is no number."""
    for name in REQUESTS:
        text = properties.get(name)
        if text is not None:
            value = _long(name, text)
            if name == Property.TIMER_DELIVER_MS:
                return value
            return now_ms + value * (1000 if name == Property.TIMER_DELAY_SECONDS else 1)
    raise TimerRefusedError("WHEEL_TIMER_MSG_ILLEGAL", "no property says when to deliver the message")


def rounded(deliver_ms: int, precision_ms: int = 1000) -> int:
    """The slot of a wanted time: down to the precision, and a time that is exact takes the slot before (spec 18)."""
    if deliver_ms % precision_ms == 0:
        return deliver_ms - precision_ms
    return deliver_ms // precision_ms * precision_ms


def timer_request(
    record: Record, now_ms: int, rules: TimerRules | None = None, *, slot_count: int = 0, fresh: bool = False
) -> Record | None:
    """The record for the timer topic that a ``record`` with a request is stored as; None when its time has passed.

    A message whose time has passed is stored as the plain message that it is, its request included. ``slot_count``: what
    the slot holds already, for the limit per slot. ``fresh``: the broker itself made ``record``. Raises
    TimerRefusedError: the request is no number, is too far away, cancels what has passed, or its slot is full.
    """
    rules = rules or TimerRules()
    deliver_ms = asked_time(record.properties, now_ms)
    if deliver_ms <= now_ms:
        if Property.TIMER_DELETE_KEY in record.properties:
            raise TimerRefusedError("WHEEL_TIMER_MSG_ILLEGAL", "a cancellation must come before the time of delivery")
        return None
    if deliver_ms - now_ms > rules.max_delay_s * 1000:
        raise TimerRefusedError(
            "WHEEL_TIMER_MSG_ILLEGAL",
            f"the delay is {deliver_ms - now_ms} ms, at most {rules.max_delay_s * 1000} ms are allowed",
        )
    if slot_count >= 2 * rules.congest_count:
        raise TimerRefusedError(
            "WHEEL_TIMER_FLOW_CONTROL", f"{slot_count} messages are due in the same slot, no more are taken"
        )
    properties = dict(record.properties)
    properties[Property.TIMER_OUT_MS] = str(rounded(deliver_ms, rules.precision_ms))
    properties[Property.REAL_TOPIC] = record.topic
    properties[Property.REAL_QUEUE_ID] = str(record.queue_id)
    properties = fresh_order(properties) if fresh else broker_order(properties)
    kept = record.prepared_transaction_offset
    return derived(record, TIMER_TOPIC, 0, properties, prepared_transaction_offset=kept)


def refused_share(slot_count: int, rules: TimerRules) -> float:
    """Share of requests, 0 to 1, to refuse at random while a slot holds one to two times its limit.

    It grows with the slot. (RocketMQ's begins with all and sinks.)
    """
    return min(1.0, max(0.0, (slot_count - rules.congest_count) / rules.congest_count))


# ---------------------------------------------------------------- the wheel


def slot_index(time_ms: int, precision_ms: int = 1000) -> int:
    """Number of the slot for ``time_ms``."""
    return time_ms // precision_ms % SLOTS


def slot_for(raw: Slot, time_ms: int, precision_ms: int = 1000) -> Slot | None:
    """``raw``, the content of slot ``slot_index(time_ms)``, or None when it belongs to another turn of the wheel."""
    return raw if raw.time == time_ms // precision_ms else None


def slot_time(out_ms: int, write_ms: int, rules: TimerRules) -> tuple[int, bool]:
    """(time of the slot that a message due at ``out_ms`` takes now, whether it rolls).

    A message that is a little beyond the window takes the middle of it, so that its last round is not too short for the
    work; else the window's end.
    """
    window_ms = rules.window_ms
    beyond_ms = out_ms - write_ms - window_ms
    if beyond_ms < 0:
        return out_ms, False
    slots = window_ms // rules.precision_ms
    if beyond_ms < slots // 3 * rules.precision_ms:
        return write_ms + slots // 2 * rules.precision_ms, True
    return write_ms + window_ms, True


def timer_unit(record: Record, write_ms: int, slot: Slot | None, rules: TimerRules) -> TimerUnit:
    """The unit of a ``record`` of the timer topic that is enqueued at ``write_ms``; ``slot`` is its slot so far.

    Raises TimerRefusedError when the record's TIMER_OUT_MS is no number.
    """
    out_ms = due_time(record)
    time_ms, rolls = slot_time(out_ms, write_ms, rules)
    magic = MAGIC_DEFAULT
    if rolls:
        magic |= MAGIC_ROLL
    if Property.TIMER_DELETE_KEY in record.properties:
        magic |= MAGIC_DELETE
    return TimerUnit(
        previous=NO_POSITION if slot is None else slot.last,
        magic=magic,
        write_ms=write_ms,
        delay_ms=time_ms - write_ms,
        physical_offset=record.physical_offset,
        record_bytes=record.total_size,
        topic_hash=java_string_hash(record.properties.get(Property.REAL_TOPIC, "")),
    )


def slot_with(slot: Slot | None, unit: TimerUnit, position: int, precision_ms: int = 1000) -> Slot:
    """The slot after ``unit`` was written at ``position`` of the timer log. A cancellation lowers the count."""
    step = -1 if unit.deletes else 1
    time = unit.slot_ms // precision_ms
    if slot is None:
        return Slot(time, position, position, step)
    first = position if slot.first == NO_POSITION else slot.first
    return slot._replace(first=first, last=position, messages=slot.messages + step)


def due_time(record: Record) -> int:
    """TIMER_OUT_MS of a record of the timer topic. Raises TimerRefusedError when it is no number."""
    return _long(Property.TIMER_OUT_MS, record.properties.get(Property.TIMER_OUT_MS, ""))


def first_read_time(last_read_ms: int, now_ms: int, rules: TimerRules) -> int:
    """The slot with which a started timer begins: where it ended, but not what the wheel has overwritten since."""
    now_ms = now_ms // rules.precision_ms * rules.precision_ms
    return max(last_read_ms, now_ms - rules.turn_ms + _SPARE_SLOTS * rules.precision_ms)


# ---------------------------------------------------------------- a slot that is due


class DueUnits(NamedTuple):
    """The units of a slot in the order of their work."""

    cancellations: list[TimerUnit]
    messages: list[TimerUnit]


def due_units(chain: Iterable[TimerUnit]) -> DueUnits:
    """The units of a slot, walked from its last one backwards. Messages come in the order of their enqueuing.

    A cancellation that rolls counts as a message: it goes round again with the message that it cancels.
    """
    cancellations: list[TimerUnit] = []
    messages: list[TimerUnit] = []
    for unit in chain:
        (cancellations if unit.deletes and not unit.rolls else messages).append(unit)
    messages.reverse()
    return DueUnits(cancellations, messages)


def is_cancelled(record: Record, delete_keys: Collection[str]) -> bool:
    """Whether one of the slot's ``delete_keys`` (of :func:`delete_keys`) names ``record``, a message of the timer topic."""
    unique_key = record.properties.get(Property.UNIQUE_KEY)
    if unique_key is None:
        return False
    return delete_key(record.properties.get(Property.REAL_TOPIC, ""), unique_key, with_topic=True) in delete_keys


def delete_keys(cancellation: Record) -> set[str]:
    """Which messages a ``cancellation`` of the timer topic means: topic and unique id together.

    The stored key may be the unique id alone; then the message has the topic of the cancellation. (RocketMQ compares bare
    ids, or with appendTopicForTimerDeleteKey both, but never one with the other.) It may have the topic before it.
    """
    stored = cancellation.properties.get(Property.TIMER_DELETE_KEY, "")
    topic = cancellation.properties.get(Property.REAL_TOPIC, "")
    return {stored, delete_key(topic, stored, with_topic=True)} if stored else set()


def delete_key(real_topic: str, unique_key: str, *, with_topic: bool = False) -> str:
    """What TIMER_DEL_UNIQKEY holds: the unique id ([5.4.0]); with appendTopicForTimerDeleteKey the topic before it."""
    return f"{real_topic}+{unique_key}" if with_topic else unique_key


def rolled(record: Record, enqueue_ms: int, dequeue_ms: int) -> Record:
    """The record that a message which rolls is put as again, in the timer topic."""
    properties = _dequeued(record, enqueue_ms, dequeue_ms, rolls=True)
    return derived(record, record.topic, record.queue_id, broker_order(properties))


def delivered(record: Record, enqueue_ms: int, dequeue_ms: int) -> Record | None:
    """The record that a due message is delivered as; None for a cancellation, which is never delivered.

    REAL_TOPIC, REAL_QID and TIMER_OUT_MS stay in the stored properties. ``enqueue_ms`` is the unit's time, or
    :data:`LATE_ENQUEUE_MS`. Raises InvalidMessageError when the record names no real queue.
    """
    if Property.TIMER_DELETE_KEY in record.properties:
        return None
    topic = record.properties.get(Property.REAL_TOPIC)
    queue = record.properties.get(Property.REAL_QUEUE_ID, "")
    if not topic or not _LONG.fullmatch(queue):
        raise InvalidMessageError(f"the timer message at {record.physical_offset} names no real topic and queue")
    properties = _dequeued(record, enqueue_ms, dequeue_ms, rolls=False)
    return derived(record, topic, int(queue), broker_order(properties))


def _dequeued(record: Record, enqueue_ms: int, dequeue_ms: int, *, rolls: bool) -> dict[str, str]:
    properties = dict(record.properties)
    properties[Property.TIMER_ENQUEUE_MS] = str(enqueue_ms)
    if rolls:
        times = properties.get(Property.TIMER_ROLL_TIMES)
        properties[Property.TIMER_ROLL_TIMES] = str(1 if times is None else _long(Property.TIMER_ROLL_TIMES, times) + 1)
    properties[Property.TIMER_DEQUEUE_MS] = str(dequeue_ms)
    return properties


def _long(name: str, text: str) -> int:
    """Java's Long.parseLong. Raises TimerRefusedError."""
    value = int(text) if _LONG.fullmatch(text) else None
    if value is None or not -(1 << 63) <= value < 1 << 63:
        raise TimerRefusedError("WHEEL_TIMER_MSG_ILLEGAL", f"the property {name} is no number: {text!r}")
    return value
