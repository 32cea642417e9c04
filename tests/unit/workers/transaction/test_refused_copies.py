"""Goal: a half message whose copy the node refuses for good holds up no other; it can be ended, and is given up in the end.

Method: checks over queues in memory. The way to the writer refuses the copies of one half message.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from commitmq.format.constants import Host
from commitmq.format.record import Record
from commitmq.semantics.transaction import COMMIT, DISCARD_TOPIC, HALF_TOPIC, OP_TOPIC, CheckRules, OpBuffer, op_record
from commitmq.workers.transaction.checks import CheckService
from commitmq.workers.transaction.ends import Append, HalfPosition, TransactionTable

REFUSED = 1
RULES = CheckRules(timeout_ms=10, check_max=3)


class Queues:
    def __init__(self) -> None:
        self.queues: dict[str, list[Record]] = {HALF_TOPIC: [], OP_TOPIC: []}

    def bounds(self, topic: str) -> tuple[int, int]:
        return 0, len(self.queues[topic])

    def records(self, topic: str, offset: int, count: int) -> tuple[int, list[Record]]:
        found = self.queues[topic][offset : offset + count]
        return offset + len(found), found

    def put(self, record: Record) -> HalfPosition:
        queue = self.queues.setdefault(record.topic, [])
        record.queue_offset, record.physical_offset = len(queue), 1_000 * len(queue)
        queue.append(record)
        return HalfPosition(record.queue_offset, record.physical_offset)


class World:
    """``now`` is the clock in ms. ``refuses``: topics that do not take the half message REFUSED any more."""

    def __init__(self) -> None:
        self.queues = Queues()
        self.refuses: tuple[str, ...] = (HALF_TOPIC,)
        self.asked: list[tuple[str, int]] = []
        self.reports: list[str] = []
        for number in range(4):
            properties = {"REAL_TOPIC": "orders", "REAL_QID": "1", "PGROUP": "g", "UNIQ_KEY": str(number)}
            self.queues.put(Record(HALF_TOPIC, 0, properties=properties, born_timestamp=5, store_timestamp=5))
        self.checks = CheckService(
            self.queues,  # type: ignore[arg-type]
            SimpleNamespace(put=self.append),  # type: ignore[arg-type]
            SimpleNamespace(is_gone=lambda *_: False),  # type: ignore[arg-type]
            RULES,
            10,
            lambda half, place: self.asked.append((half.properties["UNIQ_KEY"], place.offset)),
            lambda half, why: self.reports.append(why),
        )
        self.checks.transactions = self.transactions = TransactionTable(0, 0, OpBuffer(0))
        self.now = 1_000

    def append(self, _name: str, appends: Sequence[Append]) -> None:
        for one in appends:
            if one.record.properties["UNIQ_KEY"] == str(REFUSED) and one.record.topic in self.refuses:
                one.code, one.sentence = "PROPERTIES_SIZE_EXCEEDED", "too many"
            else:
                one.record.store_timestamp = self.now
                one.place = self.queues.put(one.record)

    def round(self) -> list[tuple[str, int]]:
        """One round; returns what was asked."""
        self.asked.clear()
        self.now += 100
        self.checks.begin(self.now)
        while self.checks.is_running:
            self.checks.step(self.now)
        return list(self.asked)

    def end(self, offset: int) -> None:
        half: Any = self.queues.queues[HALF_TOPIC][offset]
        self.transactions.note_end(half, HalfPosition(offset, half.physical_offset), int(COMMIT))
        self.queues.put(op_record(self.transactions.ops.take(self.now), 0, self.now, Host("127.0.0.1", 1)))


def test_the_others_are_put_back_and_asked() -> None:
    world = World()
    assert world.round() == [("0", 4), ("1", 1), ("2", 5), ("3", 6)], "the refused one is asked where it is"
    assert len(world.reports) == 1
    assert world.transactions.half_offset == REFUSED, "after a death of the process it is to be found again"
    assert world.round() == [("1", 1), ("0", 7), ("2", 8), ("3", 9)]
    assert len(world.reports) == 1
    assert world.checks.transactions.is_open(REFUSED)


def test_no_op_message_is_passed_while_it_waits() -> None:
    """They say which half messages behind it have ended; a start reads both queues from the positions on."""
    world = World()
    world.round()
    world.end(5)
    world.end(6)
    assert world.round() == [("1", 1), ("0", 7)]
    assert (world.transactions.half_offset, world.transactions.op_offset) == (REFUSED, 0)
    world.end(REFUSED)
    world.end(7)
    assert world.round() == []
    assert (world.transactions.half_offset, world.transactions.op_offset) == (8, 4), "everything has ended"


def test_it_is_given_up_as_it_is_after_the_last_check() -> None:
    world = World()
    asked = [[one for one in world.round() if one[0] == "1"] for _ in range(5)]
    assert asked == [[("1", 1)]] * RULES.check_max + [[], []]
    given_up = [one.properties for one in world.queues.queues[DISCARD_TOPIC] if one.properties["UNIQ_KEY"] == "1"]
    assert len(given_up) == 1
    assert "TRANSACTION_CHECK_TIMES" not in given_up[0]
    assert not world.transactions.is_open(REFUSED)
    assert world.transactions.half_offset > REFUSED


def test_one_that_nothing_takes_is_reported_and_left_behind() -> None:
    world = World()
    world.refuses = (HALF_TOPIC, DISCARD_TOPIC)
    for _ in range(5):
        world.round()
    assert len(world.reports) == 2
    assert "given up" in world.reports[1]
    assert world.transactions.half_offset > REFUSED
