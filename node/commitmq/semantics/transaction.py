"""Transactions: half message, commit, rollback, op message (spec 12.3, 18; remoting 3.9).

    send with TRAN_MSG       :mod:`commitmq.workers.writer.put_rules` stores it in RMQ_SYS_TRANS_HALF_TOPIC, which no consumer
                             reads
    END_TRANSACTION commit   :func:`check_end`, then :func:`committed_record` in the real topic, then an op message
    END_TRANSACTION rollback :func:`check_end`, then an op message
    neither in time          :mod:`commitmq.semantics.transaction`

An op message names half messages that are done by their queue offsets; nothing is ever removed from the half topic.

One round of the check service over one half queue, as a state machine (spec 12.3, 18).

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

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Host, Property, SysFlag
from commitmq.format.record import Record
from commitmq.semantics.derived import broker_order, derived, made

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARD_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
CHECK_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The group whose offsets in half and op topic are the check service's positions."""
OP_TAG: Final = "d"
COMMIT: Final = SysFlag.TRANSACTION_COMMIT
ROLLBACK: Final = SysFlag.TRANSACTION_ROLLBACK
DEFAULT_TIMEOUT_MS: Final = 6_000

_MOST_DIGITS: Final = 32  # Java's long has 19; some zeros may come before them
_REAL: Final = (Property.REAL_TOPIC, Property.REAL_QUEUE_ID)


# ---------------------------------------------------------------- the end of a transaction


class EndTransaction(NamedTuple):
    """RocketMQ's request END_TRANSACTION; ``decision`` is COMMIT, ROLLBACK or 0 for unknown. ``topic``: the message
    must be for it; empty for any.
    """

    producer_group: str
    queue_offset: int
    physical_offset: int
    decision: int
    from_check: bool = False
    topic: str = ""


class EndRefusal(NamedTuple):
    """Why a transaction is not ended: RocketMQ's response code by name, and its remark."""

    code: str
    remark: str


def check_end(
    request: EndTransaction, half: Record | None, now_ms: int, timeout_ms: int = DEFAULT_TIMEOUT_MS
) -> EndRefusal | None:
    """None when ``request`` may end the transaction of ``half``, the record at its physical offset.

    A half message that went back to the half topic has a new place, and the request must name the pair of places that
    belongs to ``half``: an old pair names the old record.
    """
    if half is None or half.topic != HALF_TOPIC:
        return EndRefusal("SYSTEM_ERROR", "Find prepared transaction message failed")
    immunity = half.properties.get(Property.TRANSACTION_IMMUNITY_SECONDS)
    if immunity and not request.from_check:
        age_ms = now_ms - half.born_timestamp
        if age_ms > immunity_ms(immunity, timeout_ms):
            return EndRefusal("ILLEGAL_OPERATION", "the time before the first check is over, a check will ask")
    if half.properties.get(Property.PRODUCER_GROUP) != request.producer_group:
        return EndRefusal("SYSTEM_ERROR", "The producer group wrong")
    if request.topic and half.properties.get(Property.REAL_TOPIC) != request.topic:
        return EndRefusal("SYSTEM_ERROR", "The topic wrong")
    if half.queue_offset != request.queue_offset:
        return EndRefusal("SYSTEM_ERROR", "The transaction state table offset wrong")
    if half.physical_offset != request.physical_offset:
        return EndRefusal("SYSTEM_ERROR", "The commit log offset wrong")
    return None


def immunity_ms(text: str, timeout_ms: int = DEFAULT_TIMEOUT_MS) -> int:
    """How long a half message with this CHECK_IMMUNITY_TIME_IN_SECONDS is not checked; the time-out for no number."""
    seconds = integer(text)
    return timeout_ms if seconds == -1 else seconds * 1000


