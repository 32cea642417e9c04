"""Acks that the timer has not delivered yet, found where they wait.

A revive round judges a check point by the acks in the revive queue. After a long stop everything is overdue, and the timer may
have delivered a check point and not yet its acks. So the acks of an unknown check point are looked for in the timer topic too:
RocketMQ would bring such a message back although it was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from commitmq.errors import CorruptRecordError, InvalidMessageError, OffsetOutOfRangeError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.semantics.pop_revive import ACK_TAG, BATCH_ACK_TAG, Ack, CheckPointKey
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.workers.reader.places import Places

_CODES: Final = np.array([java_string_hash(ACK_TAG), java_string_hash(BATCH_ACK_TAG)], np.int64)
_UNITS: Final = 50_000
_MOST: Final = 500_000


class AckSearch:
    """The acks of the timer topic that were found so far, by check point; beyond ``most`` the oldest are forgotten."""

    def __init__(self, places: Places, revive_topic: str, beat: Callable[[], None], *, most: int = _MOST) -> None:
        self._places, self._topic, self._beat, self._most = places, revive_topic, beat, most
        self._acks: dict[CheckPointKey, set[int]] = {}
        self._next = 0

    def acked(self, keys: Iterable[CheckPointKey]) -> dict[CheckPointKey, set[int]]:
        """The acknowledged offsets of each of these check points; each is asked for once."""
        self._read_on()
        return {key: self._acks.pop(key, set()) for key in keys}

    def _read_on(self) -> None:
        places = self._places
        bound, floor = places.bound(), places.floor(TIMER_TOPIC)
        while True:
            at, units = places.queues.units(TIMER_TOPIC, 0, self._next, _UNITS, bound=bound, floor=floor)
            if not len(units):
                return
            self._next = at + len(units)
            mine = np.isin(units["tags_code"].astype(np.int64), _CODES) & (units["size"].astype(np.int64) > 0)
            for place in units["physical_offset"][mine].tolist():
                self._take(place)
            self._beat()

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
