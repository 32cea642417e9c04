"""Acks that the timer has not delivered yet, found where they wait.

A revive round judges a check point by the acks in the revive queue. After a long stop everything is overdue, and the timer may
have delivered a check point and not yet its acks. So the acks of an unknown check point are looked for in the timer topic too:
RocketMQ would bring such a message back although it was acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from commitmq.errors import CorruptRecordError, InvalidMessageError, OffsetOutOfRangeError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.semantics.pop_revive import ACK_TAG, BATCH_ACK_TAG, Ack, CheckPointKey
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.workers.reader.places import Places

_CODES: Final = np.array([java_string_hash(ACK_TAG), java_string_hash(BATCH_ACK_TAG)], np.int64)
_UNITS: Final = 2_000
_MOST: Final = 500_000
TURN_S: Final = 0.05
_SLACK_MS: Final = 60_000
"""An ack is stored after its messages were received. The clock may have been set back by so much in between."""


class AckSearch:
    """The acks of the timer topic that were found so far, by check point; beyond ``most`` the oldest are forgotten.

    It reads what was stored since the oldest check point was received that it was asked for: the check points lie in the
    revive topic behind its committed offset, so this bound outlives every death.
    """

    def __init__(self, places: Places, revive_topic: str, beat: Callable[[], None], *, most: int = _MOST) -> None:
        self._places, self._topic, self._beat, self._most = places, revive_topic, beat, most
        self._acks: dict[CheckPointKey, set[int]] = {}
        self._first = self._next = -1
        """What was read of the timer topic's queue: from the first offset up to the second one."""

    def acked(self, keys: Sequence[CheckPointKey]) -> dict[CheckPointKey, set[int]] | None:
        """The acknowledged offsets of each of these check points; each is asked for once. None: there is more to read, ask
        again in the next turn.
        """
        if keys and not self._has_read(min(key.pop_time for key in keys) - _SLACK_MS):
            return None
        return {key: self._acks.pop(key, set()) for key in keys}

    def _has_read(self, since_ms: int) -> bool:
        """Read what was stored since then, for TURN_S. True when all of it was read."""
        places = self._places
        bound, floor = places.bound(), places.floor(TIMER_TOPIC)
        start = places.queues.offset_by_time(TIMER_TOPIC, 0, since_ms, bound=bound, floor=floor)
        if start is None:
            return True
        if self._first < 0:
            self._first = self._next = start
        until = time.monotonic() + TURN_S
        while True:
            if start < self._first:  # backwards, part by part, so that what was read stays one range
                begin = max(start, self._first - _UNITS)
                at = begin
                while at < self._first and (end := self._read(at, self._first - at, bound, floor)) > at:
                    at = end
                self._first = begin
            else:
                behind = self._next
                self._next = self._read(behind, _UNITS, bound, floor)
                if self._next == behind:
                    return True
            if time.monotonic() >= until:
                return False

    def _read(self, start: int, count: int, bound: int, floor: int) -> int:
        """Take the acks of up to ``count`` messages from ``start`` on. Returns where the next one is, ``start`` at the end."""
        at, units = self._places.queues.units(TIMER_TOPIC, 0, start, count, bound=bound, floor=floor)
        if not len(units):
            return start
        mine = np.isin(units["tags_code"].astype(np.int64), _CODES) & (units["size"].astype(np.int64) > 0)
        for place in units["physical_offset"][mine].tolist():
            self._take(place)
        self._beat()
        return at + len(units)

    def _take(self, place: int) -> None:
        try:
            record = self._places.log.record(place)
            if record.properties.get(Property.REAL_TOPIC) != self._topic:
                return
            ack = Ack.parse(record.body)
        except (CorruptRecordError, OffsetOutOfRangeError, InvalidMessageError):
            return
        self._acks.setdefault(ack.key, set()).update(ack.acked)
        if len(self._acks) > self._most:
            del self._acks[next(iter(self._acks))]
