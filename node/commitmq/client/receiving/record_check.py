"""The last check of received records before a program gets them: are they the records that their queue promises?

The node checked every record when it wrote the record and when it recovered the log. Only this check sees later damage: a
device that returns other bytes, or a ConsumeQueue unit that leads to another place. It compares the topic, the queue offsets
and the CRC of the whole record, or the CRC of the body in a record without the other one (spec 2.9).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from commitmq.errors import CorruptRecordError
from commitmq.format.constants import CRC_PROPERTY_BYTES, CRC_PROPERTY_PREFIX, LMQ_PREFIX, MAGIC_V2, SysFlag
from commitmq.format.record import crc32

if TYPE_CHECKING:
    from commitmq.client.receiving.part import Array, RecordBatch

_MASK: Final = 0x7FFFFFFF
_PREFIX: Final = np.frombuffer(CRC_PROPERTY_PREFIX, np.uint8)
_DIGITS: Final = slice(len(CRC_PROPERTY_PREFIX), CRC_PROPERTY_BYTES - 1)
_ALIKE: Final = 8
_SECTOR_BYTES: Final = 512  # as in kernels.codes, which a client does not load
_POWERS: Final = 10 ** np.arange(10, dtype=np.int64)


def check_bytes(part: RecordBatch) -> None:
    """Compare the CRCs of the records of ``part``. Inner batches must not be taken apart yet.

    Raises CorruptRecordError, which names the first damaged record.
    """
    heads = part.heads
    ends: Array = part.positions + heads["size"]
    bodies: Array = part.body_offsets
    starts, stops = bodies.copy(), bodies + heads["body_size"]
    expected = heads["crc"].astype(np.int64) & _MASK
    slots = _bytes_at(part, ends - CRC_PROPERTY_BYTES, CRC_PROPERTY_BYTES)
    digits = slots[:, _DIGITS].astype(np.int64) - ord("0")
    alike = (slots[:, : len(_PREFIX)] == _PREFIX).sum(1) + (slots[:, -1] == 2)
    # A name that is almost the CRC's name is no property of the message. Damage has hit the CRC itself.
    blurred = (alike >= _ALIKE) & (alike < len(_PREFIX) + 1)
    whole = (alike == len(_PREFIX) + 1) & (ends - stops >= CRC_PROPERTY_BYTES + 3)
    starts[whole], stops[whole] = part.positions[whole], ends[whole] - CRC_PROPERTY_BYTES
    # A value with anything but digits is damaged: no CRC is equal to -1.
    numbers = ((digits >= 0) & (digits <= 9)).all(1)
    expected[whole] = np.where(numbers, (digits * _POWERS).sum(1), -1)[whole]
    view = memoryview(part.data)
    found = [crc32(view[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    wrong = np.flatnonzero(((np.array(found, np.int64) & _MASK) != expected) | blurred)
    if not whole.all():
        _check_properties(part, np.flatnonzero(~whole), stops, ends)
    if len(wrong):
        index = int(wrong[0])
        what = (
            "the record does not match its __CRC32#"
            if whole[index] or blurred[index]
            else "the body does not match its CRC"
        )
        raise _corrupt(part, index, what)


def _check_properties(part: RecordBatch, rows: Array, body_ends: Array, ends: Array) -> None:
    """Look for lost sectors in topic and properties of ``rows``, records without a CRC over them, as a recovery does."""
    view = memoryview(part.data)
    wide = part.heads["magic"] == MAGIC_V2
    for index in rows.tolist():
        at, end = int(body_ends[index]), int(ends[index])
        length = 2 if wide[index] else 1
        behind = at + length + int.from_bytes(view[at : at + length], "big")
        properties = bytes(view[behind + 2 : end])
        first = int(part.heads["physical_offset"][index] + behind + 2 - part.positions[index])
        if behind + 2 > end or b"\0" in bytes(view[at + length : behind]) or lacks_sector(properties, first):
            raise _corrupt(part, index, "the topic, or a whole sector of the properties, holds zeros")


def lacks_sector(data: bytes, offset: int) -> bool:
    """Whether ``data``, which begins at physical ``offset``, has only zeros where a sector of the log is.

    A power cut leaves such a sector. The value of a property may have zero bytes, but not a sector full of them.
    """
    if b"\0" not in data:
        return False
    bounds = [0, *range(-offset % _SECTOR_BYTES or _SECTOR_BYTES, len(data), _SECTOR_BYTES), len(data)]
    return any(not any(data[start:stop]) for start, stop in itertools.pairwise(bounds) if start < stop)


def check_places(part: RecordBatch, asked: int, following: int) -> None:
    """Check that the records of ``part`` are of its topic, and that their queue offsets rise within [``asked``,
    ``following``).

    The records of a light message queue are of other topics, so they pass. Raises CorruptRecordError.
    """
    heads = part.heads
    topic = part.topic.encode()
    if not part.topic.startswith(LMQ_PREFIX):
        wide = (heads["magic"] == MAGIC_V2).astype(np.int64)
        ends: Array = part.body_offsets + heads["body_size"]
        found = _bytes_at(part, ends + 1 + wide, len(topic))
        lengths = _bytes_at(part, ends + wide, 1)[:, 0]
        wrong = (found != np.frombuffer(topic, np.uint8)).any(1) | (lengths != len(topic) & 0xFF)
        offsets = heads["queue_offset"]
        # A pull may begin within an inner batch, and the record of the batch has the offset of its first message.
        begins_before = (heads["sys_flag"] & SysFlag.INNER_BATCH) != 0
        wrong |= (offsets >= following) | ((offsets < asked) & ~begins_before)
        wrong[1:] |= offsets[1:] <= offsets[:-1]
        if wrong.any():
            raise _corrupt(part, int(wrong.argmax()), "the queue leads to a record that belongs to another place")


def _bytes_at(part: RecordBatch, places: Array, count: int) -> Array:
    """``count`` bytes from each of ``places`` in the part's buffer, as uint8, in one row for each place."""
    length = len(part.data)
    everywhere: Array = np.ndarray((max(length - count + 1, 1),), f"V{count}", part.data, 0, (1,))
    taken: Array = everywhere[np.clip(places, 0, max(length - count, 0))]
    return taken.view(np.uint8).reshape(len(places), count)


def _corrupt(part: RecordBatch, index: int, what: str) -> CorruptRecordError:
    physical, offset = (int(part.heads[name][index]) for name in ("physical_offset", "queue_offset"))
    return CorruptRecordError(
        f"damage in queue {part.queue_id} of {part.topic!r}: {what}, at physical offset {physical}, queue offset {offset}"
        " (as the record says)",
        offset=physical,
    )
