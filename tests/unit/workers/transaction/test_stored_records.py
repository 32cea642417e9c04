"""Goal: committed messages and op messages are appended in RocketMQ's bytes, and an end that is refused leaves nothing.

Method: the ends that a golden store's producers asked for are carried out again, on RocketMQ's own half messages; the bytes
that go to the writer are compared with the records that RocketMQ stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.format.constants import Property, SysFlag
from commitmq.format.record import Record, decode_record
from commitmq.semantics import delay, timer
from commitmq.semantics.transaction import COMMIT, HALF_TOPIC, OP_TOPIC, ROLLBACK, EndTransaction, OpBuffer, op_offsets
from commitmq.workers.transaction.ends import Append, Appends, End, Ends, HalfPosition, TransactionTable, placed_commit
from pending_store import BROKER, PendingStore

GROUP = "Pending_tx"


class Writer:
    """The way to the writer: keeps the very bytes, and refuses nothing."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, bytes, str]] = []
        self.host = BROKER
        encoding: Any = object.__new__(Appends)
        encoding.host, encoding._has_crc = BROKER, False
        self._encoded = encoding._encoded

    def put(self, name: str, appends: Sequence[Append], ack: str = "flushed") -> None:
        for one in appends:
            self.stored.append((name, self._encoded(one.record), ack))
            one.place = HalfPosition(len(self.stored), 1_000_000 + len(self.stored))

    def records(self, name: str) -> list[Record]:
        return [decode_record(data) for kind, data, _ in self.stored if kind == name]


def ends_of(pending: PendingStore) -> tuple[Ends, Writer]:
    halves = {record.physical_offset: record for record in pending.of(HALF_TOPIC)}
    writer = Writer()
    topics = SimpleNamespace(tombstone=lambda _: -1)
    ends = Ends(SimpleNamespace(record=halves.get), writer, topics, 6_000)  # type: ignore[arg-type]
    ends.transactions = TransactionTable(0, 0, OpBuffer(0))
    return ends, writer


def end_of(half: Record, decision: int) -> End:
    return End(EndTransaction(GROUP, half.queue_offset, half.physical_offset, int(decision)), False, "flushed")


def as_stored(made: Record, stored: Record) -> Record:
    """``made`` at the place of ``stored``, and with its clock."""
    return replace(
        made,
        queue_offset=stored.queue_offset,
        physical_offset=stored.physical_offset,
        store_timestamp=stored.store_timestamp,
    )


def test_a_committed_message_is_appended_in_rocketmqs_bytes(pending: PendingStore) -> None:
    """All properties of the half message but REAL_TOPIC and REAL_QID, the commit bit, and the half message's place."""
    ends, writer = ends_of(pending)
    stored = pending.of("PendingTx")
    asked = [end_of(pending.at(record.prepared_transaction_offset), int(COMMIT)) for record in stored]
    ends.carry_out(asked, stored[0].store_timestamp)
    assert [end.error for end in asked] == [None] * len(stored)
    made = writer.records("commit")
    assert len(made) == len(stored) == 8
    for one, record in zip(made, stored, strict=True):
        assert pending.has(as_stored(one, record), record)
        half = pending.at(record.prepared_transaction_offset)
        assert half.properties.keys() - one.properties.keys() == {Property.REAL_TOPIC, Property.REAL_QUEUE_ID}
        assert one.sys_flag & SysFlag.TRANSACTION_MASK == COMMIT


def test_op_messages_are_appended_in_rocketmqs_bytes(pending: PendingStore) -> None:
    """The ends of a batch in the order in which they came; properties TAGS and WAIT alone; born at the broker, now."""
    ends, writer = ends_of(pending)
    stored = pending.of(OP_TOPIC)
    for record in stored:
        for offset in op_offsets(record):
            ends.transactions.ops.add(offset)
        assert ends.write_ops(record.born_timestamp) is None
    made = writer.records("op")
    assert len(made) == len(stored) == 4
    for one, record in zip(made, stored, strict=True):
        assert pending.has(as_stored(one, record), record)


