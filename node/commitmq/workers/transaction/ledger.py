"""What is known of the transactions behind the position in the half topic: which have ended, and where one is now.

A half message that is checked goes back to the end of the half topic, so a transaction has several places. The newest one
stands for it; an end may name any of them. The others are found by what all of them share: :func:`key_of`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple, TypeVar

from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.transaction import COMMIT, ROLLBACK, OpBuffer

PASSED: Final = 0
"""The half message was put back or given up: it is no open one any more, and its transaction did not end by it."""
ENDED: Final = -1
"""An op message names it, which does not tell a commit from a rollback."""
_MOST_PAST: Final = 20_000

_T = TypeVar("_T")
Key = tuple[str, str, str, str, int, int]


class Place(NamedTuple):
    """A half message: its offset in the half topic's queue, and its physical offset."""

    offset: int
    physical: int


def key_of(record: Record) -> Key:
    """What all records of one transaction share: half messages, put back or not, and the committed message."""
    properties = record.properties
    topic = properties.get(Property.REAL_TOPIC) or record.topic
    queue = properties.get(Property.REAL_QUEUE_ID) or str(record.queue_id)
    unique = properties.get(Property.UNIQUE_KEY, "")
    group = properties.get(Property.PRODUCER_GROUP, "")
    return topic, queue, group, unique, record.born_timestamp, record.body_crc


class Ledger:
    """The state of all transactions; offsets are those of the half topic's queue. ``ops`` wait for their op message."""

    def __init__(self, half_offset: int, op_offset: int, ops: OpBuffer) -> None:
        self.half_offset = half_offset
        self.op_offset = op_offset
        self.ops = ops
        self.has_rollback = False
        """Whether an op message with a rollback is to be written, which has no other trace in the log."""
        self.decided_before: set[int] = set()
        """Half messages below ``half_offset`` that op messages name."""
        self._ended: dict[int, int] = {}
        self._past: OrderedDict[int, int] = OrderedDict()
        self._past_by_key: OrderedDict[Key, int] = OrderedDict()
        """The ends of transactions that were put back: an end may name any of their places."""
        self._now_at: dict[Key, Place] = {}

    def outcome(self, half: Record) -> int | None:
        """COMMIT, ROLLBACK, ENDED or PASSED for the transaction of ``half``; None while it is open, or forgotten."""
        offset = half.queue_offset
        found = self._ended.get(offset, self._past.get(offset, PASSED))
        if found != PASSED:
            return found
        return self._past_by_key.get(key_of(half), self._ended.get(offset))

    def is_open(self, offset: int) -> bool:
        """Whether the half message at ``offset`` stands for a transaction without an end."""
        return offset >= self.half_offset and offset not in self._ended

    def open_below(self, end: int) -> int:
        """How many half messages below offset ``end`` stand for transactions without an end."""
        return max(0, end - self.half_offset - len(self._ended))

    def newest(self, half: Record) -> Place | None:
        """Where the transaction of ``half`` is now; None when it has ended, or was given up."""
        if self.is_open(half.queue_offset):
            return Place(half.queue_offset, half.physical_offset)
        place = self._now_at.get(key_of(half))
        return place if place is not None and self.is_open(place.offset) else None

    def put_back_from(self, offset: int) -> list[Place]:
        """Open half messages at or behind ``offset`` that were put back, in their order."""
        return sorted(one for one in self._now_at.values() if one.offset >= offset and self.is_open(one.offset))

    def note_end(self, half: Record, place: Place, decision: int) -> None:
        """The transaction of ``half``, now at ``place``, ended: an op message will say so."""
        self._ended[place.offset] = decision
        self.ops.add(place.offset)
        self.has_rollback |= decision == ROLLBACK
        key = key_of(half)
        if self._now_at.pop(key, None) is not None:
            _remember(self._past_by_key, key, decision)

    def note_known_end(self, offset: int) -> None:
        """An op message names ``offset``."""
        if offset < self.half_offset:
            self.decided_before.add(offset)
        else:
            self._ended.setdefault(offset, ENDED)

    def note_passed(self, offset: int, half: Record, renewed: Place | None) -> None:
        """The half message at ``offset`` was put back to ``renewed``, or given up (None)."""
        self._ended[offset] = PASSED
        if renewed is None:
            self._now_at.pop(key_of(half), None)
            _remember(self._past_by_key, key_of(half), PASSED)
        else:
            self._now_at[key_of(half)] = renewed

    def note_superseded(self, offset: int) -> None:
        """The half message at ``offset`` was put back or given up by an earlier process."""
        self._ended[offset] = PASSED

    def note_place(self, half: Record) -> None:
        """``half`` was put back by an earlier process, and stands for its transaction."""
        self._now_at[key_of(half)] = Place(half.queue_offset, half.physical_offset)

    def pass_to(self, half_offset: int, op_offset: int) -> None:
        """Half messages below ``half_offset`` and op messages below ``op_offset`` are dealt with."""
        for offset in range(self.half_offset, half_offset):
            decision = self._ended.pop(offset, None)
            if decision in (COMMIT, ROLLBACK):
                _remember(self._past, offset, decision)
        self.half_offset = max(self.half_offset, half_offset)
        self.op_offset = max(self.op_offset, op_offset)


def _remember(past: OrderedDict[_T, int], what: _T, decision: int) -> None:
    past[what] = decision
    if len(past) > _MOST_PAST:
        past.popitem(last=False)
