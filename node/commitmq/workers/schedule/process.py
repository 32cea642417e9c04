"""schedule: appends delayed messages to their own topics when they are due (spec 12.1).

Owns: ``config/delayOffset.json``, ``commitmq/schedule.json``. Reads: the ConsumeQueue of SCHEDULE_TOPIC_XXXX, the
CommitLog. Advances: nothing that others read. Sockets: DEALER to the writer and to the coordinator. Exit codes:
workers.runtime.context.ExitCode.

Invariants
    * A message is never delivered early: it is taken only when its unit's time has come.
    * None is lost: the position of a level passes a message when its copy is in the log, or when the message cannot be
      delivered and is a dead letter; the position is written down when that copy is flushed.
    * None is delivered twice (``schedule.exactly_once``): after a death of this process, of the writer or of the whole
      node, the log says what was delivered (:mod:`commitmq.workers.runtime.run_mover`).

What grows: nothing but the topic's name, and a CRC (:mod:`commitmq.semantics.derived`). A message that cannot be delivered
is a dead letter or is set aside (:mod:`commitmq.workers.runtime.run_making`).

A level waits for its own messages only: one that the node refuses for now is tried again each 100 ms, and holds up the
later messages of its level, as in RocketMQ.

One delay level: the part of its queue that is due, as runs for the queues to which the messages belong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.control import Word
from commitmq.format.constants import PREBLANK_SIZE
from commitmq.semantics.delay import DELAY_LEVELS_MS, MAX_LEVEL, SCHEDULE_TOPIC, queue_of
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.clocks import SteadyClock
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.mover import Mover
from commitmq.workers.runtime.mover_positions import UNKNOWN, MoverPositions
from commitmq.workers.runtime.run_making import RETRY_MS, Delivery, RunMaker, few_enough
from commitmq.workers.runtime.run_mover import MovedBefore, MovedRun
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.runtime.topic_view import DeletedTopics
from commitmq.workers.schedule.progress import ScheduleProgress, ScheduleProgressFiles

Integers = NDArray[np.int64]

NEVER_MS: Final = 1 << 62
_MARKS: Final = 16
"""In the time of a delay so many marks are made while store timestamps are ahead: so late a message may be."""


@dataclass(slots=True)
class LevelRuns:
    """Messages that are taken together. ``behind``: the offset of the level once all of ``runs`` are appended."""

    behind: int
    log: int
    """Where the log ended when they were taken: what is appended of them lies behind."""
    runs: list[MovedRun] = field(default_factory=list)


class Level:
    """The queue of level ``number`` from ``offset`` on."""

    def __init__(self, number: int, offset: int, reader: QueueReader) -> None:
        self.number = number
        self.offset = offset
        self.next_due_ms = 0
        """When the next message is due, as far as known; NEVER_MS when none waits."""
        self.waiting: LevelRuns | None = None
        """Taken, and not all of it appended yet."""
        self._seen = -1
        self._reader = reader
        self._until: deque[tuple[int, int]] = deque()
        """(offset, monotonic ms): by then all messages before the offset have waited for as long as the level's delay."""
        self._mark_at_ms = 0

    def may_have_news(self, bound: int) -> bool:
        """Whether a message may have come to a queue that had none: anything was dispatched (up to ``bound``) since."""
        return self.next_due_ms == NEVER_MS and bound != self._seen

    def first_record(self, bound: int, floor: int) -> int | None:
        """The physical offset of the next message; None when none waits."""
        self._clamp(bound, floor)
        _, units = self._reader.units(SCHEDULE_TOPIC, queue_of(self.number), self.offset, 1, bound=bound, floor=floor)
        return int(units["physical_offset"][0]) if len(units) else None

    def end(self, bound: int, floor: int) -> int:
        """The offset behind the last message that is there now."""
        bounds = self._reader.bounds(SCHEDULE_TOPIC, queue_of(self.number), bound=bound, floor=floor)
        return 0 if bounds is None else bounds[1]

    def take(
        self,
        now_ms: int,
        monotonic_ms: int,
        *,
        count: int,
        bound: int,
        floor: int,
        runs: RunMaker,
        log_end: int,
        is_moved: Callable[[memoryview], bool] | None,
    ) -> LevelRuns | None:
        """Up to ``count`` messages that are due, as runs; None when none is. Sets ``next_due_ms``.

        A time further away than the level's delay comes from a clock that was set back since. Such a message waits for the
        delay from when it was seen: nobody knows how long it has waited already. (RocketMQ delivers it at once.)

        ``log_end`` is the log's end now. ``is_moved``: tells of a record whether its message was delivered already.
        """
        self._seen = bound
        self._clamp(bound, floor)
        at, units = self._reader.units(
            SCHEDULE_TOPIC, queue_of(self.number), self.offset, count, bound=bound, floor=floor
        )
        self.next_due_ms = NEVER_MS
        if not len(units):
            return None
        due = units["tags_code"].astype(np.int64)
        delay_ms = DELAY_LEVELS_MS[self.number - 1]
        is_ahead = bool((due > now_ms + delay_ms).any())
        if is_ahead and monotonic_ms >= self._mark_at_ms:
            self._mark_at_ms = monotonic_ms + delay_ms // _MARKS
            self.mark(self.end(bound, floor), monotonic_ms)
        due = self._bounded(due, now_ms, monotonic_ms) if self._until else due
        late = due > now_ms
        ready = int(np.argmax(late)) if late.any() else len(units)
        ready = few_enough(units["size"][:ready])
        if ready < len(units):
            self.next_due_ms = min(int(due[ready]), now_ms + delay_ms // _MARKS) if is_ahead else int(due[ready])
        if not ready:
            return None
        if ready == len(units):
            self.next_due_ms = 0  # more may be due already
        portion = LevelRuns(at + ready, log_end)
        sizes = units["size"][:ready].astype(np.int64)
        real = (sizes > 0) & (sizes != PREBLANK_SIZE)
        places = units["physical_offset"][:ready].astype(np.int64)[real]
        sizes = sizes[real]
        for base, data, which in runs.by_segment(places):
            positions, lengths = places[which] - base, sizes[which]
            if is_moved is not None:
                new = [not is_moved(data[p : p + s].data) for p, s in zip(positions, lengths, strict=True)]
                positions, lengths = positions[new], lengths[new]
            portion.runs += runs.runs(base, data, positions, lengths)
        return portion

    def mark(self, end: int, monotonic_ms: int) -> None:
        """All messages before the offset ``end`` are stored by now: none of them waits longer than the delay from now on."""
        if end > (self._until[-1][0] if self._until else self.offset):
            self._until.append((end, monotonic_ms + DELAY_LEVELS_MS[self.number - 1]))

    def _bounded(self, due: Integers, now_ms: int, monotonic_ms: int) -> Integers:
        """``due``, of messages from :attr:`offset` on, as :meth:`mark` bounds it."""
        while self._until and self._until[0][0] <= self.offset:
            self._until.popleft()
        latest = np.full(len(due), NEVER_MS, np.int64)
        for offset, until_ms in reversed(self._until):
            latest[: offset - self.offset] = now_ms + until_ms - monotonic_ms
        return np.minimum(due, latest)

    def _clamp(self, bound: int, floor: int) -> None:
        """RocketMQ's rule: an offset outside of the queue goes to its nearer end."""
        bounds = self._reader.bounds(SCHEDULE_TOPIC, queue_of(self.number), bound=bound, floor=floor)
        if bounds is not None:
            self.offset = min(max(self.offset, bounds[0]), bounds[1])


ROLE = "schedule"
_LOOK_MS: Final = 500  # the shortest delay is a second, so a message that came in the meantime is seen before it is due


def _delivered(batch: DispatchBatch) -> object:
    """Which records of a batch have a delay level and do not wait: only deliveries are so."""
    waiting = batch.topics.index(SCHEDULE_TOPIC) if SCHEDULE_TOPIC in batch.topics else -1
    return (batch.rows["delay_level"] > 0) & (batch.rows["topic"] != waiting)


class Schedule(Mover):
    """The loop's state."""

    def __init__(self, context: WorkerContext, clock: SteadyClock | None = None) -> None:
        config, layout, aside = context.config, context.layout, SetAside(context)
        self._log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, config.commit_log.max_mapped_segments)
        report = partial(aside.at, self._log)
        self._delivery = Delivery(context, ROLE, report)
        super().__init__(context, self._delivery.mover, aside)
        self._config, self._clock = config, clock or SteadyClock()
        self._expired = ExpiredSegments(context, self._log)
        self._reader = QueueReader(self._log, layout.consume_queue, config.consume_queue.file_bytes)
        self._files = ScheduleProgressFiles(layout, context.log, partial(context.control.get, Word.FLUSHED))
        self._mover = self._delivery.mover
        self._before = MovedBefore()
        self._ends: dict[int, int] = {}
        self._levels = [Level(number, 0, self._reader) for number in range(1, MAX_LEVEL + 1)]
        self._positions: MoverPositions[ScheduleProgress] = MoverPositions(
            context,
            config.schedule.persist_interval_ms,
            take=self._progress,
            store=self._files.store,
            start=ScheduleProgress(),
        )
        self._noted: dict[int, int] = {}
        """The offsets at the last change."""
        self._resumed_ms = 0
        self._begins_at: int | None = None
        """From there on lies what :attr:`_before` found; None when the offsets have passed all of it."""
        self._runs = RunMaker(self._log, config, report, DeletedTopics(context))

    # ------------------------------------------------------------ begin and resume

    def resume(self) -> None:
        """Take up the written positions, and find what was delivered behind them. The writer serves."""
        progress = self._files.load()
        self._noted = dict(progress.offsets)
        self._positions.begin(progress)
        self._context.tell(offsets=list(progress.offsets.items()))
        if self._config.schedule.exactly_once:
            self._mover.wait_until_dispatched(self._log_end())
        bound, floor = self._bounds()
        for level in self._levels:
            level.offset, level.waiting = progress.offsets.get(level.number, 0), None
        self._clock.take_up()
        self._mark(bound, floor)
        self._before.forget()
        self._begins_at = None
        if not self._config.schedule.exactly_once:
            return
        end = self._log_end()
        start = progress.log
        if start == UNKNOWN or start > end:
            firsts = [level.first_record(bound, floor) for level in self._levels]
            start = min((first for first in firsts if first is not None), default=end)
        start = max(start, floor)
        self._before.scan(self._log, start, end, _delivered, self._context.heartbeat)  # type: ignore[arg-type]
        self._ends = {level.number: level.end(bound, floor) for level in self._levels}
        for level in self._levels:
            if level.offset > (last := self._ends[level.number]):
                sentence = "the position of a level is beyond its queue: all messages in it count as delivered"
                self._context.log.warning(sentence, level=level.number, position=level.offset, end=last)
        if len(self._before):
            self._begins_at, self._resumed_ms = start, self._clock.now_ms()
            self._context.log.info("looks for deliveries before it", found=len(self._before), bytes=end - start)

    # ------------------------------------------------------------ one turn

    def turn(self) -> None:
        """Deliver what is due, and sleep until something is. Raises WriterLost."""
        self._context.wait(self._move(), nap=True)  # a new message is not due for a second

    def _move(self) -> float:
        """Deliver what is due; returns how long to wait, in ms. Raises WriterLost."""
        self._expired.release()
        jump_ms = self._clock.take_up()
        now = self._clock.now_ms()
        bound, floor = self._bounds()
        if jump_ms < 0:
            self._context.log.warning("the wall clock was set back: no message waits longer for it", by_ms=-jump_ms)
            self._mark(bound, floor)
        for level in self._levels:
            if level.waiting is None and (level.next_due_ms <= now or level.may_have_news(bound)):
                level.waiting = self._take(level, now)
            elif level.waiting is not None and not self._delivery.may_try_again:
                continue
            if level.waiting is not None:
                self._deliver(level, level.waiting)
        if self._begins_at is not None and all(map(self._has_passed, self._levels)):
            self._begins_at = None
        if len(self._before) and all(level.offset >= self._ends[level.number] for level in self._levels):
            self._before.forget()
        self._write_down()
        if any(level.waiting is not None for level in self._levels):
            return RETRY_MS
        soonest = min(level.next_due_ms for level in self._levels)
        if soonest == NEVER_MS:
            return _LOOK_MS
        return max(0, min(_LOOK_MS, soonest - self._clock.now_ms()))

    def _mark(self, bound: int, floor: int) -> None:
        """Times of delivery may be of a clock that was ahead: what is stored now waits for its delay at most."""
        for level in self._levels:
            level.mark(level.end(bound, floor), monotonic_ms())
            level.next_due_ms = 0

    def _has_passed(self, level: Level) -> bool:
        """Whether ``level`` has dealt with everything that was due when this process looked for deliveries before it."""
        return level.waiting is None and (
            level.offset >= self._ends[level.number] or level.next_due_ms > self._resumed_ms
        )

    def _take(self, level: Level, now: int) -> LevelRuns | None:
        bound, floor = self._bounds()
        return level.take(
            now,
            monotonic_ms(),
            count=self._config.schedule.batch_messages,
            bound=bound,
            floor=floor,
            runs=self._runs,
            log_end=self._control.get(Word.WRITTEN),
            is_moved=self._before.pass_over if len(self._before) else None,
        )

    def _deliver(self, level: Level, portion: LevelRuns) -> None:
        """Append the runs of a portion. Those that may succeed later stay in it."""
        portion.runs = self._delivery.append(portion.runs)
        if not portion.runs:
            level.offset, level.waiting = portion.behind, None

    # ------------------------------------------------------------ positions

    def _write_down(self) -> None:
        offsets = self._offsets()
        if offsets != self._noted:
            self._noted = offsets
            self._positions.note_change()
        if self._positions.write_down():
            self._context.tell(offsets=list(self._positions.written.offsets.items()))
            self._delivery.report_again()

    def _offsets(self) -> dict[int, int]:
        return {level.number: level.offset for level in self._levels if level.offset}

    def _progress(self) -> ScheduleProgress:
        """The positions now. Deliveries of later messages lie behind what is flushed, unless they are under way."""
        logs = [level.waiting.log for level in self._levels if level.waiting is not None]
        if self._begins_at is not None:
            logs.append(self._begins_at)
        return ScheduleProgress(self._offsets(), min([self._control.get(Word.FLUSHED), *logs]))

    def close(self, *, lost: bool) -> None:
        """Write the last positions, if everything delivered is flushed soon."""
        if not lost:
            self._positions.close()
        self._delivery.close()
        self._reader.close()


def run(context: WorkerContext) -> None:
    """The loop: what is due, then sleep until something is."""
    schedule = Schedule(context)
    context.ready()
    schedule.serve()
