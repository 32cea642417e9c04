"""The mark of an idempotent producer in a record: the property ``__PSEQ__``, directly before ``__CRC32#``.

    __PSEQ__ 0x01 ID ":" EPOCH ":" SEQUENCE 0x02

    ID        1 to 64 letters, digits and ``._-/@+=``: the producer. No colon, so that the value can be split.
    EPOCH     decimal, 0 to 10^15 - 1, without leading zeros: the producer's life or attempt; the higher one wins
    SEQUENCE  twelve decimal digits: number of the message among those of this producer, epoch, topic and queue, from 0.
              Fixed in width, so that the marks of a run differ in digits only and can be made and checked as columns

The marks make the producers' state derivable from the log alone (:mod:`commitmq.store.producers`).
RocketMQ keeps properties it does not know. The mark's place at the end distinguishes it from a property that was merely
copied into another message.

This module is plain code, because a client that sends single messages needs it.
"""

from __future__ import annotations

import re
from typing import Final

from commitmq.format.constants import Property

MAX_EPOCH: Final = 10**15 - 1
MAX_SEQUENCE: Final = 10**12 - 1
MARK_DIGITS: Final = 12
MAX_ID_CHARACTERS: Final = 64
MAX_MARK_BYTES: Final = 9 + MAX_ID_CHARACTERS + 1 + 15 + 1 + MARK_DIGITS + 1
_ID: Final = re.compile(r"[A-Za-z0-9._/@+=-]{1,64}")
_NAME: Final = Property.PRODUCER_SEQUENCE.encode() + b"\x01"


def is_producer_id(text: object) -> bool:
    """Whether ``text`` can be a producer's id."""
    return type(text) is str and _ID.fullmatch(text) is not None


def mark_prefix(producer_id: str, epoch: int) -> bytes:
    """The mark up to the sequence; both must have been checked."""
    return b"%b%b:%d:" % (_NAME, producer_id.encode(), epoch)


def mark_of(prefix: bytes, sequence: int) -> bytes:
    """A whole mark. ``prefix`` comes from :func:`mark_prefix`; an empty prefix gives no mark."""
    return b"%b%012d\x02" % (prefix, sequence) if prefix else b""


def parse_mark(value: str) -> tuple[str, int, int] | None:
    """Id, epoch and sequence from the property's value; None for any other text."""
    parts = value.split(":")
    if len(parts) != 3 or not is_producer_id(parts[0]) or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return parts[0], int(parts[1]), int(parts[2])
