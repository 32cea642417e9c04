"""Timer messages: any delay, stored in ``rmq_sys_wheel_timer`` until they are due (spec 12.2, 18; remoting 3.8).

A message goes these steps:

1. request      a property says when; :func:`timer_request` rounds the time and gives the record for the timer topic
(for
                runs of clients: :mod:`commitmq.workers.writer.put_rules`)
2. enqueuing    :func:`commitmq.workers.timer.incoming.slots_of` picks the slots of the wheel; a time too far away
*rolls*: it
                takes an earlier slot
3. due          :mod:`commitmq.workers.timer.deliveries` sorts a slot's units; cancellations come first
4. re-put       :mod:`commitmq.workers.timer.deliveries` appends to the real topic, or to the timer topic for another
round

A recall cancels a message. It is a timer message of its own, carries the unique id of the other one and is due in the
same slot, where it takes it away; who may recall has a :class:`RecallHandle`.

Times are milliseconds and passed in; "precision" is the width of a slot.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Host, Property
from commitmq.format.record import Record
from commitmq.format.timer import SLOTS, SLOTS_TO_COME, Slot
from commitmq.semantics.derived import broker_order, derived, fresh_order, made

TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
REQUESTS: Final = (Property.TIMER_DELAY_SECONDS, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
"""The properties that ask for a timer; the first one present wins."""
LATE_ENQUEUE_MS: Final = (1 << 63) - 1
"""TIMER_ENQUEUE_MS of a message that was due before it was enqueued and so never was in the wheel."""

_SPARE_SLOTS: Final = 60  # RocketMQ keeps a message so many slots shorter in the wheel than the wheel could
_LONG: Final = re.compile(r"[+-]?[0-9]{1,32}", re.ASCII)  # (Python reads no number of thousands of digits)


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
    record: Record, now_ms: int, rules: TimerRules | None = None, *, fresh: bool = False
) -> Record | None:
    """The record for the timer topic that a ``record`` with a request is stored as; None when its time has passed.

    A message whose time has passed is stored as the plain message that it is, its request included. ``fresh``: the broker
    itself made ``record``. The limit per slot is not looked at. Raises TimerRefusedError: the request is no number, is too
    far away, or cancels what has passed.
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
    properties = dict(record.properties)
    properties[Property.TIMER_OUT_MS] = str(rounded(deliver_ms, rules.precision_ms))
    properties[Property.REAL_TOPIC] = record.topic
    properties[Property.REAL_QUEUE_ID] = str(record.queue_id)
    properties = fresh_order(properties) if fresh else broker_order(properties)
    kept = record.prepared_transaction_offset
    return derived(record, TIMER_TOPIC, 0, properties, prepared_transaction_offset=kept)


def refused_share(slot_count: int, rules: TimerRules) -> float:
    """Share of requests, 0 to 1, to refuse at random while a slot holds one to two times its limit. It grows with the
    slot. (RocketMQ's begins with all and sinks.)
    """
    return min(1.0, max(0.0, (slot_count - rules.congest_count) / rules.congest_count))


# ---------------------------------------------------------------- the wheel


def slot_index(time_ms: int, precision_ms: int = 1000) -> int:
    """Number of the slot for ``time_ms``."""
    return time_ms // precision_ms % SLOTS


def slot_for(raw: Slot, time_ms: int, precision_ms: int = 1000) -> Slot | None:
    """``raw``, the content of slot ``slot_index(time_ms)``, or None when it belongs to another turn of the wheel."""
    return raw if raw.time == time_ms // precision_ms else None


# ---------------------------------------------------------------- cancelling


def delete_key(real_topic: str, unique_key: str, *, with_topic: bool = False) -> str:
    """What TIMER_DEL_UNIQKEY holds: the unique id ([5.4.0]); with appendTopicForTimerDeleteKey the topic before it."""
    return f"{real_topic}+{unique_key}" if with_topic else unique_key


