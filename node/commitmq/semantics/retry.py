"""Retries and dead letters: names, send-back, redirection, back-off (spec 12.4, 18; remoting 3.6, 3.7, 6.6).

A message that a consumer cannot handle is *sent back*: a copy goes to ``%RETRY%group``, through a delay level, and to
``%DLQ%group`` after the last try. The members of the group read their retry topic beside their own topics.

:func:`topics_of` says whose such a stored message is: a request that names it by its place needs the rights to these topics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX, WAITING_TOPICS, Property
from commitmq.format.record import Record
from commitmq.semantics.derived import OPTIONAL, broker_order, derived, lighter
from commitmq.semantics.timer import REQUESTS

FIRST_RETRY_LEVEL: Final = 3
DEFAULT_MAX_RETRIES: Final = 16
TO_DEAD_LETTERS: Final = -1
"""As delay level of a send-back: no more tries."""
UNDELIVERED_GROUP: Final = "CMQ_UNDELIVERED"
"""The group whose dead letters are messages that waited, and that their topic could not take in the end; the node's own."""
UNDELIVERED_TOPIC: Final = DLQ_PREFIX + UNDELIVERED_GROUP

_V1: Final = "_"
_V2: Final = "+"
DEAD_LETTER_STATE: Final = frozenset(
    (
        *REQUESTS,
        Property.TIMER_OUT_MS,
        Property.TIMER_ENQUEUE_MS,
        Property.TIMER_DEQUEUE_MS,
        Property.TIMER_ROLL_TIMES,
        Property.ORIGIN_GROUP,
        Property.TRANSACTION_ID,
        Property.TRACE_CONTEXT,
        Property.BORN_TIMESTAMP,
        "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
    )
)
"""Properties of a dead letter's way, beside the system's own, that a message sent again must not carry."""
_OF_THE_WAY: Final = (
    *OPTIONAL[:-1],
    Property.DELAY,
    Property.REAL_QUEUE_ID,
    Property.REAL_TOPIC,
    Property.ORIGIN_GROUP,
    Property.ORIGIN_MESSAGE_ID,
    Property.RETRY_TOPIC,
)
"""What a dead letter may lack, in the order in which it goes."""


# ---------------------------------------------------------------- names


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    return DLQ_PREFIX + group


def pop_retry_topic(topic: str, group: str, *, v2: bool = False) -> str:
    """The topic of the retries of ``group`` when it pops ``topic``: ``%RETRY%group_topic``, v2 ``%RETRY%group+topic``."""
    return f"{RETRY_PREFIX}{group}{_V2 if v2 else _V1}{topic}"


def is_retry_topic(topic: str) -> bool:
    """Whether ``topic`` has retries, of either kind."""
    return topic.startswith(RETRY_PREFIX)


def is_pop_retry_v2(topic: str) -> bool:
    """Whether ``topic`` is a pop retry topic of the second form. One of the first form cannot be told by its name."""
    return is_retry_topic(topic) and _V2 in topic


def popped_topic(topic: str, group: str) -> str:
    """The topic that ``group`` pops when its message lies in ``topic``: the name behind the group, or ``topic``."""
    for separator in (_V2, _V1):
        prefix = f"{RETRY_PREFIX}{group}{separator}"
        if topic.startswith(prefix):
            return topic.removeprefix(prefix)
    return topic


# ---------------------------------------------------------------- send-back


@dataclass(frozen=True, slots=True)
class SentBack:
    """The record that a send-back stores, and whether it is a dead letter. A record that is none has a DELAY, and the
    put rules store it in the delay topic first.
    """

    record: Record
    dead: bool


def is_last_try(record: Record, delay_level: int, max_retries: int = DEFAULT_MAX_RETRIES) -> bool:
    """Whether a ``record`` that is sent back becomes a dead letter."""
    return record.reconsume_times >= max_retries or delay_level < 0


def sent_back(
    record: Record,
    group: str,
    queue_id: int,
    *,
    delay_level: int = 0,
    max_retries: int = DEFAULT_MAX_RETRIES,
    retries: int = 0,
) -> SentBack:
    """What ``record``, of the log, becomes when ``group`` sends it back; ``queue_id`` is one of the retry topic's.

    ``delay_level`` 0 is 3 + the tries so far, -1 is the end of the tries. The first send-back sets RETRY_TOPIC and
    ORIGIN_MESSAGE_ID, and later ones leave them. A dead letter has DELAY 0 and is stored directly; REAL_TOPIC and REAL_QID of
    the round before stay. ``retries``: how often the consumer itself tried the message again, as in ordered mode, in all.
    """
    dead = is_last_try(record, delay_level, max_retries)
    properties = dict(record.properties)
    properties.setdefault(Property.RETRY_TOPIC, record.topic)
    properties[Property.WAIT] = "false"
    level = 0 if dead else (delay_level or retry_level(record.reconsume_times))
    properties[Property.DELAY] = str(level)
    if not properties.get(Property.ORIGIN_MESSAGE_ID, "").strip():
        properties[Property.ORIGIN_MESSAGE_ID] = record.offset_msg_id
    topic = dead_letter_topic(group) if dead else retry_topic(group)
    times = max(record.reconsume_times, retries) + 1
    stored = derived(record, topic, 0 if dead else queue_id, broker_order(properties), reconsume_times=times)
    return SentBack(stored, dead)


def copies(
    record: Record,
    group: str,
    queue_id: int,
    *,
    delay_level: int = 0,
    max_retries: int = DEFAULT_MAX_RETRIES,
    retries: int = 0,
) -> Iterator[SentBack]:
    """:func:`sent_back`, and what takes its place where it does not fit, the best first: a try without what is optional, then
    a dead letter, with ever less of its way (:mod:`commitmq.semantics.derived`).

    A try keeps RETRY_TOPIC, without which its consumer takes the retry topic for the message's own, DELAY and the place where
    it is to come. The last dead letter has no property but the application's; ``dlq resend`` must be told its topic then.
    """
    made = sent_back(record, group, queue_id, delay_level=delay_level, max_retries=max_retries, retries=retries)
    if not made.dead:
        yield from (SentBack(one, dead=False) for one in lighter(made.record))
        made = sent_back(record, group, 0, delay_level=TO_DEAD_LETTERS, retries=retries)
    yield from (SentBack(one, dead=True) for one in lighter(made.record, _OF_THE_WAY))


def retry_level(reconsume_times: int) -> int:
    """The delay level of the try after ``reconsume_times`` others; the delay rules clamp it to the last level."""
    return FIRST_RETRY_LEVEL + reconsume_times


_OF_OTHERS: Final = WAITING_TOPICS | {dead_letter_topic(UNDELIVERED_GROUP)}


def topics_of(topic: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """``topic``, in which the message is stored, and where that is a topic of the node, the one that it was sent to."""
    real = properties.get(Property.REAL_TOPIC) if topic in _OF_OTHERS else None
    return (topic,) if not real or real == topic else (topic, real)
