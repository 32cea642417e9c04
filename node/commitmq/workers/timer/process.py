"""timer: appends messages to their own topics at the time that their sender named (spec 12.2).

Owns: ``timerwheel``, ``timerlog/``, ``config/timercheck``, ``config/timermetrics``, ``commitmq/timer.json``. Reads: the
ConsumeQueue of rmq_sys_wheel_timer, the CommitLog. Advances: nothing that others read. Sockets: DEALER to the writer
and to the coordinator; doorbell (rung by the ConsumeQueue dispatcher). Exit codes: workers.runtime.context.ExitCode.

Invariants
    * A message is never delivered early: its slot, and then its own time, must have come.
    * None is lost: a slot is done, and the queue offset passes a message, when the copies are in the log, or when a
      message cannot be delivered and is a dead letter; the positions are written down when the log is flushed as far as
      it was when they were taken. So none speaks of a message or of a place in the log that a power cut takes.
    * None is delivered twice (``timer.exactly_once``): after a death of this process, of the writer or of the whole
      node, the log says what was delivered (:mod:`commitmq.workers.runtime.run_mover`).
    * A cancelled message is not delivered: the writer takes a cancellation until CANCEL_MARGIN_MS before the slot, and
      the slot is opened when everything that was written until then is in the wheel.

What grows: TIMER_ENQUEUE_MS and TIMER_DEQUEUE_MS, of a roll TIMER_ROLL_TIMES (:mod:`commitmq.semantics.derived`). The
writer takes no message without room for that; RocketMQ's lack TIMER_ENQUEUE_MS then, or are dead letters.

Wheel and timer log index the queue; :mod:`commitmq.workers.timer.wheel` says when they are rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from commitmq import counting, failpoints
from commitmq.control import Word
from commitmq.counting import CountTable
from commitmq.errors import StoreError
from commitmq.files.disk_space import DiskRoom
from commitmq.format.timer import SLOTS
from commitmq.log import Log
from commitmq.semantics.timer import CANCEL_MARGIN_MS, LATE_ENQUEUE_MS, TimerRules
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.clocks import SteadyClock
from commitmq.workers.runtime.context import StartProgress, WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.mover import Mover
from commitmq.workers.runtime.mover_positions import UNKNOWN, MoverPositions
from commitmq.workers.runtime.run_making import RETRY_MS
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.timer.deliveries import ROW, Deliveries, DueSlot, Rows
from commitmq.workers.timer.incoming import PRECISION_MS, Incoming, TimerQueue, slots_of
from commitmq.workers.timer.progress import ClockSetBack, TimerProgress, TimerProgressFiles
from commitmq.workers.timer.wheel import DamagedTimerLogError, MakingAgain, TimerIndex

Integers = NDArray[np.int64]
NameOf = Callable[[int], "str | None"]
"""The topic whose name has this hash, None while no message has told it."""

_INTERVAL_MS: Final = 10_000
UNKNOWN_TOPIC: Final = "_unknown"
"""Stands in counts for a topic whose name no message has told yet."""


class TimerMetrics:
    """How many messages wait for each topic: RocketMQ's file ``config/timermetrics`` (spec 18, 14).

    A count is the number of units that wait in the wheel minus that of cancellations among them, as a slot counts. Units name
    their topic by a hash, so a start counts them without a look at their messages: the counts are right after any death. The
    file is for people and for RocketMQ, and a few seconds behind.

    The counts and the file. One process uses it.
    """

    def __init__(
        self,
        path: Path,
        log: Log,
        room: DiskRoom,
        name_of: NameOf,
        now_ms: Callable[[], int],
        counts: CountTable | None = None,
    ) -> None:
        self._path, self._log, self._room, self._name_of, self._now_ms = path, log, room, name_of, now_ms
        self._counts: dict[int, int] = {}
        self._changed_ms: dict[int, int] = {}
        self._version: DataVersion | None = None
        self._changed = False
        self._store_at_ms = 0
        self._table = counts
        self._shared: dict[int, int] = {}
        """What each topic without a row of its own has added to the row that they share."""

    def begin(self, hashes: Integers, steps: Integers) -> None:
        """These units wait, and no others."""
        self._counts.clear()
        table, self._table = self._table, None  # these were counted when they came
        self.add(hashes, steps)
        self._table = table
        if table is None:
            return
        waiting: dict[tuple[str, ...], int] = {(name,): count for name, count in self.counts().items()}
        table.set_all(counting.DELAYED_WAITING, waiting)
        names = {topic: self._name_of(topic) for topic in self._counts}
        self._shared = {
            topic: self._counts[topic]
            for topic, name in names.items()
            if name and not table.has_row(counting.DELAYED_WAITING, name)
        }

    def add(self, hashes: Integers, steps: Integers) -> None:
        """Units of the topics ``hashes`` came; each changes its topic's count by its step."""
        if not len(hashes):
            return
        topics, numbers = np.unique(hashes, return_inverse=True)
        sums = np.bincount(numbers, weights=steps).astype(np.int64)
        now_ms = self._now_ms()
        for topic, change in zip(topics.tolist(), sums.tolist(), strict=True):
            self._counts[topic] = self._counts.get(topic, 0) + change
            self._changed_ms[topic] = now_ms
            if self._table is not None:
                self._count(self._table, topic, change)
        self._changed = True

    def _count(self, table: CountTable, topic: int, change: int) -> None:
        name = self._name_of(topic) or UNKNOWN_TOPIC
        if name != UNKNOWN_TOPIC:
            waiting, count = table.count(counting.DELAYED_WAITING, name), self._counts[topic]
            if table.has_row(counting.DELAYED_WAITING, name):
                waiting.set(count)
            else:
                waiting.add(count - self._shared.get(topic, 0))
                self._shared[topic] = count
        table.count(counting.DELAYED_IN if change > 0 else counting.DELAYED_OUT, name).add(abs(change))

    def counts(self) -> dict[str, int]:
        """By topic. A topic that is not known by its name yet is omitted."""
        named = ((self._name_of(topic), count) for topic, count in self._counts.items())
        return {name: count for name, count in named if name}

    def write_down(self, *, at_once: bool = False) -> None:
        """Write the file when anything has changed and it is time. A failure is logged: nobody depends on the file."""
        now = monotonic_ms()
        if not self._changed or (now < self._store_at_ms and not at_once):
            return
        self._store_at_ms = now + _INTERVAL_MS
        try:
            if self._version is None:
                self._version = _version_of(self._path)
            self._version.advance()
            replace = partial(json_config.replace_text, self._path, self._encoded(self._version))
            self._changed = not self._room.try_to("timermetrics", replace)
        except (StoreError, OSError) as error:
            self._log.warning("timermetrics cannot be written", error=str(error))

    def _encoded(self, version: DataVersion) -> str:
        """In RocketMQ's compact form."""
        stamps = {self._name_of(topic): stamp for topic, stamp in self._changed_ms.items()}
        counts = {name: {"count": count, "timeStamp": stamps[name]} for name, count in sorted(self.counts().items())}
        data: dict[str, Any] = {"dataVersion": dict(sorted(version.to_json().items())), "timingCount": counts}
        return orjson.dumps(data).decode()