def committed_record(half: Record, *, rewritten: bool = False) -> Record:
    """The record that a committed ``half`` becomes in its real queue.

    [5.4.0] It has the half message's properties but REAL_TOPIC and REAL_QID, so TRAN_MSG stays. ``rewritten``: the put
    rules of delay or timer will store it elsewhere first; they see it without TRAN_MSG. Raises InvalidMessageError when
    the half message names no real queue.
    """
    topic, queue_id = real_queue(half)
    dropped = (*_REAL, Property.TRANSACTION_PREPARED) if rewritten else _REAL
    properties = {name: value for name, value in half.properties.items() if name not in dropped}
    return derived(
        half,
        topic,
        queue_id,
        broker_order(properties),
        sys_flag=(half.sys_flag & ~SysFlag.TRANSACTION_MASK) | COMMIT,
        prepared_transaction_offset=half.physical_offset,
    )


def real_queue(half: Record) -> tuple[str, int]:
    """(topic, queue id) that ``half`` was sent to. Raises InvalidMessageError when it does not say so."""
    topic = half.properties.get(Property.REAL_TOPIC, "")
    queue_id = integer(half.properties.get(Property.REAL_QUEUE_ID, ""))
    if not topic or queue_id < 0:
        raise InvalidMessageError(f"the half message at {half.physical_offset} names no real topic and queue")
    return topic, queue_id


# ---------------------------------------------------------------- back to the half topic


def renewed_half(half: Record, check_times: int) -> Record:
    """The record that ``half`` is put as again, at the half topic's end, before its producer is asked. As in RocketMQ
    the application's flag and reconsumeTimes do not come along.
    """
    properties = {**half.properties, Property.TRANSACTION_CHECK_TIMES: str(check_times)}
    return derived(half, half.topic, half.queue_id, broker_order(properties), flag=0, reconsume_times=0)


def renewed_immune_half(half: Record, check_times: int) -> Record:
    """The record that an immune ``half`` is put as again: it keeps its first queue offset, and WAIT becomes false."""
    properties = {
        **half.properties,
        Property.TRANSACTION_CHECK_TIMES: str(check_times),
        Property.WAIT: "false",
    }
    properties.setdefault(Property.TRANSACTION_PREPARED_QUEUE_OFFSET, str(half.queue_offset))
    return derived(half, half.topic, half.queue_id, broker_order(properties), flag=0, reconsume_times=0)


def discarded_record(half: Record) -> Record:
    """The record that ``half`` becomes in the discard topic; REAL_TOPIC and REAL_QID stay."""
    return derived(half, DISCARD_TOPIC, 0, broker_order(half.properties))


# ---------------------------------------------------------------- op messages


def op_record(half_offsets: Iterable[int], queue_id: int, now_ms: int, host: Host) -> Record:
    """The op message that says which queue offsets of the half queue ``queue_id`` are done, in the order given."""
    body = "".join(f"{offset}," for offset in half_offsets).encode("ascii")
    return made(OP_TOPIC, queue_id, body, {Property.TAGS: OP_TAG, Property.WAIT: "true"}, now_ms, host)


def op_offsets(op: Record) -> list[int]:
    """The half queue offsets that ``op`` names. What is no number, or no op message, names nothing."""
    if op.properties.get(Property.TAGS) != OP_TAG:
        return []
    parts = op.body.decode("utf-8", "replace").split(",")
    return [offset for offset in map(integer, parts) if offset >= 0]


