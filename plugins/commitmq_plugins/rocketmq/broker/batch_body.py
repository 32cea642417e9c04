"""The body of SEND_BATCH_MESSAGE: ``size i4 · magic i4 · crc i4 · flag i4 · body · properties`` a message (spec 2.8)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import ELEMENT_BODY_SIZE_OFFSET

_ELEMENT: Final = struct.Struct(">iiii")
_BODY_AT: Final = ELEMENT_BODY_SIZE_OFFSET + 4
_LEAST: Final = 22


class Element(NamedTuple):
    """One message. ``properties`` end with their separator, unless there are none."""

    flag: int
    body: memoryview
    properties: bytes


def elements(data: bytes | bytearray | memoryview) -> Iterator[Element]:
    """The messages of a batch. Raises InvalidMessageError for one whose sizes are wrong."""
    view, at, number = memoryview(data), 0, 0
    while at < len(view):
        if len(view) - at < _LEAST:
            raise InvalidMessageError(f"message {number} of the batch is cut short")
        size, _, _, flag = _ELEMENT.unpack_from(view, at)
        body_size = int.from_bytes(view[at + _BODY_AT - 4 : at + _BODY_AT], "big", signed=True)
        if not _LEAST <= size <= len(view) - at or not 0 <= body_size <= size - _LEAST:
            raise InvalidMessageError(f"the sizes of message {number} of the batch are wrong")
        start = at + _BODY_AT + body_size
        if int.from_bytes(view[start : start + 2], "big") != size - _LEAST - body_size:
            raise InvalidMessageError(f"the sizes of message {number} of the batch are wrong")
        properties = bytes(view[start + 2 : at + size])
        if properties and properties[-1] != 2:
            properties += b"\x02"
        yield Element(flag, view[at + _BODY_AT : start], properties)
        at, number = at + size, number + 1
