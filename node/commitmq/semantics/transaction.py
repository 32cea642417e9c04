"""Transactions: half message, commit, rollback, op message (spec 12.3, 18; remoting 3.9).

    send with TRAN_MSG       :mod:`commitmq.workers.writer.put_rules` stores it in RMQ_SYS_TRANS_HALF_TOPIC, which no consumer
                             reads
    END_TRANSACTION commit   :func:`check_end`, then :func:`committed_record` in the real topic, then an op message
    END_TRANSACTION rollback :func:`check_end`, then an op message
    neither in time          :mod:`commitmq.semantics.transaction_check`

An op message names half messages that are done by their queue offsets; nothing is ever removed from the half topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
    """RocketMQ's request END_TRANSACTION; ``decision`` is COMMIT, ROLLBACK or 0 for unknown.

    ``topic``: the message must be for it; empty for any.
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
    """The record that ``half`` is put as again, at the half topic's end, before its producer is asked.

    As in RocketMQ the application's flag and reconsumeTimes do not come along.
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
    """Half offsets of one queue that are done and wait for their op message (spec 12.3).

    RocketMQ writes an op message when ``max_bytes`` of text wait, or when the last one is ``interval_ms`` ago.
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
