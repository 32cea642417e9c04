"""The keys by which the timer finds what it has appended already (:mod:`commitmq.workers.runtime.moved_before`).

A delivered message has two properties more than its source, the times of its enqueuing and dequeuing, and a message that
rolled has another number of rolls. All else is as it was, in another order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from commitmq.format.constants import Property
from commitmq.format.record import parts_of
from commitmq.semantics.retry import UNDELIVERED_TOPIC
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.log.dispatch_batch import DispatchBatch
from commitmq.store.log.readdressing import find
from commitmq.workers.runtime.moved_before import Key, key_of

_TIMES: Final = (Property.TIMER_ENQUEUE_MS.encode() + b"\x01", Property.TIMER_DEQUEUE_MS.encode() + b"\x01")
_ROLLS: Final = Property.TIMER_ROLL_TIMES.encode() + b"\x01"
_ROLLED: Final = b"rolled"


def _normal(record: bytes | memoryview, mark: bytes, *, rolls: int = 0) -> Key:
    kept, text = key_of(record)
    pairs = [pair for pair in text.split(b"\x02") if pair and not pair.startswith(_TIMES)]
    if rolls:
        texts = [pair[len(_ROLLS) :] for pair in pairs if pair.startswith(_ROLLS)]
        times = [int(text) for text in texts if text.isdigit() and len(text) < 10]  # (it may be a client's own text)
        pairs = [pair for pair in pairs if not pair.startswith(_ROLLS)]
        pairs.append(_ROLLS + b"%d" % (sum(times) + rolls))
    return mark + kept, b"\x02".join(sorted(pairs))


def delivered_key(record: bytes | memoryview) -> Key:
    """Of a message that is to be delivered."""
    return _normal(record, b"")


def rolled_key(record: bytes | memoryview) -> Key:
    """Of a message that is to go round again."""
    return _normal(record, _ROLLED, rolls=1)


def copy_key(record: bytes | memoryview) -> Key:
    """Of a delivered message, or of one that rolled: its topic tells."""
    data = bytes(record)
    return _normal(data, _ROLLED if _topic(data) == TIMER_TOPIC.encode() else b"")


def _topic(record: bytes) -> bytes:
    parts = parts_of(record)
    return record[parts.topic : parts.topic + parts.topic_bytes]


def moved_by_timer(batch: DispatchBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which records of a batch may be the timer's: those with the time of a dequeuing, and dead letters."""
    if not len(batch) or batch.log is None:
        return np.zeros(len(batch), np.bool_)
    places = batch.rows["physical_offset"].astype(np.int64)
    base = int(places[0]) - int(places[0]) % batch.log.segment_bytes
    data = np.frombuffer(batch.log.read(base, batch.log.segment_bytes), np.uint8)
    found = find(data, places - base, batch.rows["size"].astype(np.int64), [Property.TIMER_DEQUEUE_MS])
    dead = batch.topics.index(UNDELIVERED_TOPIC) if UNDELIVERED_TOPIC in batch.topics else -1
    moved: np.ndarray[Any, np.dtype[np.bool_]] = (found.lengths[0] > 0) | (batch.rows["topic"] == dead)
    return moved
