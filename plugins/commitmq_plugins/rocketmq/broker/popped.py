"""The body and the texts of an answer to POP_MESSAGE (remoting 5.3).

A plain record goes out as it is stored; the client makes its receipt handle from the texts. A record of a retry topic is made
anew: with the topic that was asked for and with its handle as the property POP_CK. So is a record of a queue from which one
pop got several check points, because the texts have one of each queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from commitmq.format.constants import QUEUE_OFFSET_OFFSET
from commitmq.format.record import decode_record, encode_record
from commitmq.semantics.pop import Delivered, ReceiptHandle, message_offset_info, order_count_info, start_offset_info

Body = list["bytes | bytearray | memoryview"]

_HANDLE: Final = "POP_CK"
_CRC: Final = "__CRC32#"


class Part(NamedTuple):
    """What came from one queue; ``size`` in bytes. ``flag``: of which topic (:func:`commitmq.semantics.pop.topic_of_flag`)."""

    flag: int
    messages: int
    size: int


class Popped:
    """The messages of one answer of the process ``pop``, or of a look without receipt handles."""

    def __init__(self, answer: dict[str, Any], frames: list[bytes]) -> None:
        self.body: Body = []
        self.parts: list[Part] = []
        self.handles: list[tuple[str, str]] = []
        """Topic and receipt handle of each message, as an ack names it."""
        self._answer = answer
        self._queues: dict[tuple[int, int], Delivered] = {}
        self._counts: list[str] = []
        at = 0
        for part in answer["parts"]:
            self._add(part, frames[at : at + part["frames"]])
            at += part["frames"]

    def texts(self) -> dict[str, str]:
        """The fields that say which messages the body has."""
        queues = list(self._queues.values())
        fields = {"startOffsetInfo": start_offset_info(queues), "msgOffsetInfo": message_offset_info(queues)}
        if self._counts:
            fields["orderCountInfo"] = ";".join(self._counts)
        return fields

    def _add(self, part: dict[str, Any], frames: list[bytes]) -> None:
        flag, queue, start = int(part["flag"]), int(part["queue"]), int(part["start_offset"])
        known = self._queues.get((flag, queue))
        made_anew = flag or known is not None
        handle = ReceiptHandle(
            start,
            self._answer["pop_time"],
            self._answer["invisible_ms"],
            self._answer["revive_queue"],
            flag,
            self._answer["broker"],
            queue,
        )
        offsets = []
        for record in (one for frame in frames for one in records_of(frame)):
            offset = queue_offset(record)
            offsets.append(offset)
            text = str(handle._replace(queue_offset=offset))
            self.handles.append((part["topic"], text))
            self.body.append(_with_handle(record, part["topic"], text) if made_anew else record)
        self.parts.append(Part(flag, len(offsets), sum(map(len, frames))))
        before = () if known is None else known.offsets
        first = start if known is None else known.start_offset
        self._queues[flag, queue] = Delivered(flag, queue, first, (*before, *offsets))
        if "counts" in part:
            counts = [(int(offset), int(times)) for offset, times in part["counts"]]
            self._counts.append(order_count_info(flag, queue, counts, len(offsets)))


def records_of(frame: bytes) -> Iterator[memoryview]:
    """The records of a frame."""
    view, at = memoryview(frame), 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        yield view[at : at + size]
        at += size


def queue_offset(record: bytes | memoryview) -> int:
    """The queue offset of a record."""
    return int.from_bytes(record[QUEUE_OFFSET_OFFSET : QUEUE_OFFSET_OFFSET + 8], "big")


def _with_handle(record: memoryview, topic: str, handle: str) -> bytes:
    decoded = decode_record(bytes(record), check_crc=False)
    properties = {name: value for name, value in decoded.properties.items() if name != _CRC}
    properties.setdefault(_HANDLE, handle)
    return encode_record(replace(decoded, topic=topic, properties=properties), buckets=None)