def _version_of(path: Path) -> DataVersion:
    """The version of the file that is there; the first one for none, and for one that nobody can read."""
    try:
        return DataVersion.from_json((json_config.load(path) or {}).get("dataVersion"))
    except (StoreError, TypeError, ValueError, AttributeError, KeyError):
        return DataVersion()


ROLE = "timer"
_LOOK_MS: Final = 500
_GATE_MS: Final = 2
_DISTRUST_MS: Final = 500  # between two times that everything is rebuilt
_LEAD_MS: Final = CANCEL_MARGIN_MS - 50
_NEVER_MS: Final = 1 << 62
_TAKEN: Final = 16_384  # messages put into the wheel at once
_MOST_TAKEN: Final = 8  # times, before what is due gets its turn
_REST_MS: Final = 5  # behind a delivery: what is due in the meantime shares the next one
_TAKE_REST_MS: Final = 20  # behind a turn that only took messages in, unless something is due before
_MAX_MAPPED: Final = 4
_FILES: Final = "timer log"
_POSITIONS: Final = "positions"
_SET_BACK_MS: Final = 5_000  # a clock that was set back by less is waited for
_MOST_SET_BACKS: Final = 64
_FAR_BYTES: Final = 64 << 20  # an idle timer writes its position in the log each this many bytes


