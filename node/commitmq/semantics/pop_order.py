"""Ordered pops: which messages of a queue a group has, and when the queue may be popped again (remoting 5.7; spec 18).

A queue with messages that are out and not acked is *blocked* until their invisible time has passed. An ordered pop does
not move the group's offset; the acks do, so what was not acked comes again in its place.

The state is RocketMQ's file ``consumerOrderInfo.json``: ``table{"topic@group": {queue: state}}``. A state has

    a        attemptId of the request; a client that repeats a lost request with it gets the same messages
    cm       bit set of acked messages, by their index in ``o``
    i        invisible time, ms
    l        time of the last pop
    o        the first offset, then the distances of the others from it
    oc       how often messages were delivered before, by offset; absent after a queue's first pop
    ot       times at which messages are visible again after a change, by offset; absent without one
    popTime  the pop's time, which the receipt handles have
    untried  offsets that were given back without having been tried: this delivery does not count. Ours; RocketMQ ignores it
             and counts the delivery. Absent when there are none
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from commitmq.errors import InvalidMessageError

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
    """The last ordered pop of one queue by one group. Offsets are queue offsets, times ms."""

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
        """Whether the last pop, that of ``pop_time``, handed out the message at ``offset``, and it is not acked."""
        return pop_time == self.pop_time and offset in self._out()

    def is_done(self) -> bool:
        """Whether all messages of the last pop are acked."""
        return next(self._out(), None) is None

    def acked_below(self, start: int) -> OrderState:
        """The state when the messages below ``start``, the group's offset, are acked: it was committed, and the state was not
        stored.
        """
        bits = sum(1 << index for index, offset in enumerate(self.offsets) if offset < start)
        return self if bits | self.acked_bits == self.acked_bits else replace(self, acked_bits=self.acked_bits | bits)

    def follows(self, start: int) -> bool:
        """Whether ``start``, the group's offset, is the first message that is not acked. An earlier one was set by a person,
        who wants all messages from there on again.
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
        """This pop, with what the one ``before`` has of messages behind the first: acked ones stay acked, and others that are
        not handed out this time are visible.
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
        """The state when the message at ``offset`` is to be visible again at ``visible_ms``. ``untried``: this delivery does
        not count.
        """
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
