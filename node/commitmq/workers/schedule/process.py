"""schedule: appends delayed messages to their own topics when they are due (spec 12.1).

Owns: ``config/delayOffset.json``, ``commitmq/schedule.json``. Reads: the ConsumeQueue of SCHEDULE_TOPIC_XXXX, the
CommitLog. Advances: nothing that others read. Sockets: DEALER to the writer and to the coordinator. Exit codes:
workers.runtime.context.ExitCode.

Invariants
    * A message is never delivered early: it is taken only when its unit's time has come.
    * None is lost: the position of a level passes a message when its copy is in the log, or when the message cannot be
      delivered and is a dead letter; the position is written down when that copy is flushed.
    * None is delivered twice (``schedule.exactly_once``): after a death of this process, of the writer or of the whole
      node, the log says what was delivered (:mod:`commitmq.workers.runtime.moved_before`).

What grows: nothing but the topic's name, and a CRC (:mod:`commitmq.semantics.fitting`). A message that cannot be delivered
is a dead letter or is set aside (:mod:`commitmq.workers.runtime.delivery`).

A level waits for its own messages only: one that the node refuses for now is tried again each 100 ms, and holds up the
later messages of its level, as in RocketMQ.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from commitmq.control import Word
from commitmq.semantics.delay import MAX_LEVEL, SCHEDULE_TOPIC
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.clocks import SteadyClock
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.deleted_topics import DeletedTopics
from commitmq.workers.runtime.delivery import RETRY_MS, Delivery
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.moved_before import MovedBefore
from commitmq.workers.runtime.mover import Mover
from commitmq.workers.runtime.mover_positions import MoverPositions
from commitmq.workers.runtime.run_making import RunMaker
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.schedule.levels import NEVER_MS, Level, Portion
from commitmq.workers.schedule.progress import UNKNOWN, Progress, ProgressFiles

ROLE = "schedule"
_LOOK_MS: Final = 500  # the shortest delay is a second, so a message that came meanwhile is seen before it is due


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
        self._files = ProgressFiles(layout, context.log, partial(context.control.get, Word.FLUSHED))
        self._mover = self._delivery.mover
        self._before = MovedBefore()
        self._ends: dict[int, int] = {}
        self._levels = [Level(number, 0, self._reader) for number in range(1, MAX_LEVEL + 1)]
        self._positions: MoverPositions[Progress] = MoverPositions(
            context, config.schedule.persist_interval_ms, take=self._progress, store=self._files.store, start=Progress()
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

    def _take(self, level: Level, now: int) -> Portion | None:
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

    def _deliver(self, level: Level, portion: Portion) -> None:
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

    def _progress(self) -> Progress:
        """The positions now. Deliveries of later messages lie behind what is flushed, unless they are under way."""
        logs = [level.waiting.log for level in self._levels if level.waiting is not None]
        if self._begins_at is not None:
            logs.append(self._begins_at)
        return Progress(self._offsets(), min([self._control.get(Word.FLUSHED), *logs]))

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
