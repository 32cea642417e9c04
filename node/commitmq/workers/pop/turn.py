"""What one turn of the pop process stores and answers: one append for the requests of many clients.

An answer leaves when what it promises is stored (:mod:`commitmq.workers.pop.unflushed`). When the append is refused, every
step of the turn is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from commitmq import failpoints
from commitmq.format.record import Record
from commitmq.protocol import wire
from commitmq.semantics.pop_revive import CheckPointKey
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.workers.pop.records import Records
from commitmq.workers.pop.unflushed import Unflushed
from commitmq.workers.reader.answers import Answers
from commitmq.workers.runtime.run_mover import MovedRun, Put, RunMover


class Step(NamedTuple):
    """``stored`` or ``taken_back`` is called by the end of the append.

    ``answer`` makes header and frames of what is promised; before the end, so it changes nothing.
    """

    client: bytes
    request: int
    stored: Callable[[], None]
    taken_back: Callable[[], None]
    answer: Callable[[], tuple[bytes, list[Any]]]


def _ordered(runs: Iterable[MovedRun]) -> list[MovedRun]:
    """Check points first: the ack of a check point that was replaced (extend) must not be stored without its successor."""
    return sorted(runs, key=lambda run: run.topic != TIMER_TOPIC)


def nothing() -> None:
    """A step that has nothing to do."""


@dataclass(slots=True)
class Turn:
    """See the module."""

    records: list[Record] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    claimed: dict[tuple[CheckPointKey, int], None] = field(default_factory=dict)
    """Messages of which a request of this turn has spoken: a second one comes too late."""

    def mark(self) -> tuple[int, int, int]:
        """How much a turn has before a request; :meth:`roll_back` takes away what came since."""
        return len(self.records), len(self.steps), len(self.claimed)

    def roll_back(self, mark: tuple[int, int, int]) -> None:
        """A request has failed half way: it stores nothing, and the others of the turn do not notice."""
        records, steps, claimed = mark
        del self.records[records:], self.steps[steps:]
        for one in list(self.claimed)[claimed:]:
            del self.claimed[one]

    def store(self, made: Records, mover: RunMover, answers: Answers, unflushed: Unflushed) -> bool:
        """Append and answer. False when the append was refused. Raises WriterLost."""
        if failpoints.ACTIVE and self.records:
            failpoints.hit("pop.before_put")
        puts: list[Put] = []
        promised: list[tuple[bytes, list[Any]]] = []

        def promise() -> None:
            promised.extend(step.answer() for step in self.steps)

        if self.records:
            ack = unflushed.ack()
            puts = mover.put(_ordered(run for run, _ in made.runs(self.records)), ack, promise)
            unflushed.stored(ack)
        else:
            promise()
        if failpoints.ACTIVE and self.records:
            failpoints.hit("pop.after_put")
        refused = next((put for put in puts if put.code), None)
        for step, (header, frames) in zip(self.steps, promised, strict=True):
            if refused is None:
                answers.send(step.client, header, frames)
                step.stored()
            else:
                step.taken_back()
                sentence = f"it could not be stored: {refused.sentence}"
                more = {"retry_after_ms": 500} if refused.retry else {}
                answers.send(step.client, wire.error(step.request, refused.code, sentence, **more))
        self._clear()
        return refused is None

    def lose(self, answers: Answers) -> None:
        """The writer was lost: whether anything is stored is open."""
        for step in self.steps:
            answers.send(
                step.client,
                wire.error(step.request, "SERVICE_NOT_AVAILABLE", "the writer ended meanwhile", retry_after_ms=200),
            )
        self._clear()

    def _clear(self) -> None:
        self.records.clear()
        self.steps.clear()
        self.claimed.clear()
