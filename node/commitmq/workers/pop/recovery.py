"""What the log says after a death: check points that are not done, where they end, and what came back to its group.

``commitmq/pop.json`` has the position in the log from which all of that is found. A check point is stored before its
messages are delivered, and before the group's offset behind them is committed, so the log knows more than the offsets
do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from commitmq.files.disk import DamagedFileError, set_aside
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX, Property
from commitmq.format.record import decode_record
from commitmq.log import Log
from commitmq.semantics.pop_revive import (
    ACK_TAG,
    BATCH_ACK_TAG,
    CHECK_POINT_TAG,
    REVIVE_TOPIC_PREFIX,
    Ack,
    CheckPoint,
)
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, boundary_before
from commitmq.store.metadata import json_config
from commitmq.workers.pop.points import CheckPoints, OpenCheckPoint
from commitmq.workers.runtime.mover_positions import Trail, shape_of
from commitmq.workers.runtime.run_mover import MovedBefore, is_of_message

_TAGS: Final = frozenset(tag.encode() for tag in (CHECK_POINT_TAG, ACK_TAG, BATCH_ACK_TAG))


class ProgressFile:
    """``commitmq/pop.json``, with earlier positions for a log that is cut
    (:mod:`commitmq.workers.runtime.mover_positions`)."""

    def __init__(self, layout: StoreLayout, log: Log, flushed: Callable[[], int] = lambda: 0) -> None:
        """``flushed``: everything below it is durable now."""
        self._log = log
        self._path = layout.own / "pop.json"
        self._flushed = flushed
        self._trail = Trail()
        self.log: int | None = None
        """What the file says; None without a file."""

    def load(self) -> int | None:
        """Read it. A damaged file is set aside: then the generation before counts, or 0 without one. Raises StoreError
        or OSError for a file that cannot be read now, or not be set aside.
        """
        is_damaged = False
        while True:
            try:
                self.log = self._read()
            except DamagedFileError as error:
                is_damaged, aside = True, set_aside(error.damaged)
                self._log.error("the progress of pop is damaged", error=str(error), kept_as=str(aside))
                continue
            return 0 if is_damaged and self.log is None else self.log

    def _read(self) -> int | None:
        data = json_config.load_table(self._path)
        with shape_of(self._path):
            self._trail = Trail.from_json((data or {}).get("trail"))
            if data is None or (log := int(data["log"])) >= 0:
                return None if data is None else log
            raise ValueError(f"there is no position {log} in a log")

    def store(self, log: int) -> None:
        """Write it. Raises StoreError or OSError."""
        self._trail.note(max(log, self._flushed()), log)
        json_config.persist(self._path, {"log": log, "trail": self._trail.to_json()})
        self.log = log

    def lower(self, place: int) -> bool:
        """The log was cut at ``place``: go back to what was done by then, or to the log's beginning. Whether that was needed.
        Raises StoreError or OSError.
        """
        log = self.load()
        if log is None or max(log, self._trail.end) <= place:
            return False
        self.store(min(int(self._trail.cut(place) or 0), place))
        return True


def came_back(batch: DispatchBatch) -> Any:
    """Which records of a batch may be copies that this process made: those of retry and dead-letter topics."""
    mine = [number for number, name in enumerate(batch.topics) if name.startswith((RETRY_PREFIX, DLQ_PREFIX))]
    return np.isin(batch.rows["topic"], mine)


def read_points(
    log: CommitLog,
    start: int,
    end: int,
    points: CheckPoints,
    beat: Callable[[], None],
    before: MovedBefore,
    floor: Callable[[str], int],
    now_ms: int,
) -> dict[tuple[str, str, int], int]:
    """Find check points and acks in ``[start, end)``, and put those that are not done into ``points``. Returns where the
    check points end, by group, topic and queue. ``before`` learns which messages came back. ``floor``: below which place in
    the log nothing is of a topic, as after one of its name was deleted. From ``now_ms`` on nothing is invisible for longer
    than it was asked for: the check points of a clock that was ahead are of a time to come.
    Where no record begins at ``start``, the beginning of its segment counts.
    """
    before.scan(log, start, end, came_back, beat)
    reading = Reading(points, floor, now_ms)
    walker = LogWalker(log, max_rows=65_536, max_bytes=16 << 20)
    at = boundary_before(log, start, end)
    while at < end:
        batch = walker.walk(at, end)
        for row in np.flatnonzero(_wanted(batch)).tolist():
            _take(batch, row, reading)
        at = batch.end
        beat()
    walker.release()
    return reading.ends


def _wanted(batch: DispatchBatch) -> Any:
    mine = [
        number
        for number, name in enumerate(batch.topics)
        if name == TIMER_TOPIC or name.startswith(REVIVE_TOPIC_PREFIX)
    ]
    return np.isin(batch.rows["topic"], mine)


def _take(batch: DispatchBatch, row: int, reading: Reading) -> None:
    view = batch.record(row)
    first, size = int(batch.rows["tags_start"][row]), int(batch.rows["tags_size"][row])
    tag = bytes(view[first : first + size])
    if tag not in _TAGS:
        return
    try:
        record = decode_record(view)
        waits = record.topic == TIMER_TOPIC
        if waits and not record.properties.get(Property.REAL_TOPIC, "").startswith(REVIVE_TOPIC_PREFIX):
            return
        if tag != CHECK_POINT_TAG.encode():
            reading.ack(Ack.parse(record.body))
        elif waits:  # the copy in the revive topic says nothing new
            place = int(record.properties.get(Property.REAL_QUEUE_ID, "0"))
            reading.check_point(CheckPoint.parse(record.body), place, record.physical_offset)
    except Exception as error:
        if not is_of_message(error):
            raise
        # A revive round reports it.


class Reading:
    """Check points and acks in the order of the log. ``ends``: where the check points end, by group, topic and queue."""

    def __init__(self, points: CheckPoints, floor: Callable[[str], int], now_ms: int) -> None:
        self._points, self._floor, self._now_ms = points, floor, now_ms
        self._holders: dict[tuple[str, str, int], dict[int, OpenCheckPoint]] = {}
        """The check point that has a message in flight, by queue and offset: one at a time."""
        self.ends: dict[tuple[str, str, int], int] = {}

    def ack(self, ack: Ack) -> None:
        """Its messages are done."""
        for offset in ack.acked:
            point = self._points.has(ack.key, offset)
            if point is not None:
                self._settle(point, offset)

    def check_point(self, check_point: CheckPoint, revive_queue: int, physical_offset: int) -> None:
        """A check point, which replaces earlier ones of its messages (extend): their acks may have been lost."""
        key = check_point.key
        known = self._points.by_key.get(key)
        if known is not None:
            if (check_point.rewrites or 0) <= (known.check_point.rewrites or 0):
                return  # the timer put it off
            self._points.drop(known)  # its message could not come back: this is the last one of it
        if physical_offset < self._floor(key.topic):
            return  # the topic was deleted since: its offsets start over
        point = OpenCheckPoint(check_point, revive_queue, b"", physical_offset)
        holders = self._holders.setdefault(point.queue, {})
        offsets = check_point.offsets
        for offset in offsets:
            older = holders.get(offset)
            if older is not None:
                self._settle(older, offset)
            holders[offset] = point
        self._points.add(point, min(check_point.revive_ms, self._now_ms + check_point.invisible_ms))
        if offsets:
            self.ends[point.queue] = max(self.ends.get(point.queue, 0), offsets[-1] + 1)

    def _settle(self, point: OpenCheckPoint, offset: int) -> None:
        self._points.settle(point, offset)
        holders = self._holders[point.queue]
        if holders.get(offset) is point:
            del holders[offset]
