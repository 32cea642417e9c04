"""Sharing a queue, RocketMQ's POP: receipt handles, the strings of an answer, retry topics, and the state of ordered pops
(spec 12.6, 18; remoting 5.2 to 5.5, 5.7).

A pop hands messages to one consumer for a time, the *invisible time*. The consumer acks each by its receipt handle;
what it does not ack comes again. :mod:`commitmq.semantics.pop_revive` has what the broker stores for that.

The retry topic of a group and a topic has one of RocketMQ's two forms: ``%RETRY%group_topic``, or ``%RETRY%group+topic``, with
which no two groups have one retry topic. RocketMQ's settings are enableRetryTopicV2 and retrieveMessageFromPopRetryTopicV1. A
message of a retry topic that comes back again stays there, in whichever form.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from commitmq.errors import InvalidMessageError
from commitmq.semantics.retry import is_pop_retry_v2, is_retry_topic, pop_retry_topic


class _RetrySettings(Protocol):
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
    def of(cls, config: _RetrySettings) -> RetryNames:
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

        With an even one RocketMQ looks into the first form only, with an odd one into the second form only. A pop here
        continues to the other one when it has found nothing, for a receive that waits is not woken again for what is
        there already.
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
    """The proof of one delivery: what the property POP_CK and ``extraInfo`` of a request hold. The check point is named
    by ``start_offset``, ``pop_time`` and queue; ``queue_offset`` is the message, None in the short form. Times are ms.
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
    """orderCountInfo of one queue: ``counts`` are (offset, times delivered before) of the messages that come again. An
    entry for the queue closes it, for old clients: the lowest count, 0 with a new one among the ``messages``.
    """
    parts = [f"{flag} qo{queue_id}%{offset} {count}" for offset, count in counts]
    lowest = min((count for _, count in counts), default=0) if len(counts) == messages else 0
    return ";".join([*parts, f"{flag} {queue_id} {lowest}"])


def parse_info(text: str) -> dict[str, str]:
    """The entries of one of the three strings: ``flag@queue`` to the third part. Raises InvalidMessageError for an
    entry that has not three parts, and for a key that comes twice.
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


MOST_OFFSETS: Final = 64
"""RocketMQ's bit set of acked messages is a long."""
FORGET_AFTER_MS: Final = 24 * 3_600_000
"""RocketMQ drops the state of a queue that was not popped for so long."""


class OrderAck(Enum):
    """The result of an ack that committed nothing."""

    ILLEGAL = -1
    """The pop did not hand out this offset."""
    IGNORED = -2
    """The ack belongs to an earlier pop."""


