"""Appends what a mover delivers, and keeps what the node refuses for good: as dead letters of the group CMQ_UNDELIVERED.

A topic may take a message no more when its time comes: it is not writable, or has fewer queues. RocketMQ logs
such a message and drops it. Here it goes to ``%DLQ%CMQ_UNDELIVERED``, with its properties, among them REAL_TOPIC and REAL_QID.
It counts as delivered then, also for a mover that looks into the log for what it has moved: a dead letter has a copy's key.
A message of which the node takes no dead letter either is set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from commitmq import failpoints
from commitmq.errors import ProtocolError
from commitmq.semantics.retry import UNDELIVERED_GROUP, UNDELIVERED_TOPIC
from commitmq.store.log.readdressing import Target, readdress, starts_of
from commitmq.store.log.run_check import MessageIllegalError
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.coordinator_line import CoordinatorLine
from commitmq.workers.runtime.run_making import Report, one_by_one, unique_key
from commitmq.workers.runtime.run_mover import MovedRun, Put, RunMover

RETRY_MS: Final = 100
_MAX_REPORTS: Final = 16  # in the log, between two times that positions are written
_OF_THE_QUEUE: Final = ("TOPIC_NOT_EXIST", "NO_PERMISSION", "INVALID_PARAMETER")


class Delivery:
    """``mover`` is the way to the writer. ``delivered`` and ``dead_letters`` count messages."""

    def __init__(self, context: WorkerContext, name: str, report: Report) -> None:
        """``name``: that of the failpoints. ``report`` sets a message aside."""
        self._context, self._report = context, report
        self._name = name
        self.mover = RunMover(context)
        self._line = CoordinatorLine(context)
        self.delivered = self.dead_letters = 0
        self._reports = 0
        self._retry_at_ms = 0

    @property
    def may_try_again(self) -> bool:
        """Whether it is time to append what was refused."""
        return monotonic_ms() >= self._retry_at_ms

    def append(self, runs: Sequence[MovedRun]) -> list[MovedRun]:
        """Append ``runs``, and wait until the last one is flushed. Returns those to append later. Raises WriterLost."""
        if failpoints.ACTIVE:
            failpoints.hit(f"{self._name}.before_put")
        left: list[MovedRun] = []
        for one, put in zip(runs, self.mover.put(runs), strict=True):
            if not put.code:
                self._count(one)
            elif put.retry:
                left.append(one)
            else:
                left += self._refused(one, put)
        if failpoints.ACTIVE:
            failpoints.hit(f"{self._name}.after_put")
        if left:
            self._retry_at_ms = monotonic_ms() + RETRY_MS
        return left

    def _count(self, one: MovedRun) -> None:
        if one.topic != UNDELIVERED_TOPIC:
            self.delivered += one.run.count
            return
        self.dead_letters += one.run.count
        self._context.tell(dead_letters=self.dead_letters)

    def _refused(self, one: MovedRun, put: Put) -> Iterable[MovedRun]:
        """What to append instead of ``one``, which was refused for good."""
        if one.run.count > 1 and put.code not in _OF_THE_QUEUE:
            return one_by_one(one)  # one of them is not as it should be
        why = f"{put.code}: {put.sentence}"
        if one.topic == UNDELIVERED_TOPIC and put.code != "TOPIC_NOT_EXIST":
            return self._set_aside(one, why)
        try:
            if not self._make_topic() and one.topic == UNDELIVERED_TOPIC:
                return self._set_aside(one, why)
            letter = one if one.topic == UNDELIVERED_TOPIC else self._letter(one)
        except ProtocolError:  # the coordinator is away
            return [one]
        except MessageIllegalError as error:
            if one.run.count > 1:
                return one_by_one(one)
            return self._set_aside(one, f"{why}; {error}")
        self._tell(f"{why}; the first one's unique key is {unique_key(one)}", one)
        return [letter]

    def _letter(self, one: MovedRun) -> MovedRun:
        config = self._context.config
        has_crc = config.commit_log.append_properties_crc
        aim = Target(UNDELIVERED_TOPIC.encode(), 0, ":" in config.network.store_host, has_crc)
        return MovedRun(UNDELIVERED_TOPIC, 0, readdress(one.run.data, starts_of(one.run), aim), one.born_v6, one.places)

    def _set_aside(self, one: MovedRun, why: str) -> list[MovedRun]:
        for place in one.places:
            self._report(why, place)
        return []

    def _make_topic(self) -> bool:
        """Whether the topic of dead letters is there, as it should be. Raises ProtocolError when it may be made later."""
        (answer,) = self._line.ask([{"op": "topic.create", "topic": UNDELIVERED_TOPIC, "queues": 1}])
        if not answer.get("ok") and "retry_after_ms" in answer:
            raise ProtocolError(str(answer.get("code")), str(answer.get("error")))
        return bool(answer.get("ok"))

    def _tell(self, why: str, one: MovedRun) -> None:
        self._reports += 1
        if self._reports <= _MAX_REPORTS and one.topic != UNDELIVERED_TOPIC:
            self._context.log.error(
                f"messages become dead letters of {UNDELIVERED_GROUP}", topic=one.topic, count=one.run.count, why=why
            )

    def report_again(self) -> None:
        """The log may have further reports."""
        self._reports = 0

    def close(self) -> None:
        self.mover.close()
        self._line.close()
