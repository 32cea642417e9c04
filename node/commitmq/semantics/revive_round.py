"""One pass over a revive queue, as a state machine: which check points are due, with which acks (remoting 5.8).

    round = ReviveRound(committed offset)
    round.take(record)         each record of the queue from round.next_offset on
    round.idle(now_ms)         the queue's end is reached and the timer has nothing overdue
    for point in round.due(now_ms):
                               copy the messages of point.check_point.left() to the retry topic, store one that cannot be
                               copied as check_point.rewritten(…); then round.processed(point)
    commit round.position

The committed offset is that of the last *processed* check point (spec 18), so a pass reads again the acks behind it. An
ack lies behind its check point, because a check point is due a second earlier.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.pop_revive import ACK_TAG, BATCH_ACK_TAG, CHECK_POINT_TAG, Ack, CheckPoint, CheckPointKey

QUIET_MS: Final = 3_000
"""A queue without anything new counts as read up to now when its newest delivery is so long ago."""
_FAR_MS: Final = 60_000  # the two times of a check point are EARLY_MS apart


class DuePoint(NamedTuple):
    """A check point and its offset in the revive queue."""

    offset: int
    check_point: CheckPoint


class ReviveRound:
    """The check points and acks of a revive queue behind ``position``, the offset of the last processed one."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.next_offset = position + 1
        self.newest_ms = 0
        self._points: dict[CheckPointKey, DuePoint] = {}

    def take(self, record: Record) -> None:
        """Take the next record of the queue.

        An ack without its check point changes nothing: its messages were revived or are done. A check point with the
        key of another one takes its place, because it is the other one put off. Raises InvalidMessageError for a body
        that is no check point or ack; the record counts as taken.
        """
        self.next_offset = record.queue_offset + 1
        deliver = record.properties.get(Property.TIMER_DELIVER_MS, "")
        deliver_ms = int(deliver) if deliver.isascii() and deliver.isdigit() else 0
        self.newest_ms = max(self.newest_ms, deliver_ms)
        tag = record.properties.get(Property.TAGS)
        if tag == CHECK_POINT_TAG:
            point = CheckPoint.parse(record.body)
            if deliver_ms and point.revive_ms - deliver_ms > _FAR_MS:
                # It would hold up all others behind it, without an end.
                raise InvalidMessageError(f"the check point at {record.physical_offset} is due {point.revive_ms} ms")
            self._points.pop(point.key, None)  # so that the order stays the queue's
            self._points[point.key] = DuePoint(record.queue_offset, point)
        elif tag in (ACK_TAG, BATCH_ACK_TAG):
            ack = Ack.parse(record.body)
            found = self._points.get(ack.key)
            if found is not None:
                point = found.check_point
                for offset in ack.acked:
                    point = point.acked(offset)
                self._points[ack.key] = found._replace(check_point=point)
        else:
            raise InvalidMessageError(f"the record at {record.physical_offset} is neither check point nor ack: {tag!r}")

    def idle(self, now_ms: int) -> None:
        """Nothing more is in the queue, and the timer delivers nothing that is overdue."""
        if self.newest_ms and now_ms - self.newest_ms > QUIET_MS:
            self.newest_ms = now_ms

    def due(self, now_ms: int) -> list[DuePoint]:
        """The check points to process now, in the queue's order, up to the first that is not due.

        After a clock was set back a delivery later than ``now_ms`` makes nothing due, and a check point of such a time, which
        was delivered a moment before it, holds up nothing.
        """
        newest_ms = min(self.newest_ms, now_ms)
        found = []
        for point in self._points.values():
            if not point.check_point.is_due(newest_ms) and point.check_point.revive_ms <= now_ms + _FAR_MS:
                break
            found.append(point)
        return found

    def processed(self, point: DuePoint) -> None:
        """``point`` is done: its messages are acked, copied, or in a new check point."""
        self._points.pop(point.check_point.key, None)
        self.position = max(self.position, point.offset)

    def waiting(self) -> int:
        """How many check points were taken and not processed."""
        return len(self._points)
