"""Records that a broker makes from other records.

A rule of this package gives a :class:`Record` whose properties are in the order in which RocketMQ stores them, so
``encode_record(record, buckets=None)`` has RocketMQ's bytes. The fields that the writer fills at the append are zero:
queue offset, physical offset and store time. The writer sets its own store host as well.

Two orders occur (spec 2.5). A broker decodes a record into a Java HashMap of 128 buckets. A message that the broker
makes itself begins with an empty HashMap of 16.

The order of a message's properties after RocketMQ's broker has rewritten them (spec 12.1).

The broker decodes the properties into a Java ``HashMap`` of capacity 128, and writes them in its order. That order can be
computed (:func:`commitmq.format.java.hash_map_order`); the kernel ``readdress`` has the same rule for bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from commitmq.format.constants import Host, SysFlag
from commitmq.format.java import hash_map_order
from commitmq.format.properties import BROKER_BUCKETS, CLIENT_BUCKETS
from commitmq.format.record import Record


def java_order(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The iteration order of a ``HashMap`` of capacity 128 to which ``pairs`` were put in this order.

    A name that is put again keeps its place and takes the new value.
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
