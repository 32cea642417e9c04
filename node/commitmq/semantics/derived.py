"""Records that a broker makes from other records, and copies of messages that fit.

A rule of this package gives a :class:`Record` whose properties are in the order in which RocketMQ stores them, so
``encode_record(record, buckets=None)`` has RocketMQ's bytes. The fields that the writer fills at the append are zero:
queue offset, physical offset and store time. The writer sets its own store host as well.

Two orders occur (spec 2.5, 12.1). A broker decodes a record into a Java HashMap of 128 buckets, and writes the properties in
its order, which can be computed (:func:`commitmq.format.java.hash_map_order`; the kernel ``readdress`` has the same rule for
bytes). A message that the broker makes itself begins with an empty HashMap of 16.

Each mover appends a message a second time, with another topic, with more properties, or both. The message fitted once; its
copy may break a limit of a record. One rule holds for all of them:

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
from functools import lru_cache
from typing import Any, Final, TypeVar

from commitmq.errors import CommitMQError, InvalidMessageError
from commitmq.format.constants import Host, Property, SysFlag
from commitmq.format.java import hash_map_order
from commitmq.format.properties import BROKER_BUCKETS, CLIENT_BUCKETS
from commitmq.format.record import Record


def java_order(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The iteration order of a ``HashMap`` of capacity 128 to which ``pairs`` were put in this order. A name that is
    put again keeps its place and takes the new value.
    """
    values = dict(pairs)
    return [(name, values[name]) for name in hash_map_order(values, BROKER_BUCKETS)]


_WIDTHS: Final = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
_ORDERS: Final = 32
"""So many orders are remembered. Clients choose names, 32 KiB of them at most in a message."""


def broker_order(properties: Mapping[str, str]) -> dict[str, str]:
    """``properties`` as a broker orders what it decoded from a record or a request."""
    return dict(java_order(properties.items()))


def fresh_order(properties: Mapping[str, str]) -> dict[str, str]:
    """``properties`` as a broker orders those of a message that it made itself."""
    return {name: properties[name] for name in _fresh_order(tuple(properties))}


@lru_cache(_ORDERS)
def _fresh_order(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(hash_map_order(names, CLIENT_BUCKETS))


def derived(record: Record, topic: str, queue_id: int, properties: Mapping[str, str], **changes: Any) -> Record:
    """``record`` for queue ``queue_id`` of ``topic`` with ``properties``, in their order, and with ``changes``.

    Body, flag, sysFlag, born time, born host and reconsumeTimes stay unless ``changes`` has them.
    preparedTransactionOffset becomes 0: only a committed record has one.
    """
    fields: dict[str, Any] = {"prepared_transaction_offset": 0, **changes}
    return replace(
        record,
        topic=topic,
        queue_id=queue_id,
        queue_offset=0,
        physical_offset=0,
        store_timestamp=0,
        total_size=0,
        body_crc=0,
        properties=dict(properties),
        has_properties_crc=False,
        version=0,
        sys_flag=fields.pop("sys_flag", record.sys_flag) & ~_WIDTHS,
        **fields,
    )


def made(topic: str, queue_id: int, body: bytes, properties: Mapping[str, str], now_ms: int, host: Host) -> Record:
    """A message that the broker with address ``host`` makes itself at ``now_ms``; its born host is its own."""
    return Record(
        topic,
        queue_id,
        born_timestamp=now_ms,
        properties=fresh_order(properties),
        body=body,
        born_host=host,
        store_host=host,
    )


OPTIONAL: Final = (Property.WAIT, Property.FIRST_POP_TIME, Property.TRACE_CONTEXT, Property.ORIGIN_MESSAGE_ID)
"""What any copy may lack, in the order in which it goes."""
TIMES_OF_TIMER: Final = (Property.TIMER_ENQUEUE_MS,)
"""What a delivered message may lack of what the timer adds. (TIMER_DEQUEUE_MS marks copies for a timer that starts
over.)
"""

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
