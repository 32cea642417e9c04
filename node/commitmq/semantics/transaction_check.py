"""One round of the check service over one half queue, as a state machine (spec 12.3, 18).

The caller reads and writes, this module decides:

    round = CheckRound(half_offset, op_offset, now_ms, rules)
    round.take_ops(records of the op queue from round.next_op_offset on)
    until round.is_over(now_ms):
        half = record at round.next_undecided()   (none: stop at the queue's end, else round.skip_to(the next offset))
        round.decide(half, now_ms):
            STOP       end of the round
            MORE_OPS   take_ops(…) with the next ones, after a pause when there are none; the same offset again
            PASS       round.passed()
            RENEW      append the record, then round.passed()
            CHECK      append the record, ask a producer with its new place, then round.passed()
            DISCARD    append the record, then round.passed()
    commit round.half_offset, round.new_op_offset()

A failed append is simply tried again: nothing changes before :meth:`CheckRound.passed`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.transaction import (
    DEFAULT_TIMEOUT_MS,
    discarded_record,
    immunity_ms,
    integer,
    op_offsets,
    renewed_half,
    renewed_immune_half,
)

OPS_AT_ONCE = 32
"""How many op messages RocketMQ reads at a time."""


@dataclass(frozen=True, slots=True)
class CheckRules:
    """RocketMQ's settings of the same meaning, with its defaults (spec 12.3)."""

    timeout_ms: int = DEFAULT_TIMEOUT_MS
    check_max: int = 15
    reserved_ms: int = 72 * 3_600_000
    interval_ms: int = 30_000
    longest_round_ms: int = 60_000


class Step(Enum):
    """What to do about a half message."""

    STOP = "stop"
    MORE_OPS = "more_ops"
    PASS = "pass"
    RENEW = "renew"
    CHECK = "check"
    DISCARD = "discard"


class Decision(NamedTuple):
    """A step, and the record to append for RENEW, CHECK and DISCARD."""

    step: Step
    record: Record | None = None


class CheckRound:
    """The state of one round; offsets are queue offsets, times milliseconds.

    ``decided`` are half offsets below ``half_offset`` that the caller knows as ended. RocketMQ forgets them, and so asks
    about a renewed immune message that was ended by its first offset; with them it is passed. ``end_offset``: the end of the
    half queue when the round began, behind which it does not go. Without it store timestamps are compared with ``start_ms``,
    as RocketMQ does, whose rounds stand still after the clock was set back.
    """

    def __init__(
        self,
        half_offset: int,
        op_offset: int,
        start_ms: int,
        rules: CheckRules | None = None,
        *,
        decided: Collection[int] = (),
        end_offset: int | None = None,
    ) -> None:
        self.half_offset = half_offset
        self.next_op_offset = op_offset
        self._rules = rules or CheckRules()
        self._start_ms = start_ms
        self._end_offset = end_offset
        self._first_op_offset = op_offset
        self._min_half_offset = half_offset
        self._decided = decided
        self._op_of_half: dict[int, int] = {}
        self._halves_of_op: dict[int, set[int]] = {}
        self._done_ops: set[int] = set()
        self._last_op_born_ms: int | None = None

    def take_ops(self, ops: Sequence[Record]) -> None:
        """Take the next records of the op queue; none when there is nothing new.

        The newest one's age tells whether an end that was sent in time would be there already.
        """
        for op in ops:
            halves = {offset for offset in op_offsets(op) if offset >= self._min_half_offset}
            if halves:
                self._halves_of_op[op.queue_offset] = halves
                self._op_of_half.update(dict.fromkeys(halves, op.queue_offset))
            else:
                self._done_ops.add(op.queue_offset)
            self.next_op_offset = op.queue_offset + 1
        self._last_op_born_ms = ops[-1].born_timestamp if ops else None

    def next_undecided(self) -> int:
        """The offset of the next half message without an end; those with one are passed."""
        while self.half_offset in self._op_of_half:
            self._end(self.half_offset)
            self.half_offset += 1
        return self.half_offset

    def passed(self) -> None:
        """The decision about the present half message was carried out."""
        self.half_offset += 1

    def skip_to(self, offset: int) -> None:
        """The present half message cannot be read; the queue goes on at ``offset``."""
        self.half_offset = max(self.half_offset + 1, offset)

    def is_over(self, now_ms: int) -> bool:
        """Whether the round has taken as long as it may."""
        return now_ms - self._start_ms > self._rules.longest_round_ms

    def decide(self, half: Record, now_ms: int, proven_ms: int | None = None) -> Decision:
        """What to do about ``half``, the record at :meth:`next_undecided`. ``proven_ms``: the time by a clock that is not
        doubted, by which a half message is given up for its age.
        """
        rules = self._rules
        age_ms = now_ms - half.born_timestamp
        proven_age_ms = age_ms if proven_ms is None else min(age_ms, proven_ms - half.born_timestamp)
        times = half.properties.get(Property.TRANSACTION_CHECK_TIMES)
        check_times = 0 if times is None else integer(times)
        if (times is not None and check_times >= rules.check_max) or proven_age_ms > rules.reserved_ms:
            return Decision(Step.DISCARD, discarded_record(half))
        check_times += 1
        end = self._end_offset
        if half.store_timestamp >= self._start_ms if end is None else half.queue_offset >= end:
            return Decision(Step.STOP)
        immunity = half.properties.get(Property.TRANSACTION_IMMUNITY_SECONDS)
        immune_ms = rules.timeout_ms if immunity is None else immunity_ms(immunity, rules.timeout_ms)
        if immunity is None:
            if 0 <= age_ms <= immune_ms:
                return Decision(Step.STOP)
        elif -immune_ms <= age_ms <= immune_ms:
            first = half.properties.get(Property.TRANSACTION_PREPARED_QUEUE_OFFSET)
            if first is not None and self._is_ended(integer(first)):
                return Decision(Step.PASS)
            return Decision(Step.RENEW, renewed_immune_half(half, check_times))
        if self._must_ask(age_ms, immune_ms):
            return Decision(Step.CHECK, renewed_half(half, check_times))
        return Decision(Step.MORE_OPS)

    def new_op_offset(self) -> int:
        """The op queue's offset to commit: past the op messages at its front whose half messages are all passed."""
        offset = self._first_op_offset
        while offset in self._done_ops:
            offset += 1
        return offset

    def _must_ask(self, age_ms: int, immune_ms: int) -> bool:
        if age_ms < 0:  # the producer's clock is ahead: no age says when to ask
            return True
        if self._last_op_born_ms is None:
            return age_ms > immune_ms
        return self._last_op_born_ms - self._start_ms > self._rules.timeout_ms

    def _is_ended(self, half_offset: int) -> bool:
        if half_offset in self._op_of_half:
            self._end(half_offset)
            return True
        return half_offset in self._decided

    def _end(self, half_offset: int) -> None:
        """The half message at ``half_offset`` needs its op message no more."""
        op_offset = self._op_of_half.pop(half_offset)
        halves = self._halves_of_op[op_offset]
        halves.discard(half_offset)
        if not halves:
            del self._halves_of_op[op_offset]
            self._done_ops.add(op_offset)