@dataclass(frozen=True, slots=True)
class OrderState:
    """Ordered pops: which messages of a queue a group has, and when the queue may be popped again.

    A queue with messages that are out and not acked is *blocked* until their invisible time has passed. An ordered pop
    does not move the group's offset; the acks do, so what was not acked comes again in its place.

    The state is RocketMQ's file ``consumerOrderInfo.json``: ``table{"topic@group": {queue: state}}``. A state has

    a attemptId of the request; a client that repeats a lost request with it gets the same messages cm bit set of acked
    messages, by their index in ``o`` i invisible time, ms l time of the last pop o the first offset, then the distances
    of the others from it oc how often messages were delivered before, by offset; absent after a queue's first pop ot
    times at which messages are visible again after a change, by offset; absent without one popTime the pop's time,
    which the receipt handles have untried offsets that were returned without having been tried: this delivery does not
    count. Ours; RocketMQ ignores it and counts the delivery. Absent when there are none

    The last ordered pop of one queue by one group. Offsets are queue offsets, times ms.
    """

    pop_time: int
    invisible_ms: int
    offsets: tuple[int, ...]
    last_pop_ms: int
    acked_bits: int = 0
    attempt_id: str | None = None
    visible_ms: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[int, int] | None = None
    untried: frozenset[int] = frozenset()

    def is_blocked(self, now_ms: int, attempt_id: str | None = None) -> bool:
        """Whether the queue may not be popped now; a repeated request with the same ``attempt_id`` may."""
        if self.attempt_id is not None and self.attempt_id == attempt_id:
            return False
        return any(now_ms < self._visible_at(offset) for offset in self._out())

    def free_at(self, now_ms: int) -> int:
        """When the queue is free; ``now_ms`` when it is already."""
        return max((self._visible_at(offset) for offset in self._out()), default=now_ms)

    def popped(
        self, pop_time: int, invisible_ms: int, offsets: Sequence[int], now_ms: int, attempt_id: str | None = None
    ) -> OrderState:
        """The state after the next pop. Messages that were out before are counted, unless they came back untried; a repeated
        request counts none.
        """
        if self.attempt_id is not None and self.attempt_id == attempt_id:
            counts = dict(self.counts or {})
        else:
            before = self.counts or {}
            again = [offset for offset in offsets if offset in self.offsets]
            times = {offset: before.get(offset, 0) + (offset not in self.untried) for offset in again}
            counts = {offset: count for offset, count in times.items() if count}
        return OrderState(pop_time, invisible_ms, tuple(offsets), now_ms, attempt_id=attempt_id, counts=counts)

    def out_count(self, now_ms: int) -> int:
        """How many messages of the last pop are not acked, and not visible again."""
        return sum(now_ms < self._visible_at(offset) for offset in self._out())

    def is_out(self, offset: int, pop_time: int) -> bool:
        """Whether the last pop, that of ``pop_time``, delivered the message at ``offset``, and it is not acked."""
        return pop_time == self.pop_time and offset in self._out()

    def is_done(self) -> bool:
        """Whether all messages of the last pop are acked."""
        return next(self._out(), None) is None

    def acked_below(self, start: int) -> OrderState:
        """The state when the messages below ``start``, the group's committed offset, are acked."""
        bits = sum(1 << index for index, offset in enumerate(self.offsets) if offset < start)
        return self if bits | self.acked_bits == self.acked_bits else replace(self, acked_bits=self.acked_bits | bits)

    def follows(self, start: int) -> bool:
        """Whether ``start``, the group's offset, is the first message that is not acked. An earlier one was set by an
        operator, who wants all messages from there on again.
        """
        return next(self._out(), None) == start

    def room(self, start: int) -> int:
        """How many messages behind the last one a pop from ``start`` on may hand out."""
        return MOST_OFFSETS - sum(offset >= start for offset in self.offsets)

    def passes_over(self, offset: int, start: int) -> bool:
        """Whether a pop from ``start`` on does not hand out the message at ``offset`` again: it was acked behind a gap.
        RocketMQ hands it out again.
        """
        return self.follows(start) and start < offset <= self.offsets[-1] and offset not in self._out()

    def keeping(self, before: OrderState) -> OrderState:
        """This pop, with what the one ``before`` has of messages behind the first: acked ones stay acked, and others
        that are not delivered this time are visible.
        """
        more = [offset for offset in before.offsets if offset > self.offsets[0] and offset not in self.offsets]
        if not more:
            return self
        offsets = tuple(sorted((*self.offsets, *more)))
        out = frozenset(before._out())
        old = before.counts or {}
        counts = {offset: old[offset] for offset in more if offset in out and offset in old}
        return replace(
            self,
            offsets=offsets,
            acked_bits=sum(1 << index for index, one in enumerate(offsets) if one in more and one not in out),
            visible_ms={offset: 0 for offset in more if offset in out},
            counts={**(self.counts or {}), **counts},
            untried=before.untried.intersection(more),
        )

    def acked(self, offset: int, pop_time: int) -> tuple[OrderState, int | OrderAck]:
        """(the state after an ack, the offset to commit or why there is none)."""
        if not self.offsets:
            return self, OrderAck.ILLEGAL
        if pop_time != self.pop_time:
            return self, OrderAck.IGNORED
        if offset not in self.offsets:
            return self, OrderAck.ILLEGAL
        state = replace(self, acked_bits=self.acked_bits | 1 << self.offsets.index(offset))
        return state, state.next_offset()

    def changed(self, offset: int, pop_time: int, visible_ms: int, *, untried: bool = False) -> OrderState:
        """The message at ``offset`` is visible again at ``visible_ms``; ``untried``: this delivery does not count."""
        if pop_time != self.pop_time:
            return self
        now_untried = self.untried | {offset} if untried else self.untried - {offset}
        return replace(self, visible_ms={**self.visible_ms, offset: visible_ms}, untried=now_untried)

    def next_offset(self) -> int:
        """The group's offset: the first message that is not acked, or the one behind the last."""
        return next(self._out(), self.offsets[-1] + 1)

    def repeated(self) -> list[tuple[int, int]]:
        """(offset, times delivered before) of the messages that came again: for orderCountInfo."""
        return list((self.counts or {}).items())

    def to_json(self) -> dict[str, Any]:
        """The state as RocketMQ's file has it; integer keys stay integers."""
        first = self.offsets[0] if self.offsets else 0
        values: dict[str, Any] = {} if self.attempt_id is None else {"a": self.attempt_id}
        values["cm"] = self.acked_bits - (1 << 64) if self.acked_bits >> 63 else self.acked_bits
        values["i"] = self.invisible_ms
        values["l"] = self.last_pop_ms
        values["o"] = [first, *(offset - first for offset in self.offsets[1:])] if self.offsets else []
        if self.counts is not None:
            values["oc"] = dict(self.counts)
        if self.visible_ms:
            values["ot"] = dict(self.visible_ms)
        values["popTime"] = self.pop_time
        if self.untried:
            values["untried"] = sorted(self.untried)
        return values

    @classmethod
    def from_json(cls, values: Any) -> OrderState:
        """Inverse of :meth:`to_json`; integer keys may be text. Raises InvalidMessageError."""
        try:
            distances = [int(one) for one in values.get("o") or ()]
            offsets = tuple(distances[:1] + [distances[0] + one for one in distances[1:]])
            counts = values.get("oc")
            return cls(
                int(values.get("popTime", 0)),
                int(values.get("i") or 0),
                offsets,
                int(values.get("l", 0)),
                int(values.get("cm", 0)) & (1 << 64) - 1,
                values.get("a"),
                {int(offset): int(time) for offset, time in (values.get("ot") or {}).items()},
                None if counts is None else {int(offset): int(count) for offset, count in counts.items()},
                frozenset(int(offset) for offset in values.get("untried") or ()),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidMessageError(f"no state of an ordered pop: {values!r}") from error

    def _out(self) -> Iterator[int]:
        return (offset for index, offset in enumerate(self.offsets) if not self.acked_bits >> index & 1)

    def _visible_at(self, offset: int) -> int:
        return self.visible_ms.get(offset, self.pop_time + self.invisible_ms)


def first_pop(
    pop_time: int, invisible_ms: int, offsets: Sequence[int], now_ms: int, attempt_id: str | None = None
) -> OrderState:
    """The state after a queue's first pop."""
    return OrderState(pop_time, invisible_ms, tuple(offsets), now_ms, attempt_id=attempt_id)


def table_to_json(table: Mapping[tuple[str, str], Mapping[int, OrderState]]) -> dict[str, Any]:
    """The content of ``consumerOrderInfo.json``; ``table`` has (topic, group) and the queues' states."""
    return file_content(
        {
            f"{topic}@{group}": {queue: state.to_json() for queue, state in queues.items()}
            for (topic, group), queues in table.items()
        }
    )


def file_content(table: Any) -> dict[str, Any]:
    """The content of ``consumerOrderInfo.json`` with this member ``table``."""
    return {"orderedConsumptionLevel": "QUEUE", "table": table}


def table_from_json(content: Any) -> dict[tuple[str, str], dict[int, OrderState]]:
    """Inverse of :func:`table_to_json`. Raises InvalidMessageError; an entry whose key has no group is dropped."""
    if not isinstance(content, dict):
        raise InvalidMessageError("consumerOrderInfo.json holds no object")
    found: dict[tuple[str, str], dict[int, OrderState]] = {}
    for key, queues in (content.get("table") or {}).items():
        topic, at, group = str(key).partition("@")
        if at and "@" not in group:
            found[topic, group] = {int(queue): OrderState.from_json(state) for queue, state in queues.items()}
    return found
