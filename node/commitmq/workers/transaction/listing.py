"""The list of open transactions, in pages."""

from __future__ import annotations

from typing import Any, Final

from commitmq.coordination import requests
from commitmq.format.constants import Property
from commitmq.semantics.transaction import HALF_TOPIC
from commitmq.workers.transaction.ends import HalfQueues, Head, check_times
from commitmq.workers.transaction.ledger import Ledger

MOST: Final = 256
_READ: Final = 1_024
_MAX_OFFSET: Final = (1 << 63) - 1


def list_open(header: dict[str, Any], queues: HalfQueues, ledger: Ledger, now_ms: int) -> dict[str, Any]:
    """``transactions`` of one page, oldest first, and ``next``, the half offset where the next page begins (null: none)."""
    limit = requests.limit(header, MOST)
    at = max(ledger.half_offset, requests.optional_integer(header, "after", 0, _MAX_OFFSET) or 0)
    _, high = queues.bounds(HALF_TOPIC)
    behind, halves = queues.heads(HALF_TOPIC, at, _READ, lambda offset, _: ledger.is_open(offset))
    shown = halves[:limit]
    following = shown[-1].record.queue_offset + 1 if len(halves) > limit else behind
    is_last = following >= high or behind <= at
    if is_last:  # what a check put back a moment ago is not in the queue yet
        late = [queues.head(place.physical) for place in ledger.put_back_from(high)]
        shown += [half for half in late if half is not None]
    return {
        "transactions": [_described(half, now_ms) for half in shown],
        "next": None if is_last else following,
    }


def _described(head: Head, now_ms: int) -> dict[str, Any]:
    half = head.record
    properties = half.properties
    return {
        "topic": properties.get(Property.REAL_TOPIC, ""),
        "queue": properties.get(Property.REAL_QUEUE_ID, ""),
        "group": properties.get(Property.PRODUCER_GROUP, ""),
        "unique_id": properties.get(Property.UNIQUE_KEY, ""),
        "keys": properties.get(Property.KEYS, ""),
        "tags": properties.get(Property.TAGS, ""),
        "queue_offset": half.queue_offset,
        "physical_offset": half.physical_offset,
        "born": half.born_timestamp,
        "age_ms": now_ms - half.born_timestamp,
        "checks": check_times(half),
        "body_bytes": head.body_bytes,
    }
