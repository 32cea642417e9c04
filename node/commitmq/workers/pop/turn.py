"""What one turn of the pop process stores and answers: one append for the requests of many clients.

An answer leaves when what it promises is stored (:mod:`commitmq.workers.pop.unflushed`). The timer topic's part is appended
first, a run behind the other, up to one that the writer refuses, as on a full disk: so what is stored of it is its beginning.
No check point lies behind a gap, and no ack of one that was replaced (extend) is stored without its successor. Each step is
told which of its records are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from commitmq import failpoints
from commitmq.format.record import Record
from commitmq.protocol import wire
from commitmq.semantics.pop_revive import CheckPointKey
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.workers.pop.points import Records
from commitmq.workers.pop.unflushed import Unflushed
from commitmq.workers.reader.pulls import Answers
from commitmq.workers.runtime.run_mover import Put, RunMover


class Step(NamedTuple):
    """What a request has in a turn: ``records``, by their numbers.

    ``settle`` is told which of them are stored, and takes back what is not; False refuses the request. ``answer`` makes header
    and frames of what is promised; before that, so it changes nothing.
    """

    client: bytes
    request: int
    records: range
    settle: Callable[[list[bool]], bool]
    answer: Callable[[], tuple[bytes, list[Any]]]


NO_RECORDS: Final = range(0)


def nothing(_stored: list[bool]) -> bool:
    """A step that has nothing to settle."""
    return True


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
        """Append and answer. False when not everything could be stored. Raises WriterLost."""
        if failpoints.ACTIVE and self.records:
            failpoints.hit("pop.before_put")
        stored, refused = [False] * len(self.records), None
        promised: list[tuple[bytes, list[Any]]] = []

        def promise() -> None:
            promised.extend(step.answer() for step in self.steps)

        if self.records:
            ack = unflushed.ack()
            refused = self._append(made, mover, ack, promise, stored)
            unflushed.stored(ack)
        else:
            promise()
        if failpoints.ACTIVE and self.records:
            failpoints.hit("pop.after_put")
        for step, (header, frames) in zip(self.steps, promised, strict=True):
            is_stored = step.settle([stored[number] for number in step.records])
            if refused is None or is_stored:
                answers.send(step.client, header, frames)
            else:
                sentence = f"it could not be stored: {refused.sentence}"
                more = {"retry_after_ms": 500} if refused.retry else {}
                answers.send(step.client, wire.error(step.request, refused.code, sentence, **more))
        self._clear()
        return refused is None

    def _append(
        self, made: Records, mover: RunMover, ack: str, promise: Callable[[], None], stored: list[bool]
    ) -> Put | None:
        """Marks in ``stored`` what is stored. Returns the first refusal. ``promise`` is called once. Raises WriterLost."""
        runs = made.runs(self.records)
        timed = [[one] for one in runs if one[0].topic == TIMER_TOPIC]
        others = [one for one in runs if one[0].topic != TIMER_TOPIC]
        meanwhile: Callable[[], None] | None = promise
        for part in [*timed, others] if others else timed:
            refused = None
            puts = mover.put([run for run, _ in part], ack, meanwhile)
            meanwhile = None
            for (_, numbers), put in zip(part, puts, strict=True):
                refused = refused or (put if put.code else None)
                for number in numbers:
                    stored[number] = not put.code
            if refused is not None:
                return refused
        return None

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
