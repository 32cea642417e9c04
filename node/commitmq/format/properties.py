"""Properties of a record: ``name 0x01 value 0x02`` repeated, in UTF-8 (spec 2.5).

Nothing escapes the two separators, so a name or value that contains one cannot be stored. An empty value cannot be
stored either, because every decoder drops it. Both are refused when encoded and tolerated when decoded, as RocketMQ
does.
"""

from __future__ import annotations

from collections.abc import Mapping

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import MAX_PROPERTIES_BYTES
from commitmq.format.java import hash_map_order

BROKER_BUCKETS = 128
"""HashMap size of all properties that a broker decodes and encodes again; elements of a client batch use 16."""

CLIENT_BUCKETS = 16


def encode_properties(
    properties: Mapping[str, str], *, buckets: int | None = BROKER_BUCKETS, empty_values: bool = False
) -> bytes:
    """Bytes of ``properties``, every pair closed by 0x02; at most 32,767 of them.

    ``buckets`` gives the order a Java HashMap of that size has, for output identical to RocketMQ's; None keeps the
    mapping's own order, which is as valid and faster. ``empty_values`` lets an empty value pass: RocketMQ's recall
    records have one, though no decoder sees it (spec 18). Raises InvalidMessageError for a separator inside a name or
    value, an empty name or value, text that is no Unicode, or too many bytes.
    """
    if not properties:
        return b""
    names = properties if buckets is None else hash_map_order(properties, buckets)
    pairs = []
    for name in names:
        value = properties[name]
        if not name or not (value or empty_values):
            raise InvalidMessageError(f"property {name!r}: neither a property's name nor its value may be empty")
        pairs.append(f"{name}\x01{value}\x02")
    text = "".join(pairs)
    if text.count("\x01") != len(pairs) or text.count("\x02") != len(pairs):
        bad = next(name for name in names if any(mark in name + properties[name] for mark in "\x01\x02"))
        raise InvalidMessageError(
            f"property {bad!r}: the characters 0x01 and 0x02 separate properties, none may have one"
        )
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessageError(f"a property is no valid Unicode: {error}") from error
    if len(data) > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(f"the properties take {len(data)} bytes, at most {MAX_PROPERTIES_BYTES} are allowed")
    return data


def decode_properties(data: bytes | memoryview) -> dict[str, str]:
    """The pairs in ``data`` in their stored order. A segment without name or without value is dropped, a later
    duplicate overwrites the earlier one, the last 0x02 may be missing (spec 2.5). Never raises.
    """
    result: dict[str, str] = {}
    for segment in str(data, "utf-8", "replace").split("\x02"):
        name, _, value = segment.partition("\x01")
        if name and value:
            result[name] = value
    return result
