"""The check service: asks about transactions without an end, round for round (spec 12.3).

A round is cut into steps, so that ends do not wait for it. A half message that a step puts back or gives up is appended
before the position passes it. If something dies in between, the copy is found when the process resumes.

A half message whose copy the node refuses for good (too many bytes for a limit that was lowered) holds up no other: the
positions wait before it, and its producer is asked at the place where it is, each round. After ``check_max`` of them it is
given up as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commitmq.format.record import Record
from commitmq.semantics.transaction import (
    HALF_TOPIC,
    OP_TOPIC,
    OPS_AT_ONCE,
    ROLLBACK,
    CheckRound,
    CheckRules,
    Decision,
    Step,
    discarded_record,
    op_offsets,
)
from commitmq.workers.transaction.ends import MOST_BYTES, Append, Appends, Ends, HalfQueues
from commitmq.workers.transaction.ledger import Ledger, Place

Ask = Callable[[Record, Place], None]
"""Asks a producer about a half message at its place."""
Report = Callable[[Record, str], None]
"""Told of a half message whose copy is refused for good, and why."""

_READ: Final = 64
_MOST_LOOKS: Final = 2_048  # at half messages in a step, which requests wait for
_OPS_A_STEP: Final = 256


class Checks:
    """The rounds. ``ledger`` is set by the owner when it has resumed."""

    ledger: Ledger

    def __init__(
        self,
        queues: HalfQueues,
        appends: Appends,
        ends: Ends,
        rules: CheckRules,
        batch: int,
        ask: Ask,
        report: Report,
    ) -> None:
        """``batch``: half messages that are put back together."""
        self._queues, self._appends, self._ends = queues, appends, ends
        self._rules, self._batch, self._ask, self._report = rules, batch, ask, report
        self._round: CheckRound | None = None
        self._halves_are_done = False
        self._cached: dict[int, Record] = {}
        self._stuck: dict[int, int] = {}
        """Offsets of open half messages that cannot be put back, and how often each was asked about."""
        self.checked = self.discarded = 0

    @property
    def is_running(self) -> bool:
        """Whether a round has begun and has more to do."""
        return self._round is not None

    def forget(self) -> None:
        """The round ends where it is: what it has done is to be found anew."""
        self._round = None
        self._halves_are_done = False
        self._cached.clear()

    def has_work(self) -> bool:
        """Whether any half message or op message is behind the positions."""
        ledger = self.ledger
        return (
            ledger.half_offset < self._queues.bounds(HALF_TOPIC)[1]
            or ledger.op_offset < self._queues.bounds(OP_TOPIC)[1]
        )

    def begin(self, now_ms: int) -> None:
        """Begin a round."""
        ledger = self.ledger
        low, high = self._queues.bounds(HALF_TOPIC)
        ops_low, ops_high = self._queues.bounds(OP_TOPIC)
        ledger.pass_to(min(max(ledger.half_offset, low), high), min(max(ledger.op_offset, ops_low), ops_high))
        self._round = CheckRound(
            ledger.half_offset, ledger.op_offset, now_ms, self._rules, decided=ledger.decided_before, end_offset=high
        )
        self._cached.clear()
        self._take_ops(self._round)

    def step(self, now_ms: int, proven_ms: int | None = None) -> None:
        """Carry the round on by one batch. ``proven_ms``: see :meth:`CheckRound.decide`. Raises WriterLost."""
        round_ = self._round
        assert round_ is not None
        if self._halves_are_done:
            if not self._pass_ops():
                self.forget()
            return
        taken: list[tuple[Decision, Record]] = []
        goes_on = True
        looks = size = 0
        while goes_on and len(taken) < self._batch and looks < _MOST_LOOKS and size < MOST_BYTES:
            before = len(taken)
            goes_on = not round_.is_over(now_ms) and self._look(round_, now_ms, proven_ms, taken)
            looks += 1
            size += len(taken[-1][1].body) if len(taken) > before else 0
        if not self._append(taken, now_ms):
            self.forget()  # the writer takes nothing at the moment: another round tries again
            return
        self._pass_to(round_)
        self._halves_are_done = not goes_on

    def _look(
        self, round_: CheckRound, now_ms: int, proven_ms: int | None, taken: list[tuple[Decision, Record]]
    ) -> bool:
        """Decide about one half message. False when the round is over."""
        offset = round_.next_undecided()
        if not self.ledger.is_open(offset):
            if offset >= self._queues.bounds(HALF_TOPIC)[1]:
                return False
            round_.passed()
            return True
        half = self._half(round_, offset)
        if half is None:
            return round_.half_offset != offset
        place = Place(offset, half.physical_offset)
        if self._ends.is_gone(half, place):
            self.ledger.note_end(half, place, int(ROLLBACK))
            round_.passed()
            return True
        decision = round_.decide(half, now_ms, proven_ms)
        if decision.step is Step.STOP:
            return False
        if decision.step is Step.MORE_OPS:
            self._take_ops(round_)
            return True
        if decision.record is not None:
            taken.append((decision, half))
        round_.passed()
        return True

    def _half(self, round_: CheckRound, offset: int) -> Record | None:
        """The half message at ``offset``. None at the queue's end, and where none can be read: then the round skips."""
        if offset not in self._cached:
            behind, records = self._queues.records(HALF_TOPIC, offset, _READ)
            self._cached = {record.queue_offset: record for record in records}
            if offset not in self._cached and behind > offset:
                round_.skip_to(min([*self._cached, behind]))
        return self._cached.get(offset)

    def _take_ops(self, round_: CheckRound) -> None:
        behind, ops = self._queues.records(OP_TOPIC, round_.next_op_offset, OPS_AT_ONCE)
        round_.take_ops(ops)
        if not ops and behind > round_.next_op_offset:
            round_.next_op_offset = behind  # units whose records are gone

    def _pass_ops(self) -> bool:
        """Pass the next op messages whose half messages are all passed. True when there may be more of them.

        The round itself takes op messages only where it has to decide. So without this the position would stay behind
        when most transactions have ended before they are looked at, and a start would read all op messages again.
        """
        ledger = self.ledger
        reached, ops = self._queues.records(OP_TOPIC, ledger.op_offset, _OPS_A_STEP)
        open_ones = (op.queue_offset for op in ops if any(offset >= ledger.half_offset for offset in op_offsets(op)))
        passed = next(open_ones, reached)
        may_have_more = passed == reached > ledger.op_offset
        ledger.pass_to(ledger.half_offset, passed)
        return may_have_more

    def _pass_to(self, round_: CheckRound) -> None:
        """Move the positions as far as the round is, but not past a half message that is stuck."""
        self._stuck = {offset: times for offset, times in self._stuck.items() if self.ledger.is_open(offset)}
        half_offset = min([round_.half_offset, *self._stuck])
        # The op messages from here on say which half messages behind a stuck one have ended.
        op_offset = self.ledger.op_offset if self._stuck else round_.new_op_offset()
        self.ledger.pass_to(half_offset, op_offset)

    def _append(self, taken: list[tuple[Decision, Record]], now_ms: int) -> bool:
        """Carry out the decisions of a step. False when some may be carried out later. Raises WriterLost."""
        if not taken:
            return True
        appends = [Append(decision.record) for decision, _ in taken if decision.record is not None]
        self._appends.put("renewal", appends)
        for (decision, half), append in zip(taken, appends, strict=True):
            if append.place is None:
                if not append.retry:
                    self._refused(decision, half, append)
                continue
            is_given_up = decision.step is Step.DISCARD
            self.ledger.note_passed(half.queue_offset, half, None if is_given_up else append.place)
            if is_given_up:
                self.discarded += 1
            elif decision.step is Step.CHECK:
                self.checked += 1
                self._ask(append.record, append.place)
        return all(append.place is not None or not append.retry for append in appends)

    def _refused(self, decision: Decision, half: Record, append: Append) -> None:
        """The copy of ``half`` is refused for good. Raises WriterLost."""
        offset = half.queue_offset
        times = self._stuck.get(offset, 0) + (decision.step is Step.CHECK)
        if decision.step is not Step.DISCARD and times <= self._rules.check_max:
            if offset not in self._stuck:
                self._report(half, f"it cannot be put back: {append.sentence}")
            self._stuck[offset] = times
            if decision.step is Step.CHECK:
                self.checked += 1
                self._ask(half, Place(offset, half.physical_offset))
            return
        if decision.step is not Step.DISCARD:
            append = Append(discarded_record(half))
            self._appends.put("renewal", [append])
            if append.place is None and append.retry:
                return  # the next round tries again
        if append.place is None:
            self._report(half, f"it is given up, and has no copy: {append.sentence}")
        self.ledger.note_passed(offset, half, None)
        self.discarded += 1
