"""The order of a message's properties after RocketMQ's broker has rewritten them (spec 12.1).

The broker decodes the properties into a Java ``HashMap`` of capacity 128, and writes them in its order. That order can be
computed (:func:`commitmq.format.java.hash_map_order`); the kernel ``readdress`` has the same rule for bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from commitmq.format.java import hash_map_order
from commitmq.format.properties import BROKER_BUCKETS


def java_order(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The iteration order of a ``HashMap`` of capacity 128 to which ``pairs`` were put in this order.

    A name that is put again keeps its place and takes the new value.
    """
    values = dict(pairs)
    return [(name, values[name]) for name in hash_map_order(values, BROKER_BUCKETS)]
