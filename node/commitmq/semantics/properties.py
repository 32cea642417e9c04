"""The order in which a broker stores the properties that it decoded and encodes again (spec 2.5)."""

from __future__ import annotations

from collections.abc import Iterable

from commitmq.format.java import hash_map_order
from commitmq.format.properties import BROKER_BUCKETS


def java_order(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """``pairs`` in the order of a Java HashMap of 128 buckets to which they were put one after the other."""
    values = dict(pairs)
    return [(name, values[name]) for name in hash_map_order(values, BROKER_BUCKETS)]
