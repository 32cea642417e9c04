"""A copy that fits: what a mover appends where the copy of a message would break a limit of a record.

Each mover appends a message a second time, with another topic, with more properties, or both. The message fitted once; its
copy may not. One rule holds for all of them:

1. the copy as RocketMQ makes it;
2. the copy without what is optional: properties that only the move adds, or that nobody needs to handle the message. They
   go one after the other, until the copy fits. Properties of the application never go;
3. a dead letter, under the same rule; it needs fewer properties than a copy that waits;
4. nothing: the message is *set aside*. It stays where it lies; it is counted, logged once with its place, and passed.

A rule says which copies there are, the best first (:func:`lighter`); the first one that can be encoded is taken
(:func:`first_that_fits`). So nobody computes sizes beside the encoder. What grows, in bytes of properties:

=================  ===========================================================================================
mover              what its copy has more than its source
=================  ===========================================================================================
send-back, retry   RETRY_TOPIC 13 + topic, WAIT 11, DELAY 8, ORIGIN_MESSAGE_ID 51 (IPv6: 75), where it waits
                   REAL_TOPIC 20 + group and REAL_QID 10 and more; 512 properties at most
dead letter        RETRY_TOPIC and ORIGIN_MESSAGE_ID; nothing, once both are dropped
pop                1ST_POP_TIME 27, ORIGIN_GROUP 14 + group
schedule           nothing
timer              TIMER_ENQUEUE_MS 31 (37 when it was late), TIMER_DEQUEUE_MS 31, a roll TIMER_ROLL_TIMES 19 and
                   more; 512 properties at most
transaction        a half message that is put back: TRANSACTION_CHECK_TIMES 26 and more, and
                   TRAN_PREPARED_QUEUE_OFFSET 28 and more; a commit has less than its half message
reply              a pushed one: PUSH_REPLY_TIME 31, MSG_REGION and TRACE_ON 38; it needs none of them
resent letter      DLQ_ORIGIN_TOPIC and DLQ_ORIGIN_MESSAGE_ID, which it does not need; its id, the mark of the pass
=================  ===========================================================================================

With ``commit_log.append_properties_crc`` each record has 20 bytes more than one that was stored without it. The record grows
by the topic's name too, 255 bytes at most; the longest one is that of a pop's retries (7 + group 120 + 1 + topic 127), so no
name breaks a limit. Limits of bodies and runs are for clients: what the log has is moved whatever they are now. A record that
no segment or frame holds is refused by the writer, and is a dead letter or set aside as one whose properties do not fit.
docs/promises has the table of all limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from commitmq.errors import CommitMQError, InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.record import Record

OPTIONAL: Final = (Property.WAIT, Property.FIRST_POP_TIME, Property.TRACE_CONTEXT, Property.ORIGIN_MESSAGE_ID)
"""What any copy may lack, in the order in which it goes."""
TIMES_OF_TIMER: Final = (Property.TIMER_ENQUEUE_MS,)
"""What a delivered message may lack of what the timer adds. (TIMER_DEQUEUE_MS marks copies for a timer that begins anew.)"""

_C = TypeVar("_C")
_R = TypeVar("_R")


def lighter(record: Record, optional: Sequence[str] = OPTIONAL) -> Iterator[Record]:
    """``record``, then without the first of ``optional`` that it has, then without the second one too, and so on."""
    yield record
    for properties in without(record.properties, optional):
        yield replace(record, properties=properties)


def without(properties: Mapping[str, str], optional: Sequence[str]) -> Iterator[dict[str, str]]:
    """``properties`` without the first of ``optional`` that it has, then without the second one too, and so on."""
    left = dict(properties)
    for name in optional:
        if left.pop(name, None) is not None:
            yield dict(left)


def first_that_fits(
    copies: Iterable[_C], encode: Callable[[_C], _R], refusals: tuple[type[CommitMQError], ...] = (InvalidMessageError,)
) -> tuple[_C, _R]:
    """The first of ``copies`` that ``encode`` takes, and what it makes of it. Raises the refusal of the last one."""
    last: CommitMQError | None = None
    for copy in copies:
        try:
            return copy, encode(copy)
        except refusals as error:
            last = error
    raise last or InvalidMessageError("the message can have no copy")
