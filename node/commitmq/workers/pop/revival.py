"""Brings messages back to their group: copies into the retry topic, or into the dead-letter topic after the last try.

Invariants
    * Not before its time: only what :class:`~commitmq.workers.pop.points.Points` gives as due, what a consumer gave back, and
      what a revive round finds due.
    * Not lost: a message is settled when its copy is flushed, or when it can have none for good: then it is set aside.
    * No message holds up another one: what grows is 1ST_POP_TIME and ORIGIN_GROUP, and a copy that does not fit is a dead
      letter, or the message is set aside (:mod:`commitmq.semantics.fitting`).
    * Once (``pop.exactly_once``): what the log had before a death is passed over
      (:mod:`commitmq.workers.runtime.moved_before`).
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from commitmq import failpoints
from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.format.record import Record
from commitmq.semantics.pop_revive import CheckPoint, checked_topic
from commitmq.store.metadata.topic_config import validate_group
from commitmq.workers.pop.points import Point, Records
from commitmq.workers.pop.shares import Shares
from commitmq.workers.reader.places import Places
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.isolation import is_of_message
from commitmq.workers.runtime.moved_before import MovedBefore
from commitmq.workers.runtime.run_mover import MovedRun, Put, RunMover
from commitmq.workers.runtime.set_aside import SetAside

_WARN_MS: Final = 10_000
_BAD: Final = ("MESSAGE_ILLEGAL", "PROPERTIES_SIZE_EXCEEDED", "FRAME_TOO_LARGE")
"""Codes of the writer for a message that it will never take."""


class Fate(Enum):
    """What became of a message that comes back."""

    DONE = "done"
    """Its copy is stored, or it can have none for good and is set aside."""
    AGAIN = "again"
    """The node cannot do it at this moment."""
    PUT_OFF = "put off"
    """The group or its topics do not allow it, until a person changes that."""


class Return(NamedTuple):
    """A message that comes back: the one at ``offset`` of ``check_point``. ``dead``: as a dead letter, whatever its tries.

    ``log``: a place in the log before the check point and behind the message; -1 for a check point of RocketMQ.
    """

    check_point: CheckPoint
    offset: int
    log: int = -1
    dead: bool = False


class Revival:
    """See the module."""

    def __init__(
        self,
        context: WorkerContext,
        places: Places,
        shares: Shares,
        records: Records,
        mover: RunMover,
        aside: SetAside,
    ) -> None:
        self._context, self._aside = context, aside
        self._places, self._shares, self._records, self._mover = places, shares, records, mover
        self.before = MovedBefore()
        self.came_back = self._put_off = 0
        self._warn_at_ms = 0

    def copy(self, returns: list[Return]) -> list[Fate]:
        """Append the copies. Returns what became of each message. Raises WriterLost."""
        fates = [Fate.DONE] * len(returns)
        made: list[tuple[int, Record]] = []
        for number, one in enumerate(returns):
            try:
                record = self._made(one)
            except ProtocolError as error:  # the coordinator is away, or refuses the topics
                passes = error.retryable or error.retry_after_ms is not None
                fates[number] = Fate.AGAIN if passes else Fate.PUT_OFF
                self._warn(str(error), one)
                continue
            except Exception as error:
                if not is_of_message(error):
                    raise
                self._report(str(error) or repr(error), one)
                continue
            if record is not None:
                made.append((number, record))
        if not made:
            return fates
        if failpoints.ACTIVE:
            failpoints.hit("pop.before_copy")
        refused: list[tuple[int, Record]] = []
        for members, put in self._put(made):
            if put.code in _BAD and len(members) > 1:
                refused += members  # which of them it is, only a run of its own tells
                continue
            for number, _ in members:
                fates[number] = self._judged(put, returns[number])
        for one_refused in refused:
            ((_, put),) = self._put([one_refused])
            fates[one_refused[0]] = self._judged(put, returns[one_refused[0]])
        if failpoints.ACTIVE:
            failpoints.hit("pop.after_copy")
        return fates

    def _put(self, made: list[tuple[int, Record]]) -> list[tuple[list[tuple[int, Record]], Put]]:
        runs = self._records.runs(record for _, record in made)
        puts = self._mover.put([run for run, _ in runs])
        return [([made[member] for member in members], put) for (_, members), put in zip(runs, puts, strict=True)]

    def _judged(self, put: Put, one: Return) -> Fate:
        if not put.code:
            self.came_back += 1
            return Fate.DONE
        sentence = f"{put.code}: {put.sentence}"
        if put.code in _BAD:
            self._report(sentence, one)
            return Fate.DONE
        self._warn(sentence, one)
        # (The topic may be made at this moment.)
        return Fate.AGAIN if put.retry or put.code == "TOPIC_NOT_EXIST" else Fate.PUT_OFF

    def put_off(self, check_points: list[CheckPoint], revive_queue: int, now_ms: int) -> bool:
        """Store new check points of messages that cannot come back for now, in this order. False: they could not be stored.

        Raises WriterLost.
        """
        records = [self._records.check_point(one, revive_queue, now_ms) for one in check_points]
        runs: list[MovedRun] = [run for run, _ in self._records.runs(records)]
        if any(put.code for put in self._mover.put(runs)):
            return False
        self._put_off += len(check_points)
        self._context.tell(put_off=self._put_off)
        return True

    def passed_over(self, returns: list[Return]) -> list[bool]:
        """Which of them the log had before a death."""
        return [self._was_moved(one) for one in returns]

    def _was_moved(self, one: Return) -> bool:
        try:
            return self._is_there(one)
        except Exception as error:
            if not is_of_message(error):
                raise
            return False  # it can have no copy

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
        """The copy of a message; None when it is there already, or can have none. Raises ProtocolError, and what belongs to
        the message, as InvalidMessageError, when no copy fits.
        """
        key = one.check_point.key
        topic = checked_topic(one.check_point)
        validate_group(key.group)
        if any(self._places.topics.get(name) is None for name in (topic, key.topic)) or self._is_of_deleted(one):
            self._report("its topic was deleted", one)
            return None
        record = self._record(one)
        if record is None:
            self._report("its record is not there any more", one)
            return None
        if self._is_there(one):
            return None
        most = self._shares.max_retries(key.group, topic)
        return self._records.again(record, one.check_point, 0 if one.dead else most)

    def _is_of_deleted(self, one: Return) -> bool:
        """Whether the topic was deleted since, and made anew perhaps: another message may be at the offset."""
        return 0 <= one.log < max(self._places.floor(one.check_point.key.topic), self._tombstone(one.check_point))

    def is_deleted(self, point: Point) -> bool:
        """Whether the messages of ``point`` were deleted with their topic; one of the same name may be there by now."""
        return 0 <= point.log < self._tombstone(point.check_point)

    def _tombstone(self, check_point: CheckPoint) -> int:
        """Below it in the log the messages are of a deleted topic: the one where they lie, or the one that the group pops."""
        topics = self._places.topics
        return max(topics.tombstone(check_point.key.topic), topics.tombstone(checked_topic(check_point)))

    def _record(self, one: Return) -> Record | None:
        """The message; None when it is gone, or its topic is. Raises ProtocolError."""
        key = one.check_point.key
        places = self._places
        view = places.topics.get(key.topic)
        if view is None or view.is_memory or view.is_batch or self._is_of_deleted(one):
            return None
        try:
            bound, floor = places.bound(), places.floor(key.topic)
            at, units = places.queues.units(key.topic, key.queue_id, one.offset, 1, bound=bound, floor=floor)
            if at != one.offset or not len(units) or int(units["physical_offset"][0]) < floor:
                return None
            record = places.log.record(int(units["physical_offset"][0]))
        except (OffsetOutOfRangeError, CorruptRecordError):
            return None
        except StoreError as error:  # the files cannot be read now
            raise ProtocolError("SERVICE_NOT_AVAILABLE", str(error)) from error
        if one.log < 0 and places.topics.tombstone(key.topic) and record.store_timestamp > key.pop_time:
            return None  # the topic was made anew: this message was not there yet
        return record

    def _warn(self, why: str, one: Return) -> None:
        now = monotonic_ms()
        if now >= self._warn_at_ms:
            self._warn_at_ms = now + _WARN_MS
            key = one.check_point.key
            self._context.log.warning("messages cannot come back now", why=why, group=key.group, topic=key.topic)

    def _report(self, why: str, one: Return) -> None:
        key = one.check_point.key
        self._aside.note(
            why,
            group=key.group,
            topic=key.topic,
            queue=key.queue_id,
            queue_offset=one.offset,
            received=key.pop_time,
        )
