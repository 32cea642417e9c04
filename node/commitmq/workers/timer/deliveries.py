"""Appends due messages to their own topics, and those that roll to the timer topic, each once."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

from commitmq.format.constants import Property
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.property_numbers import longs
from commitmq.store.log.readdressing import find
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.deleted_topics import DeletedTopics
from commitmq.workers.runtime.delivery import Delivery
from commitmq.workers.runtime.moved_before import MovedBefore
from commitmq.workers.runtime.run_making import RunMaker
from commitmq.workers.runtime.run_mover import MovedRun
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.timer.due_slot import Rows, added_properties
from commitmq.workers.timer.incoming import Incoming
from commitmq.workers.timer.keys import copy_key, delivered_key, moved_by_timer, rolled_key


class Deliveries:
    """``left``: runs that the writer refused for now. ``way``: how runs are appended."""

    def __init__(self, context: WorkerContext, log: CommitLog, aside: SetAside) -> None:
        self._context = context
        self._log = log
        self._exactly_once = context.config.timer.exactly_once
        report = partial(aside.at, log)
        self.way = Delivery(context, "timer", report)
        self.records = RunMaker(log, context.config, report, DeletedTopics(context))
        self.left: list[MovedRun] = []
        self._start: int | None = None
        self._delivered = MovedBefore(copy_key, delivered_key)
        self._rolled = MovedBefore(copy_key, rolled_key)

    def begin(self, start: int, end: int) -> None:
        """Nothing is under way; what was delivered before lies from ``start`` to ``end`` in the log."""
        self.left = []
        self.forget()
        if not self._exactly_once:
            return
        beat = self._context.heartbeat
        self._delivered.scan(self._log, start, end, moved_by_timer, beat)
        if len(self._delivered):
            self._start = start
            self._rolled.scan(self._log, start, end, moved_by_timer, beat)
            self._context.log.info("looks for deliveries before it", found=len(self._delivered), bytes=end - start)

    def begins_at(self) -> list[int]:
        """Where deliveries lie that were found by :meth:`begin` and are not done; empty without one.

        A position that is written down must not pass it: their slot is opened anew, behind them.
        """
        return [] if self._start is None else [self._start]

    def forget(self) -> None:
        """Every message that may have been delivered before is done."""
        self._start = None
        self._delivered.forget()
        self._rolled.forget()

    def put(self, rows: Rows) -> None:
        """Append the messages of ``rows``. Those that may succeed later stay in ``left``. Raises WriterLost."""
        runs: list[MovedRun] = []
        for is_roll in (True, False):
            mine = rows[rows["rolls"] == is_roll]
            if len(mine):
                runs += self._runs(mine, is_roll=is_roll)
        self._append(runs)

    def of_later(self, messages: Incoming, now_ms: int) -> NDArray[np.bool_]:
        """Which of ``messages`` were delivered before, though they are due after ``now_ms``: the clock was ahead of it.

        (Those that are due are passed over when they are delivered.)
        """
        found: NDArray[np.bool_] = np.zeros(len(messages), np.bool_)
        if len(self._delivered):
            later = np.flatnonzero((messages.due_ms > now_ms) & ~messages.cancels)
            for base, data, which in self.records.by_segment(messages.physical[later], silent=True):
                for index in later[which].tolist():
                    start = int(messages.physical[index]) - base
                    found[index] = self._delivered.pass_over(data[start : start + int(messages.sizes[index])].data)
        return found

    def try_again(self) -> bool:
        """Append what was refused, if it is time. True when nothing is left. Raises WriterLost."""
        if self.left and self.way.may_try_again:
            self._append(self.left)
        return not self.left

    def _runs(self, rows: Rows, *, is_roll: bool) -> list[MovedRun]:
        before = self._rolled if is_roll else self._delivered
        runs: list[MovedRun] = []
        for base, data, which in self.records.by_segment(rows["physical"]):
            mine = rows[which]
            positions, sizes = mine["physical"] - base, np.ascontiguousarray(mine["size"])
            if len(before):
                new = [not before.pass_over(data[p : p + s].data) for p, s in zip(positions, sizes, strict=True)]
                mine, positions, sizes = mine[new], positions[new], sizes[new]
            if not len(mine):
                continue
            times = None
            if is_roll:
                found = find(data, positions, sizes, [Property.TIMER_ROLL_TIMES])
                times = longs(data, found.starts[0], found.lengths[0])[0] + 1
            more = added_properties(mine["write_ms"], time.time_ns() // 1_000_000, times)
            to = (TIMER_TOPIC, 0) if is_roll else None
            runs += self.records.runs(base, data, positions, sizes, more=more, to=to)
        return runs

    def _append(self, runs: list[MovedRun]) -> None:
        self.left = self.way.append(runs)
