"""Goal: a round of checks is cut into short steps, and both positions follow the transactions that have ended.

Method: queues in memory with many half messages that have ended, each with an op message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from commitmq.format.constants import Host
from commitmq.format.record import Record
from commitmq.semantics.transaction import COMMIT, HALF_TOPIC, OP_TOPIC, OPS_AT_ONCE, CheckRules, OpBuffer, op_record
from commitmq.workers.transaction import checks as module
from commitmq.workers.transaction.checks import CheckService
from commitmq.workers.transaction.ends import HalfPosition, TransactionTable

COUNT = 4 * module._MOST_LOOKS


class Queues:
    """Both queues. ``looks`` counts the questions for the end of the half queue: one for each half message that has ended."""

    def __init__(self, halves: Sequence[Record], ops: Sequence[Record]) -> None:
        self._queues = {HALF_TOPIC: halves, OP_TOPIC: ops}
        self.looks = 0

    def bounds(self, topic: str) -> tuple[int, int]:
        self.looks += topic == HALF_TOPIC
        return 0, len(self._queues[topic])

    def records(self, topic: str, offset: int, count: int) -> tuple[int, list[Record]]:
        found = list(self._queues[topic][offset : offset + count])
        return offset + len(found), found


def half(offset: int) -> Record:
    properties = {"REAL_TOPIC": "orders", "REAL_QID": "1", "PGROUP": "g", "UNIQ_KEY": str(offset)}
    return Record(HALF_TOPIC, 0, offset, offset * 1_000, properties=properties, born_timestamp=5)


def op(offset: int, halves: Sequence[int]) -> Record:
    record = op_record(halves, 0, 5, Host("127.0.0.1", 1))
    record.queue_offset = offset
    return record


def checks_of(ops: Sequence[Record], ended: int) -> tuple[CheckService, Queues]:
    halves = [half(number) for number in range(COUNT)]
    queues = Queues(halves, ops)
    none = SimpleNamespace(is_gone=lambda *_: False)
    checks = CheckService(queues, none, none, CheckRules(), 10, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    checks.transactions = TransactionTable(0, 0, OpBuffer(0))
    for one in halves[:ended]:
        checks.transactions.note_end(one, HalfPosition(one.queue_offset, one.physical_offset), int(COMMIT))
    return checks, queues


def test_a_step_looks_at_few_half_messages() -> None:
    checks, queues = checks_of([], COUNT)
    checks.begin(10)
    steps = 0
    while checks.is_running:
        queues.looks = 0
        checks.step(10)
        steps += 1
        assert queues.looks <= module._MOST_LOOKS
    assert steps > COUNT // module._MOST_LOOKS
    assert checks.transactions.half_offset == COUNT


def test_one_round_passes_all_op_messages_whose_half_messages_are_passed() -> None:
    ended = COUNT - 10
    ops = [op(number, [number]) for number in range(ended)]
    assert len(ops) > 10 * OPS_AT_ONCE
    checks, _ = checks_of([*ops, op(ended, [COUNT - 1]), op(ended + 1, [0])], ended)
    checks.begin(10)
    while checks.is_running:
        checks.step(10)
    assert checks.transactions.half_offset == ended, "the next one is young and open"
    assert checks.transactions.op_offset == ended, "the op message of a half message that was not passed stays"
