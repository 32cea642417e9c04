"""Messages read through a light message queue (LMQ, spec 3.10): records of other topics, numbered anew.

A record names its LMQs and its offset in each of them in ``INNER_MULTI_DISPATCH`` and ``INNER_MULTI_QUEUE_OFFSET``. A reader
of an LMQ sees the name of the LMQ as topic, queue 0 and the offset there, so that positions, commits and seeks work as
everywhere. ``Message.origin_topic`` is the topic to which the message was sent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from commitmq.client.receiving.part import Array, Part
from commitmq.errors import CorruptRecordError
from commitmq.format.constants import LMQ_PREFIX, MAGIC_V2, MULTI_DISPATCH_SEPARATOR, Property
from commitmq.format.properties import decode_properties


def is_light(topic: str) -> bool:
    """True for an LMQ's name."""
    return topic.startswith(LMQ_PREFIX)


def renumber(part: Part) -> Part:
    """``part``, read through the LMQ ``part.topic``, with the LMQ's numbers. Raises CorruptRecordError."""
    view = memoryview(part.data)
    heads = part.heads.copy()
    body_ends: Array = part.body_offsets + part.heads["body_size"]
    starts: list[int] = []
    topics: list[str] = []
    offsets: list[int] = []
    rows = zip(
        body_ends.tolist(),
        (part.positions + part.heads["size"]).tolist(),
        (part.heads["magic"] == MAGIC_V2).tolist(),
        strict=True,
    )
    for at, end, wide in rows:
        size = int.from_bytes(view[at : at + 1 + wide])
        at += 1 + wide
        topics.append(str(view[at : at + size], "utf-8", "replace"))
        at += size + 2
        starts.append(at)
        offsets.append(_offset_in(part.topic, decode_properties(view[at:end])))
    heads["queue_offset"] = offsets
    heads["queue_id"] = part.queue_id
    return replace(part, heads=heads, property_starts=np.array(starts, np.int64), origins=topics)


def _offset_in(name: str, properties: dict[str, str]) -> int:
    names = properties.get(Property.INNER_MULTI_DISPATCH, "").split(MULTI_DISPATCH_SEPARATOR)
    offsets = properties.get(Property.INNER_MULTI_QUEUE_OFFSET, "").split(MULTI_DISPATCH_SEPARATOR)
    try:
        return int(offsets[names.index(name)])
    except (ValueError, IndexError):
        raise CorruptRecordError(f"a record in {name} does not say that it is there") from None
