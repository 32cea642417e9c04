"""Sharing a queue, RocketMQ's POP: receipt handles and the strings of an answer (spec 12.6; remoting 5.2 to 5.5).

A pop hands messages to one consumer for a time, the *invisible time*. The consumer acks each by its receipt handle;
what it does not ack comes again. :mod:`commitmq.semantics.pop_revive` has what the broker stores for that,
:mod:`commitmq.semantics.pop_order` the state of ordered pops.

Which retry topics a group has when it pops a topic (remoting 5.2): RocketMQ's two forms of their name.

``%RETRY%group_topic`` is the first form, ``%RETRY%group+topic`` the second, with which no two groups have one retry topic.
RocketMQ's settings are enableRetryTopicV2 and retrieveMessageFromPopRetryTopicV1. A message of a retry topic that comes back
again stays there, in whichever form.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from commitmq.errors import InvalidMessageError
from commitmq.semantics.retry import is_pop_retry_v2, is_retry_topic, pop_retry_topic


class _Settings(Protocol):
    """Those of the section ``[pop]``."""

    @property
    def retry_topics_v2(self) -> bool: ...
    @property
    def read_retry_topics_v1(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RetryNames:
    """``v2``: messages come back into topics of the second form. ``reads_v1``: those of the first form are read then too."""

    v2: bool = False
    reads_v1: bool = True

    @classmethod
    def of(cls, config: _Settings) -> RetryNames:
        return cls(config.retry_topics_v2, config.read_retry_topics_v1)

    def written(self, topic: str, group: str) -> str:
        """Where a message of ``topic`` comes back to ``group``."""
        return pop_retry_topic(topic, group, v2=self.v2)

    def read(self, topic: str, group: str) -> tuple[str, ...]:
        """Where a pop of ``topic`` may find messages that came back."""
        written = self.written(topic, group)
        return (written, pop_retry_topic(topic, group)) if self.v2 and self.reads_v1 else (written,)

    def in_turn(self, topic: str, group: str, lot: int) -> tuple[str, ...]:
        """The topics of :meth:`read` in the order in which a pop with ``lot``, of 0 to 99, looks into them.

        With an even one RocketMQ looks into the first form only, with an odd one into the second form only. A pop here goes on
        to the other one when it has found nothing, for a receive that waits is not woken again for what is there already.
        """
        names = self.read(topic, group)
        return names if lot % 2 else names[::-1]


USUAL_NAMES: Final = RetryNames()
"""RocketMQ's default: the first form only."""


ORDERED_REVIVE_QUEUE: Final = 999
"""reviveQid of an ordered pop: nothing is revived, the queue waits."""
_MOST_DIGITS: Final = 19
MAX_MESSAGES: Final = 32
NORMAL, RETRY_V1, RETRY_V2 = 0, 1, 2


def retry_flag(topic: str) -> int:
    """0 for a normal topic, 1 and 2 for a retry topic of the first and second form."""
    if is_pop_retry_v2(topic):
        return RETRY_V2
    return RETRY_V1 if is_retry_topic(topic) else NORMAL


def topic_of_flag(topic: str, group: str, flag: int) -> str:
    """The topic that really holds a message which ``group`` popped from ``topic``."""
    return topic if flag == NORMAL else pop_retry_topic(topic, group, v2=flag == RETRY_V2)


# ---------------------------------------------------------------- receipt handle


class ReceiptHandle(NamedTuple):
    """The proof of one delivery: what the property POP_CK and ``extraInfo`` of a request hold.

    The check point is named by ``start_offset``, ``pop_time`` and queue; ``queue_offset`` is the message, None in the
    short form. Times are ms.
    """

    start_offset: int
    pop_time: int
    invisible_ms: int
    revive_queue: int
    flag: int
    broker_name: str
    queue_id: int
    queue_offset: int | None = None

    def __str__(self) -> str:
        """RocketMQ's text: 8 parts, or 7, separated by blanks."""
        return " ".join(str(part) for part in self if part is not None)

    @classmethod
    def parse(cls, text: str) -> ReceiptHandle:
        """Inverse of ``str``. Raises InvalidMessageError for text that is no receipt handle."""
        parts = text.split(" ")
        if len(parts) not in (7, 8):
            raise InvalidMessageError(f"a receipt handle has 7 or 8 parts, not {len(parts)}: {text!r}")
        try:
            numbers = [_integer(part) for index, part in enumerate(parts) if index != 5]
        except ValueError as error:
            raise InvalidMessageError(f"a part of the receipt handle is no number: {text!r}") from error
        start, pop_time, invisible_ms, revive_queue, flag, queue_id, *offset = numbers
        if flag not in (NORMAL, RETRY_V1, RETRY_V2) or not parts[5]:
            raise InvalidMessageError(f"no receipt handle: {text!r}")
        return cls(start, pop_time, invisible_ms, revive_queue, flag, parts[5], queue_id, *offset[:1])

    @property
    def is_ordered(self) -> bool:
        """Whether the message was popped in order."""
        return self.revive_queue == ORDERED_REVIVE_QUEUE

    @property
    def expires_ms(self) -> int:
        """When the delivery ends in the consumer's eyes."""
        return self.pop_time + self.invisible_ms

    def topic(self, popped: str, group: str) -> str:
        """The topic that holds the message, when ``group`` popped ``popped``."""
        return topic_of_flag(popped, group, self.flag)

    def changed(self, pop_time: int, invisible_ms: int) -> ReceiptHandle:
        """The handle after a change of the invisible time: of a check point that has this message only."""
        offset = self.start_offset if self.queue_offset is None else self.queue_offset
        return self._replace(start_offset=offset, pop_time=pop_time, invisible_ms=invisible_ms, queue_offset=offset)


