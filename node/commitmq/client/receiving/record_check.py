"""Whether received records are what their queue promises: the last look at the bytes before a program gets them.

The node checked every record when it was written and when it recovered the log. What became of the bytes since (a device that
returns other ones, a ConsumeQueue unit that leads elsewhere) shows here only: in the topic, in the queue offsets, and in
the CRC that covers the whole record, or where a record has none (spec 2.9), the one of its body.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from commitmq.errors import CorruptRecordError
from commitmq.format.constants import CRC_PROPERTY_BYTES, CRC_PROPERTY_PREFIX, LMQ_PREFIX, MAGIC_V2, SysFlag
from commitmq.format.crc import crc32

if TYPE_CHECKING:
    from commitmq.client.receiving.part import Array, Part

_MASK: Final = 0x7FFFFFFF
_PREFIX: Final = np.frombuffer(CRC_PROPERTY_PREFIX, np.uint8)
_DIGITS: Final = slice(len(CRC_PROPERTY_PREFIX), CRC_PROPERTY_BYTES - 1)
_ALIKE: Final = 8
_SECTOR_BYTES: Final = 512  # kernels.raw has it too, which a client does not load
_POWERS: Final = 10 ** np.arange(10, dtype=np.int64)


def check_bytes(part: Part) -> None:
    """Compare CRCs of the records of ``part``, which must not be taken apart yet.

    Raises CorruptRecordError that names the first record that is damaged.
    """
    heads = part.heads
    ends: Array = part.positions + heads["size"]
    bodies: Array = part.body_offsets
    starts, stops = bodies.copy(), bodies + heads["body_size"]
    expected = heads["crc"].astype(np.int64) & _MASK
    slots = _bytes_at(part, ends - CRC_PROPERTY_BYTES, CRC_PROPERTY_BYTES)
    digits = slots[:, _DIGITS].astype(np.int64) - ord("0")
    alike = (slots[:, : len(_PREFIX)] == _PREFIX).sum(1) + (slots[:, -1] == 2)
    # A name that is almost the CRC's is not a property of the message, but a CRC that was hit itself.
    blurred = (alike >= _ALIKE) & (alike < len(_PREFIX) + 1)
    whole = alike == len(_PREFIX) + 1
    whole &= ((digits >= 0) & (digits <= 9)).all(1) & (ends - stops >= CRC_PROPERTY_BYTES + 3)
    starts[whole], stops[whole] = part.positions[whole], ends[whole] - CRC_PROPERTY_BYTES
    expected[whole] = (digits[whole] * _POWERS).sum(1)
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


def _check_properties(part: Part, rows: Array, body_ends: Array, ends: Array) -> None:
    """Topic and properties of the records ``rows``, which have no CRC over them, lack no sector (as in a recovery)."""
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
    """Whether a sector of the log has nothing but zeros in ``data``, which begins at physical ``offset``.

    A power cut leaves that. A property's value may hold zero bytes, but no sector of them.
    """
    if b"\0" not in data:
        return False
    bounds = [0, *range(-offset % _SECTOR_BYTES or _SECTOR_BYTES, len(data), _SECTOR_BYTES), len(data)]
    return any(not any(data[start:stop]) for start, stop in itertools.pairwise(bounds) if start < stop)


def check_places(part: Part, asked: int, following: int) -> None:
    """Check that the records of ``part`` are of its topic, and their queue offsets rise within [``asked``, ``following``).

    Not for light message queues, whose records are of other topics. Raises CorruptRecordError.
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
        # A pull may begin inside a batch, whose record has the offset of its first message.
        begins_before = (heads["sys_flag"] & SysFlag.INNER_BATCH) != 0
        wrong |= (offsets >= following) | ((offsets < asked) & ~begins_before)
        wrong[1:] |= offsets[1:] <= offsets[:-1]
        if wrong.any():
            raise _corrupt(part, int(wrong.argmax()), "its queue leads to a record of another place")


def _bytes_at(part: Part, places: Array, count: int) -> Array:
    """``count`` bytes from each of ``places`` of the part's buffer: uint8, one row each."""
    length = len(part.data)
    everywhere: Array = np.ndarray((max(length - count + 1, 1),), f"V{count}", part.data, 0, (1,))
    taken: Array = everywhere[np.clip(places, 0, max(length - count, 0))]
    return taken.view(np.uint8).reshape(len(places), count)


def _corrupt(part: Part, index: int, what: str) -> CorruptRecordError:
    physical, offset = (int(part.heads[name][index]) for name in ("physical_offset", "queue_offset"))
    return CorruptRecordError(
        f"damage in queue {part.queue_id} of {part.topic!r}: {what}, at physical offset {physical}, queue offset {offset}"
        " (as the record says)",
        offset=physical,
    )