def _long(name: str, text: str) -> int:
    """Java's Long.parseLong. Raises TimerRefusedError."""
    value = int(text) if _LONG.fullmatch(text) else None
    if value is None or not -(1 << 63) <= value < 1 << 63:
        raise TimerRefusedError("WHEEL_TIMER_MSG_ILLEGAL", f"the property {name} is no number: {text!r}")
    return value


RECALL_TAG: Final = "_RECALL_TAG_"
RECALL_BODY: Final = b"0"
CANCEL_MARGIN_MS: Final = 500
"""A message cannot be cancelled later than this before its slot: the timer must have seen the cancellation by then."""
_VERSION: Final = "v1"


class RecallHandle(NamedTuple):
    """What a sender needs to cancel a timer message. ``deliver_ms`` is TIMER_OUT_MS + 1, so it rounds to the same slot."""

    topic: str
    broker_name: str
    deliver_ms: int
    unique_key: str

    def encode(self) -> str:
        """RocketMQ's text: URL-safe Base64, with padding, of ``v1 topic broker time id``."""
        text = f"{_VERSION} {self.topic} {self.broker_name} {self.deliver_ms} {self.unique_key}"
        return base64.urlsafe_b64encode(text.encode()).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> RecallHandle:
        """Inverse of :meth:`encode`. Raises InvalidMessageError for any other text."""
        try:
            parts = base64.b64decode(text, altchars=b"-_", validate=True).decode().split(" ")
        except (binascii.Error, UnicodeError, ValueError) as error:
            raise InvalidMessageError(f"the recall handle is invalid: {error}") from error
        if len(parts) != 5 or parts[0] != _VERSION or not (parts[3].isascii() and parts[3].isdigit()):
            raise InvalidMessageError("the recall handle is invalid: it is not version, topic, broker, time and id")
        return cls(parts[1], parts[2], int(parts[3]), parts[4])


def recall_handle(timer: Record, broker_name: str) -> RecallHandle | None:
    """The handle of ``timer``, a record of the timer topic; None without a unique id."""
    unique_key = timer.properties.get(Property.UNIQUE_KEY)
    real_topic = timer.properties.get(Property.REAL_TOPIC)
    out = timer.properties.get(Property.TIMER_OUT_MS)
    if not unique_key or not real_topic or not out:
        return None
    return RecallHandle(real_topic, broker_name, int(out) + 1, unique_key)


def recall_record(
    handle: RecallHandle,
    group: str,
    now_ms: int,
    host: Host,
    rules: TimerRules | None = None,
    *,
    with_topic: bool = False,
) -> Record:
    """The message that cancels the one of ``handle``; :func:`timer_request` (``fresh``) makes it a timer message.

    ``group`` is the sender's producer group, ``host`` the sender's address. TRACE_CONTEXT is empty, as RocketMQ stores
    it. Raises TimerRefusedError when the time has passed or is too far away.
    """
    left_ms = handle.deliver_ms - now_ms
    if not 0 < left_ms < (rules or TimerRules()).max_delay_s * 1000:
        why = f"its time came {-left_ms} ms ago" if left_ms <= 0 else f"it is due in {left_ms} ms (timer.max_delay_ms)"
        raise TimerRefusedError("ILLEGAL_OPERATION", f"the message cannot be cancelled: {why}")
    properties = {
        Property.TAGS: RECALL_TAG,
        Property.TIMER_DELETE_KEY: delete_key(handle.topic, handle.unique_key, with_topic=with_topic),
        Property.UNIQUE_KEY: handle.unique_key,
        Property.TIMER_DELIVER_MS: str(handle.deliver_ms),
        Property.BORN_TIMESTAMP: str(now_ms),
        Property.TRACE_CONTEXT: "",
        Property.PRODUCER_GROUP: group,
    }
    return made(handle.topic, 0, RECALL_BODY, properties, now_ms, host)