class OpBuffer:
    """Half offsets of one queue that are done and wait for their op message (spec 12.3). RocketMQ writes an op message
    when ``max_bytes`` of text wait, or when the last one is ``interval_ms`` ago.
    """

    def __init__(self, last_write_ms: int, *, interval_ms: int = 3_000, max_bytes: int = 4_096) -> None:
        self.last_write_ms = last_write_ms
        self.interval_ms = interval_ms
        self.max_bytes = max_bytes
        self._waiting: deque[int] = deque()
        self._bytes = 0

    def add(self, half_offset: int) -> None:
        """Note that the half message at ``half_offset`` is done."""
        self._waiting.append(half_offset)
        self._bytes += _text_bytes(half_offset)

    def due_in_ms(self, now_ms: int) -> int | None:
        """Milliseconds until an op message is due, 0 for now, None while nothing waits."""
        if not self._waiting:
            return None
        if self._bytes >= self.max_bytes:
            return 0
        return max(0, self.last_write_ms + self.interval_ms - now_ms)

    def take(self, now_ms: int) -> list[int]:
        """The offsets of the next op message: as many as begin below ``max_bytes`` of text."""
        taken: list[int] = []
        taken_bytes = 0
        while self._waiting and taken_bytes < self.max_bytes:
            offset = self._waiting.popleft()
            taken.append(offset)
            taken_bytes += _text_bytes(offset)
        self._bytes -= taken_bytes
        self.last_write_ms = now_ms
        return taken


def integer(text: str) -> int:
    """``text`` as a number, -1 for text that is none, or none of Java's long: RocketMQ's reading of its own properties.
    A client may have written it: Python refuses to read thousands of digits.
    """
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MOST_DIGITS:
        return -1
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 63 else -1


def _text_bytes(half_offset: int) -> int:
    return len(str(half_offset)) + 1


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


class CheckStep(Enum):
    """What to do about a half message."""

    STOP = "stop"
    MORE_OPS = "more_ops"
    PASS = "pass"
    RENEW = "renew"
    CHECK = "check"
    DISCARD = "discard"


class CheckDecision(NamedTuple):
    """A step, and the record to append for RENEW, CHECK and DISCARD."""

    step: CheckStep
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
        """Take the next records of the op queue; none when there is nothing new. The newest one's age tells whether an
        end that was sent in time would be there already.
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
        """The present half message cannot be read; the queue continues at ``offset``."""
        self.half_offset = max(self.half_offset + 1, offset)

    def is_over(self, now_ms: int) -> bool:
        """Whether the round has taken as long as it may."""
        return now_ms - self._start_ms > self._rules.longest_round_ms

    def decide(self, half: Record, now_ms: int, proven_ms: int | None = None) -> CheckDecision:
        """What to do about ``half``, the record at :meth:`next_undecided`. ``proven_ms``: the time by a clock that is not
        doubted, by which a half message is given up for its age.
        """
        rules = self._rules
        age_ms = now_ms - half.born_timestamp
        proven_age_ms = age_ms if proven_ms is None else min(age_ms, proven_ms - half.born_timestamp)
        times = half.properties.get(Property.TRANSACTION_CHECK_TIMES)
        check_times = 0 if times is None else integer(times)
        if (times is not None and check_times >= rules.check_max) or proven_age_ms > rules.reserved_ms:
            return CheckDecision(CheckStep.DISCARD, discarded_record(half))
        check_times += 1
        end = self._end_offset
        if half.store_timestamp >= self._start_ms if end is None else half.queue_offset >= end:
            return CheckDecision(CheckStep.STOP)
        immunity = half.properties.get(Property.TRANSACTION_IMMUNITY_SECONDS)
        immune_ms = rules.timeout_ms if immunity is None else immunity_ms(immunity, rules.timeout_ms)
        if immunity is None:
            if 0 <= age_ms <= immune_ms:
                return CheckDecision(CheckStep.STOP)
        elif -immune_ms <= age_ms <= immune_ms:
            first = half.properties.get(Property.TRANSACTION_PREPARED_QUEUE_OFFSET)
            if first is not None and self._is_ended(integer(first)):
                return CheckDecision(CheckStep.PASS)
            return CheckDecision(CheckStep.RENEW, renewed_immune_half(half, check_times))
        if self._must_ask(age_ms, immune_ms):
            return CheckDecision(CheckStep.CHECK, renewed_half(half, check_times))
        return CheckDecision(CheckStep.MORE_OPS)

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