class Timer(Mover):
    """The loop's state."""

    def __init__(self, context: WorkerContext, clock: SteadyClock | None = None) -> None:
        config, layout, aside = context.config, context.layout, SetAside(context)
        mapped = min(_MAX_MAPPED, config.commit_log.max_mapped_segments)
        self._log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, mapped)
        self._deliveries = Deliveries(context, self._log, aside)
        self._way = self._deliveries.way
        super().__init__(context, self._way.mover, aside)
        self._room, self._clock = context.room, clock or SteadyClock()
        self._config = context.config.timer
        self._layout = context.layout
        self._expired = ExpiredSegments(context, self._log)
        self._reader = QueueReader(self._log, layout.consume_queue, config.consume_queue.file_bytes)
        self._queue = TimerQueue(self._reader, self._log, partial(aside.at, self._log))
        self._records = self._deliveries.records
        self._files = TimerProgressFiles(layout, context.log, partial(context.control.get, Word.FLUSHED))
        self._rules = TimerRules(roll_window_slots=self._config.roll_window_s * 1000 // PRECISION_MS)
        self._before_ms = self._before_offset = 0
        self._index: TimerIndex
        self._again: MakingAgain | None = None
        self._remaking = StartProgress(context, "remaking")
        self._offset = self._read_ms = self._now_ms = 0
        self._set_backs: tuple[ClockSetBack, ...] = ()
        self._set_back_log: int | None = None
        """The clock was set back; deliveries of before end here, and must be flushed before that is written down."""
        self._next_ms = 0
        """The next slot with messages, NEVER_MS without one."""
        self._slot: DueSlot | None = None
        self._taken_to = self._safe_ms = 0
        """What was written before this position is taken in. Slots until this time miss no cancellation."""
        self._sample = (0, 0)
        """The next ``_safe_ms``, once ``_taken_to`` has reached a position."""
        self.rest_ms = 0
        """How long to leave messages that come behind the last turn, so that they share the next one."""
        self._positions: MoverPositions[TimerProgress] = MoverPositions(
            context, self._config.persist_interval_ms, take=self._progress, store=self._store, start=TimerProgress()
        )
        self._changed = False
        path, names = layout.config / "timermetrics", self._queue.topics.get
        self._metrics = TimerMetrics(path, context.log, context.room, names, self._clock.now_ms, context.counts)

    # ------------------------------------------------------------ begin and resume

    def resume(self) -> None:
        """Take up the written positions, and find what was delivered behind them. The writer serves."""
        progress = self._files.load()
        self._clock.take_up()
        end = self._log_end()
        self._way.mover.wait_until_dispatched(end)
        bound, floor = self._bounds()
        now = self._clock.now_ms()
        self._slot, self._again, self._next_ms = None, None, 0
        self._taken_to, self._safe_ms, self._sample = 0, 0, (0, 0)
        if progress.log > end:
            self._context.log.warning("the log has lost its end", written_down=progress.log, end=end)
            progress = replace(progress, log=UNKNOWN, is_whole=False)
        if now < progress.read_ms - _SET_BACK_MS:
            progress = self._set_back(progress, progress.read_ms, 0, now)
        self._now_ms = now = max(now, progress.read_ms + 1)
        first = self._queue.bounds(bound, floor)[0]
        self._set_backs = tuple(one for one in progress.set_backs if one.queue_offset > first)
        log = progress.log
        oldest_ms = oldest_slot_ms(now, self._rules)
        if progress.read_ms < oldest_ms:
            progress = replace(progress, is_whole=False)
        if progress.is_whole:
            try:
                opened = partial(TimerIndex.open, self._layout, self._config.log_file_bytes, progress)
                self._index = self._room.wait(_FILES, opened)
                self._offset, self._read_ms = progress.queue_offset, progress.read_ms
            except (StoreError, OSError) as error:
                self._context.log.warning("wheel and timer log are rebuilt", why=str(error))
                progress = replace(progress, is_whole=False)
        if not progress.is_whole:
            self._read_ms = max(progress.read_ms, oldest_ms) // PRECISION_MS * PRECISION_MS
            log = self._make_again(progress, bound, floor, end)
            progress = replace(progress, log=log)
        units = self._index.log.waiting(self._read_ms)
        self._queue.learn_topics(units)
        self._metrics.begin(
            units["topic_hash"].astype(np.int64), self._index.log.steps(units["magic"].astype(np.int64))
        )
        self._index.on_add = self._metrics.add
        self._positions.begin(progress, changed=True)
        self._changed = False
        self._before_ms, self._before_offset = now + _SET_BACK_MS, self._queue.bounds(bound, floor)[1]
        self._deliveries.begin(max(min(log, end), floor), end)
        self._context.tell(
            waiting=self._waiting(),
            read_ms=self._read_ms,
            roll_window_s=self._config.roll_window_s,
            broker_name=self._context.config.network.broker_name,
        )

    def _make_again(self, progress: TimerProgress, bound: int, floor: int, end: int) -> int:
        """Begin with an empty wheel, at the first message. Returns from where deliveries are to be looked for."""
        first, behind = self._queue.bounds(bound, floor)
        self._again = MakingAgain(progress)
        self._again.survey(self._queue, bound, floor, self._now_ms, self._read_ms, self._context.heartbeat)
        overdue = self._again.first_overdue
        log = progress.log if progress.log != UNKNOWN else end if overdue is None else overdue
        made = replace(progress, log=log, is_whole=False)
        self._room.wait(_POSITIONS, partial(self._files.store, made, first_offset=first))
        if failpoints.ACTIVE:
            failpoints.hit("timer.before_making_again")
        self._index = self._room.wait(_FILES, partial(TimerIndex.make_empty, self._layout, self._config.log_file_bytes))
        self._offset = self._again.until
        if behind > first:
            self._context.log.info("makes wheel and timer log from the queue", messages=behind - first)
        return log

    def _set_back(self, progress: TimerProgress, read_ms: int, due_ms: int, now_ms: int) -> TimerProgress:
        """The clock was set back to ``now_ms``: slots come a second time, and wheel and timer log are rebuilt for that.
        ``read_ms`` and ``due_ms`` say what was delivered (:class:`ClockSetBack`).
        """
        self._context.log.warning("the wall clock was set back: what waits gets its slot again", by_ms=read_ms - now_ms)
        log, self._set_back_log = self._set_back_log, None
        made = ClockSetBack(
            progress.queue_offset, read_ms, due_ms, now_ms, self._control.get(Word.FLUSHED) if log is None else log
        )
        return replace(
            progress,
            read_ms=now_ms // PRECISION_MS * PRECISION_MS,
            is_whole=False,
            set_backs=(*progress.set_backs, made)[-_MOST_SET_BACKS:],
        )

    def _follow_clock(self) -> bool:
        """Go by the wall clock as it is now, also where it was set back. False: not yet, because the writer does not
        take the last deliveries, or the log is not flushed as far: a power cut could take back what would be written
        down.

        Nothing is delivered lately by the clock of before, as nothing that came in the meantime is taken in. Raises
        WriterLost.
        """
        now_ms = self._clock.now_ms() + self._clock.jump_ms
        if now_ms > self._now_ms - _SET_BACK_MS:
            self._set_back_log = None
            self._clock.take_up()
            return True
        if self._again is not None:
            progress = self._positions.written
            progress = self._set_back(progress, progress.read_ms, 0, now_ms)
        else:
            slot = self._slot
            while slot is not None and len(rows := self._rows_due(slot, self._now_ms)):
                self._deliveries.put(rows)
                if self._deliveries.left:
                    return False
            if self._set_back_log is None:
                self._set_back_log = self._control.get(Word.WRITTEN)
            if self._control.get(Word.FLUSHED) < self._set_back_log:
                return False
            progress = TimerProgress(self._read_ms, self._offset, self._deliveries_begin(), set_backs=self._set_backs)
            progress = self._set_back(progress, self._read_ms, 0 if slot is None else self._now_ms, now_ms)
        self._room.wait(_POSITIONS, partial(self._files.store, progress))
        self.resume()
        return True

    # ------------------------------------------------------------ one turn

    def turn(self) -> None:
        """Take in what came and deliver what is due, and sleep until more is. Raises WriterLost, DamagedTimerLogError."""
        pause_ms = self._move()
        if pause_ms and self.rest_ms:
            # Ends before the next message is due, but for the short one.
            self._context.wait(max(_REST_MS, min(pause_ms, self.rest_ms)), nap=True)
        else:
            self._context.wait(pause_ms, unless=self.has_news)

    def cope(self, error: Exception) -> bool | None:
        """Damage of wheel and timer log: both are rebuilt."""
        if not isinstance(error, DamagedTimerLogError):
            return None
        self.distrust(error)
        self._context.wait(_DISTRUST_MS)
        return True

    def _move(self) -> float:
        """Take in what came and deliver what is due; returns how long to wait, in ms. Raises WriterLost."""
        self.rest_ms = 0
        self._expired.release()
        bound, floor = self._bounds()
        if not self._deliveries.try_again() or not self._follow_clock():
            return RETRY_MS
        now_ms = self._clock.now_ms()
        if now_ms < self._read_ms:
            # set back a little: what comes in the meantime waits for the clock
            return min(_LOOK_MS, self._read_ms - now_ms)
        self._now_ms = max(self._now_ms, now_ms)  # a clock that is set back closes no slot a second time
        caught_up = self._make_on(bound, floor) and self._take_in(bound, floor)
        if self._taken_to >= self._sample[1]:
            self._safe_ms = self._sample[0]
            self._sample = (self._now_ms + _LEAD_MS, self._control.get(Word.WRITTEN))
        pause_ms = 0.0 if self._deliveries.left else self._deliver_due()
        if self._deliveries.left:
            return RETRY_MS
        if self._again is None and self._read_ms > self._before_ms and self._offset >= self._before_offset:
            self._deliveries.forget()
        self._write_down()
        return pause_ms if caught_up and self._again is None else 0

    def has_news(self) -> bool:
        """Whether anything came in the meantime: asked just before a wait."""
        bound, floor = self._bounds()
        return self._queue.bounds(bound, floor)[1] > self._offset

    def _make_on(self, bound: int, floor: int) -> bool:
        """Go on with making wheel and timer log again, by one batch beside the usual work. False while messages that are due
        soon are not in it: nothing else is done before.
        """
        if (again := self._again) is None:
            return True
        for _ in range(_MOST_TAKEN):
            messages = again.soon(self._queue, _TAKEN, bound, floor)
            if messages is None:
                break
            self._put_again(messages)
            if self._deliveries.left:
                return False
        else:
            return False
        messages = again.others(self._queue, _TAKEN, bound, floor)
        if messages is None:
            self._again, self._changed = None, True
            self._remaking.over()
        else:
            self._put_again(messages)
            self._remaking("making the timer wheel again", again.at, again.until, "messages")
        return not self._deliveries.left

    def _put_again(self, messages: Incoming) -> None:
        if self._set_backs:
            messages.keep(~self._deliveries.of_later(messages, self._now_ms))
        self._put(messages)
        self._context.heartbeat()

    def _take_in(self, bound: int, floor: int) -> bool:
        """Put new messages into the wheel; those that are late already are delivered. True when none is left."""
        for _ in range(_MOST_TAKEN):
            messages = self._queue.take(self._offset, _TAKEN, bound=bound, floor=floor)
            if messages is None:
                self._taken_to = bound
                return True
            self._put(messages)
            self._offset, self.rest_ms = messages.behind, _TAKE_REST_MS
            self._taken_to = int(messages.physical[-1]) if len(messages) else self._taken_to
            self._changed = True
            if self._deliveries.left:
                return False
            self._context.heartbeat()
        return False

    def _put(self, messages: Incoming) -> None:
        """Put ``messages`` into their slots, and deliver the late ones."""
        if not len(messages):
            return
        write_ms = self._now_ms // PRECISION_MS * PRECISION_MS
        slots, rolls = slots_of(messages.out_ms, write_ms, self._rules)
        is_late = messages.out_ms < self._read_ms
        # A clock that was set back leaves messages that are not due for slots that are closed.
        early = is_late & (messages.due_ms > self._clock.now_ms())
        slots[early] = max(write_ms, self._read_ms)
        is_late &= ~early
        late = _rows_of(messages, is_late & ~messages.cancels)
        messages.keep(~is_late)
        if len(messages):
            self._room.wait(_FILES, partial(self._index.add, messages, slots[~is_late], rolls[~is_late], write_ms))
            self._next_ms = min(self._next_ms, int(slots[~is_late].min()))
        if len(late):
            self._deliveries.put(late)

    def _deliver_due(self) -> float:
        """Deliver the slots whose time has come. Returns how long nothing more is to be done, in ms."""
        while True:
            now = self._now_ms = max(self._now_ms, self._clock.now_ms())
            if self._slot is None:
                slot_ms = self._next_slot()
                safe_ms = self._safe_ms if self._again is None else min(self._safe_ms, self._again.soon_ms)
                if slot_ms > safe_ms or slot_ms >= now:
                    passed_ms = min(now // PRECISION_MS * PRECISION_MS, safe_ms, slot_ms)
                    self._read_ms = max(self._read_ms, passed_ms // PRECISION_MS * PRECISION_MS)
                    return self._pause_ms(slot_ms, now)
                self._read_ms = slot_ms
                self._slot = DueSlot(slot_ms, self._control.get(Word.WRITTEN))
            slot = self._slot
            rows = self._rows_due(slot, self._clock.now_ms())
            if len(rows):
                self._changed, self.rest_ms = True, _REST_MS
                self._deliveries.put(rows)
                self._context.heartbeat()
                if self._deliveries.left or self._context.stopping:
                    return 0
                continue
            due = slot.next_due_ms
            if due is None and now >= slot.end_ms:
                for hashes, steps in slot.topics:
                    self._metrics.add(hashes, -steps)
                self._read_ms, self._slot, self._changed, self._next_ms = slot.end_ms, None, True, 0
                continue
            wait = (slot.end_ms if due is None else due) - self._clock.now_ms()
            return max(0, min(_LOOK_MS, wait, self._pause_ms(slot.end_ms, now)))

    def _rows_due(self, slot: DueSlot, now_ms: int) -> Rows:
        """The next messages of ``slot`` that are due at ``now_ms``."""
        slot.take_in(self._index.newest(slot.slot_ms), self._index.log, self._records)
        return slot.take(now_ms, self._config.batch_messages, self._records)

    def _pause_ms(self, slot_ms: int, now: int) -> int:
        """How long to sleep before the slot ``slot_ms``: once until it can be made safe, then until its time."""
        if slot_ms >= now:
            until = slot_ms + 1 if slot_ms <= self._sample[0] else slot_ms - _LEAD_MS
            return max(1, min(_LOOK_MS, until - now))
        return _GATE_MS

    def _next_slot(self) -> int:
        """The next slot with messages."""
        if not self._next_ms:
            end = max(self._read_ms, self._now_ms) + self._rules.window_ms + 2 * PRECISION_MS
            found = self._index.next_slot_ms(self._read_ms, end)
            self._next_ms = _NEVER_MS if found is None else found
        return self._next_ms

    # ------------------------------------------------------------ positions

    def _write_down(self) -> None:
        self._metrics.write_down()
        flushed = self._control.get(Word.FLUSHED)
        if self._changed or flushed - self._positions.written.log >= _FAR_BYTES:
            self._changed = False
            self._positions.note_change()
        if self._positions.write_down():
            read_ms = self._positions.written.read_ms
            self._way.report_again()
            self._context.tell(waiting=self._waiting(), read_ms=read_ms)

    def _waiting(self) -> int:
        """How many messages wait in the wheel."""
        return self._index.wheel.count(self._read_ms // PRECISION_MS)

    def _progress(self) -> TimerProgress | None:
        """The positions now. Deliveries of later messages lie behind what is flushed, unless they are under way."""
        if self._deliveries.left or self._again is not None:
            return None
        return TimerProgress(
            self._read_ms, self._offset, self._deliveries_begin(), self._index.log.end, True, self._set_backs
        )

    def _deliveries_begin(self) -> int:
        """Where deliveries that the positions do not speak of begin in the log."""
        logs = [self._control.get(Word.FLUSHED), *self._deliveries.begins_at()]
        if self._slot is not None:
            logs.append(self._slot.log)
        return min(logs)

    def _store(self, progress: TimerProgress) -> None:
        """Raises OSError, StoreError; the same call may be repeated."""
        self._index.flush()
        if failpoints.ACTIVE:
            failpoints.hit("timer.after_flush")
        self._files.store(progress)
        self._index.log.delete_expired(self._control.get(Word.MIN_OFFSET))

    def distrust(self, error: StoreError) -> None:
        """Wheel and timer log do not fit together: the next :meth:`resume` makes them again."""
        self._context.log.error("the timer log is damaged", error=str(error))
        not_whole = replace(self._positions.written, is_whole=False)
        self._room.wait(_POSITIONS, partial(self._files.store, not_whole))

    def close(self, *, lost: bool) -> None:
        """Write the last positions, if everything delivered is flushed soon."""
        if lost:
            return
        if self._changed:
            self._positions.note_change()
        self._positions.close()
        self._metrics.write_down(at_once=True)
        self._way.close()
        self._reader.close()


def oldest_slot_ms(now_ms: int, rules: TimerRules) -> int:
    """The oldest slot (ms) that a start opens in a wheel that it finds.

    The wheel comes round after 14 days: slots before this one would be taken for some that are to come. (RocketMQ goes
    back 7 days, and skips what was due before.)
    """
    return now_ms - (SLOTS * PRECISION_MS - rules.window_ms) + 60_000


def _rows_of(messages: Incoming, which: NDArray[np.bool_]) -> Rows:
    """``messages`` that never were in the wheel."""
    rows = np.zeros(int(which.sum()), ROW)
    rows["physical"], rows["size"] = messages.physical[which], messages.sizes[which]
    rows["due_ms"], rows["write_ms"] = messages.due_ms[which], LATE_ENQUEUE_MS
    return rows


def run(context: WorkerContext) -> None:
    """The loop: what came, what is due, then sleep until something is."""
    timer = Timer(context)
    context.ready()
    timer.serve()
