"""The body of a client batch: several messages of one topic and queue in one request or inner batch (spec 2.8).

Per message: totalSize i4, magic i4 (0), bodyCRC i4 (0), flag i4, bodyLength i4, body, propertiesLength i2, properties.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from commitmq.errors import CorruptRecordError, InvalidMessageError
from commitmq.format.constants import ELEMENT_BYTES, MAX_PROPERTIES_BYTES
from commitmq.format.properties import decode_properties

_HEAD: Final = struct.Struct(">iiiii")
_SHORT: Final = struct.Struct(">h")


@dataclass(frozen=True, slots=True)
class BatchElement:
    """One message of a client batch; ``properties`` stay encoded: they are stored as the client sent them."""

    body: bytes
    properties: bytes = b""
    flag: int = 0

    def decoded_properties(self) -> dict[str, str]:
        return decode_properties(self.properties)


def encode_client_batch(elements: Iterable[BatchElement]) -> bytes:
    """The batch body. Raises InvalidMessageError for properties over 32,767 bytes."""
    parts = []
    for element in elements:
        if len(element.properties) > MAX_PROPERTIES_BYTES:
            raise InvalidMessageError(
                f"the properties take {len(element.properties)} bytes, at most {MAX_PROPERTIES_BYTES} are allowed"
            )
        total = ELEMENT_BYTES + len(element.body) + len(element.properties)
        parts.append(_HEAD.pack(total, 0, 0, element.flag, len(element.body)))
        parts.append(element.body)
        parts.append(_SHORT.pack(len(element.properties)))
        parts.append(element.properties)
    return b"".join(parts)


def decode_client_batch(data: bytes | memoryview) -> list[BatchElement]:
    """The elements of a batch body. Magic and CRC are ignored, as RocketMQ does. Raises CorruptRecordError with the
    position within ``data`` when the lengths do not add up.
    """
    view = memoryview(data)
    elements = []
    at = 0
    while at < len(view):
        if len(view) - at < ELEMENT_BYTES:
            raise _corrupt(at, f"{len(view) - at} bytes are left, an element has {ELEMENT_BYTES} and more")
        total, _, _, flag, body_bytes = _HEAD.unpack_from(view, at)
        if not ELEMENT_BYTES <= total <= len(view) - at:
            raise _corrupt(at, f"the element claims {total} bytes, {len(view) - at} are left")
        if not 0 <= body_bytes <= total - ELEMENT_BYTES:
            raise _corrupt(at, f"the body claims {body_bytes} bytes of an element of {total}")
        body_at = at + _HEAD.size
        properties_at = body_at + body_bytes + 2
        properties_bytes = _SHORT.unpack_from(view, body_at + body_bytes)[0]
        if properties_at + properties_bytes != at + total:
            raise _corrupt(at, f"the properties claim {properties_bytes} bytes, {at + total - properties_at} are left")
        elements.append(
            BatchElement(bytes(view[body_at : body_at + body_bytes]), bytes(view[properties_at : at + total]), flag)
        )
        at += total
    return elements


def _corrupt(at: int, reason: str) -> CorruptRecordError:
    error = CorruptRecordError(f"client batch, byte {at}: {reason}")
    error.offset = at
    return error