def test_an_op_message_has_no_more_than_4096_bytes_of_text_and_a_bit(pending: PendingStore) -> None:
    ends, writer = ends_of(pending)
    for offset in range(10_000, 12_000):
        ends.transactions.ops.add(offset)
    assert ends.transactions.ops.due_in_ms(0) == 0, "it is written at once, not after 3 s"
    ends.write_ops(0)
    sizes = [len(record.body) for record in writer.records("op")]
    assert sizes == [4_098, 4_098, 2_000 * 6 - 2 * 4_098]
    assert [offset for record in writer.records("op") for offset in op_offsets(record)] == list(range(10_000, 12_000))


def test_a_rollback_writes_nothing_but_its_op_message(pending: PendingStore) -> None:
    ends, writer = ends_of(pending)
    half = pending.of(HALF_TOPIC)[0]
    end = end_of(half, int(ROLLBACK))
    ends.carry_out([end], half.store_timestamp)
    assert end.fields == {"decision": "rollback"}
    assert [(name, ack) for name, _, ack in writer.stored] == [("op", "flushed")]
    assert [op_offsets(record) for record in writer.records("op")] == [[half.queue_offset]]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"producer_group": "other"}, "SYSTEM_ERROR", "The producer group wrong"),
        ({"queue_offset": 999}, "SYSTEM_ERROR", "The transaction state table offset wrong"),
        ({"physical_offset": 1}, "SYSTEM_ERROR", "Find prepared transaction message failed"),
    ],
)
@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
def test_an_end_that_names_no_half_message_of_its_group_leaves_nothing(
    pending: PendingStore, change: dict[str, Any], code: str, words: str, decision: int
) -> None:
    ends, writer = ends_of(pending)
    end = end_of(pending.of(HALF_TOPIC)[0], decision)
    end.request = end.request._replace(**change)
    ends.carry_out([end], 0)
    assert end.error is not None
    assert (end.error.code, end.error.message) == (code, words)
    assert writer.stored == []
    assert ends.transactions.ops.due_in_ms(0) is None


def half_with(pending: PendingStore, **more: str) -> Record:
    half = pending.of(HALF_TOPIC)[0]
    return replace(half, properties={**half.properties, **more})


@pytest.mark.parametrize(("level", "queue"), [("1", 0), ("18", 17), ("25", 17)])
def test_a_committed_message_with_a_delay_waits_for_it(pending: PendingStore, level: str, queue: int) -> None:
    """It comes into the schedule topic without TRAN_MSG: RocketMQ's delay rule encodes the cleaned properties again."""
    half = half_with(pending, DELAY=level)
    made = placed_commit(half)
    assert (made.topic, made.queue_id) == (delay.SCHEDULE_TOPIC, queue)
    assert made.properties == {
        **{name: value for name, value in half.properties.items() if name != "TRAN_MSG"},
        "DELAY": str(queue + 1),
    }
    assert (made.sys_flag & SysFlag.TRANSACTION_MASK, made.prepared_transaction_offset) == (
        COMMIT,
        half.physical_offset,
    )


def test_a_delay_level_of_a_committed_message_wins_over_a_time(pending: PendingStore) -> None:
    made = placed_commit(half_with(pending, DELAY="2", TIMER_DELAY_SEC="x", TIMER_DELAY_MS="1", TIMER_DELIVER_MS="1"))
    assert (made.topic, made.queue_id) == (delay.SCHEDULE_TOPIC, 1)
    assert not made.properties.keys() & set(timer.REQUESTS)
    assert placed_commit(half_with(pending, DELAY="0", TIMER_DELAY_SEC="3600")).topic == timer.TIMER_TOPIC


def test_a_committed_message_with_a_time_waits_for_it(pending: PendingStore) -> None:
    made = placed_commit(half_with(pending, TIMER_DELAY_SEC="3600"))
    assert (made.topic, made.queue_id) == (timer.TIMER_TOPIC, 0)
    assert "TRAN_MSG" not in made.properties
    assert made.properties["REAL_TOPIC"] == pending.of(HALF_TOPIC)[0].properties["REAL_TOPIC"]
    passed = placed_commit(half_with(pending, TIMER_DELIVER_MS="1"))
    assert passed.topic == made.properties["REAL_TOPIC"], "its time has passed"