# ---------------------------------------------------------------- the strings of an answer


class Delivered(NamedTuple):
    """The messages of one queue in an answer: ``start_offset`` is where the queue was read from."""

    flag: int
    queue_id: int
    start_offset: int
    offsets: tuple[int, ...]


def start_offset_info(queues: Iterable[Delivered]) -> str:
    """startOffsetInfo: ``flag queue startOffset`` for each queue, joined by semicolons."""
    return ";".join(f"{queue.flag} {queue.queue_id} {queue.start_offset}" for queue in queues)


def message_offset_info(queues: Iterable[Delivered]) -> str:
    """msgOffsetInfo: ``flag queue offset,offset…`` for each queue, joined by semicolons."""
    return ";".join(f"{queue.flag} {queue.queue_id} {','.join(map(str, queue.offsets))}" for queue in queues)


def order_count_info(flag: int, queue_id: int, counts: Sequence[tuple[int, int]], messages: int) -> str:
    """orderCountInfo of one queue: ``counts`` are (offset, times delivered before) of the messages that come again.

    An entry for the queue closes it, for old clients: the lowest count, 0 with a new one among the ``messages``.
    """
    parts = [f"{flag} qo{queue_id}%{offset} {count}" for offset, count in counts]
    lowest = min((count for _, count in counts), default=0) if len(counts) == messages else 0
    return ";".join([*parts, f"{flag} {queue_id} {lowest}"])


def parse_info(text: str) -> dict[str, str]:
    """The entries of one of the three strings: ``flag@queue`` to the third part.

    Raises InvalidMessageError for an entry that has not three parts, and for a key that comes twice.
    """
    found: dict[str, str] = {}
    for entry in text.split(";") if text else []:
        parts = entry.split(" ")
        if len(parts) != 3 or f"{parts[0]}@{parts[1]}" in found:
            raise InvalidMessageError(f"no valid entry in {text!r}: {entry!r}")
        found[f"{parts[0]}@{parts[1]}"] = parts[2]
    return found


def handles(
    queues: Iterable[Delivered], pop_time: int, invisible_ms: int, revive_queue: int, broker_name: str
) -> list[ReceiptHandle]:
    """The receipt handles of an answer, queue by queue, in the order of the messages."""
    return [
        ReceiptHandle(
            queue.start_offset, pop_time, invisible_ms, revive_queue, queue.flag, broker_name, queue.queue_id, offset
        )
        for queue in queues
        for offset in queue.offsets
    ]


# ---------------------------------------------------------------- batch acks


def encode_bits(offsets: Iterable[int], start_offset: int) -> str:
    """``b`` of a batch ack: bit i acks ``start_offset`` + i; little-endian bytes in Base64."""
    bits = 0
    for offset in offsets:
        if offset < start_offset:
            raise InvalidMessageError(f"offset {offset} lies before the batch's first, {start_offset}")
        bits |= 1 << (offset - start_offset)
    return base64.b64encode(bits.to_bytes((bits.bit_length() + 7) // 8, "little")).decode("ascii")


def decode_bits(text: str, start_offset: int) -> list[int]:
    """Inverse of :func:`encode_bits`. Raises InvalidMessageError for text that is no Base64."""
    try:
        bits = int.from_bytes(base64.b64decode(text, validate=True), "little")
    except (binascii.Error, ValueError) as error:
        raise InvalidMessageError(f"no bit set of a batch ack: {text!r}") from error
    return [start_offset + index for index in range(bits.bit_length()) if bits >> index & 1]


def _integer(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MOST_DIGITS:
        raise ValueError(text)
    return int(text)
