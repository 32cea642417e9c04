"""Brings messages back to their group: copies into the retry topic, or into the dead-letter topic after the last try.

Invariants
    * Not before its time: only what :class:`~commitmq.workers.pop.points.Points` gives as due, what a consumer gave back, and
      what a revive round finds due.
    * Not lost: a message is settled when its copy is flushed, or when its record is gone for good, which is reported.
    * Once (``pop.exactly_once``): what the log had before a death is passed over
      (:mod:`commitmq.workers.runtime.moved_before`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from commitmq import failpoints
from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.format.record import Record
from commitmq.semantics.pop_revive import CheckPoint, checked_topic
from commitmq.workers.pop.records import Records
from commitmq.workers.pop.shares import Shares
from commitmq.workers.reader.places import Places
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.moved_before import MovedBefore
from commitmq.workers.runtime.run_mover import RunMover

_MAX_REPORTS: Final = 16


class Return(NamedTuple):
    """A message that comes back: the one at ``offset`` of ``check_point``. ``dead``: as a dead letter, whatever its tries."""

    check_point: CheckPoint
    offset: int
    dead: bool = False


class Revival:
    """See the module."""

    def __init__(
        self, context: WorkerContext, places: Places, shares: Shares, records: Records, mover: RunMover
    ) -> None:
        self._context = context
        self._places, self._shares, self._records, self._mover = places, shares, records, mover
        self.before = MovedBefore()
        self.came_back = self._left_out = 0

    def copy(self, returns: list[Return]) -> list[bool]:
        """Append the copies. True for each message that is done with, False for one to try again. Raises WriterLost."""
        done = [True] * len(returns)
        made: list[tuple[int, Record]] = []
        for number, one in enumerate(returns):
            try:
                record = self._made(one)
            except ProtocolError as error:  # the coordinator is away, or the topics cannot be made now
                done[number] = False
                self._context.log.warning("a message cannot come back now", why=str(error))
                continue
            if record is not None:
                made.append((number, record))
        if not made:
            return done
        if failpoints.ACTIVE:
            failpoints.hit("pop.before_copy")
        runs = self._records.runs(record for _, record in made)
        for (_, members), put in zip(runs, self._mover.put([run for run, _ in runs]), strict=True):
            for member in members:
                number = made[member][0]
                if not put.code:
                    self.came_back += 1
                elif put.retry or len(members) > 1 or put.code == "TOPIC_NOT_EXIST":
                    done[number] = False
                else:
                    self._report(f"{put.code}: {put.sentence}", returns[number])
        if failpoints.ACTIVE:
            failpoints.hit("pop.after_copy")
        return done

    def passed_over(self, returns: list[Return]) -> list[bool]:
        """Which of them the log had before a death."""
        return [self._is_there(one) for one in returns]

    def _is_there(self, one: Return) -> bool:
        if not len(self.before):
            return False
        record = self._record(one)
        # Whether it was a dead letter depends on a setting that may have changed.
        most = 0 if record is None else record.reconsume_times
        return record is not None and any(
            self.before.pass_over(self._records.encoded(self._records.again(record, one.check_point, limit)))
            for limit in (most + 1, most)
        )

    def _made(self, one: Return) -> Record | None:
        """The copy of a message; None when it is there already, or can have none. Raises ProtocolError."""
        key = one.check_point.key
        topic = checked_topic(one.check_point)
        if self._places.topics.get(topic) is None:
            self._report("its topic was deleted", one)
            return None
        record = self._record(one)
        if record is None:
            self._report("its record has expired", one)
            return None
        if self._is_there(one):
            return None
        most = self._shares.max_retries(key.group, topic)
        return self._records.again(record, one.check_point, 0 if one.dead else most)

    def _record(self, one: Return) -> Record | None:
        key = one.check_point.key
        places = self._places
        bound, floor = places.bound(), places.floor(key.topic)
        at, units = places.queues.units(key.topic, key.queue_id, one.offset, 1, bound=bound, floor=floor)
        if at != one.offset or not len(units) or int(units["physical_offset"][0]) < floor:
            return None
        try:
            return places.log.record(int(units["physical_offset"][0]))
        except (OffsetOutOfRangeError, CorruptRecordError, StoreError):
            return None

    def _report(self, why: str, one: Return) -> None:
        self._left_out += 1
        if self._left_out <= _MAX_REPORTS:
            key = one.check_point.key
            self._context.log.error(
                "a message cannot come back",
                why=why,
                group=key.group,
                topic=key.topic,
                queue=key.queue_id,
                offset=one.offset,
            )
        self._context.tell(left_out=self._left_out)
