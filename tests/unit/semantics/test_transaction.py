"""Goal: committed, renewed and discarded half messages and op messages have RocketMQ's bytes and rules.

Method: the committed, renewed, discarded and op records of the golden store are made anew; the checks of an end
request are tried one by one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.transaction import (
    COMMIT,
    DISCARD_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    ROLLBACK,
    EndTransaction,
    OpBuffer,
    check_end,
    committed_record,
    discarded_record,
    immunity_ms,
    integer,
    op_offsets,
    op_record,
    renewed_half,
    renewed_immune_half,
)
from pending_store import BROKER, PendingStore

ADDED = (Property.TRANSACTION_ID, Property.REAL_TOPIC, Property.REAL_QUEUE_ID)


# ---------------------------------------------------------------- commit


def test_a_committed_message_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    stored = pending.of("PendingTx")
    assert len(stored) == 8
    for record in stored:
        half = pending.at(record.prepared_transaction_offset)
        request = EndTransaction("Pending_tx", half.queue_offset, half.physical_offset, COMMIT)
        assert check_end(request, half, record.store_timestamp) is None
        assert pending.has(committed_record(half), record)


def test_what_a_delay_stores_has_no_transaction_property(pending: PendingStore) -> None:
    """The put rules see the committed message after TRAN_MSG was taken from it, and encode it again."""
    half = pending.of(HALF_TOPIC)[0]
    plain, rewritten = committed_record(half), committed_record(half, rewritten=True)
    assert set(plain.properties) - set(rewritten.properties) == {Property.TRANSACTION_PREPARED}
    assert rewritten.sys_flag == COMMIT


@pytest.mark.parametrize("properties", [{}, {"REAL_TOPIC": "orders"}, {"REAL_TOPIC": "orders", "REAL_QID": "x"}])
def test_a_half_message_without_a_real_queue_is_refused(properties: dict[str, str]) -> None:
    with pytest.raises(InvalidMessageError, match="names no real topic"):
        committed_record(Record(HALF_TOPIC, properties=properties))


# ---------------------------------------------------------------- the checks of END_TRANSACTION

HALF = Record(
    HALF_TOPIC,
    0,
    queue_offset=7,
    physical_offset=4_096,
    born_timestamp=1_000_000,
    properties={"PGROUP": "g", "REAL_TOPIC": "orders"},
)
END = EndTransaction("g", 7, 4_096, COMMIT)


@pytest.mark.parametrize(
    ("request_", "remark"),
    [
        (END, None),
        (END._replace(decision=ROLLBACK), None),
        (END._replace(producer_group="h"), "The producer group wrong"),
        (END._replace(queue_offset=6), "The transaction state table offset wrong"),
        (END._replace(physical_offset=1), "The commit log offset wrong"),
        (END._replace(topic="orders"), None),
        (END._replace(topic="others"), "The topic wrong"),
    ],
)
def test_an_end_names_the_group_and_both_places(request_: EndTransaction, remark: str | None) -> None:
    refusal = check_end(request_, HALF, 1_000_001)
    assert (refusal and refusal.remark) == remark
    assert refusal is None or refusal.code == "SYSTEM_ERROR"


@pytest.mark.parametrize("found", [None, replace(HALF, topic="orders")])
def test_an_end_without_a_half_message_is_refused(found: Record | None) -> None:
    refusal = check_end(END, found, 0)
    assert refusal is not None
    assert refusal.remark == "Find prepared transaction message failed"


def test_an_end_that_comes_after_the_immunity_waits_for_the_check() -> None:
    half = replace(HALF, properties={"PGROUP": "g", "CHECK_IMMUNITY_TIME_IN_SECONDS": "10"})
    assert check_end(END, half, 1_010_000) is None
    refusal = check_end(END, half, 1_010_001)
    assert refusal is not None
    assert refusal.code == "ILLEGAL_OPERATION"
    assert check_end(END._replace(from_check=True), half, 1_010_001) is None


def test_an_immunity_that_is_no_number_is_the_time_out() -> None:
    assert [immunity_ms(text, 6_000) for text in ("10", "x", "-1", "0")] == [10_000, 6_000, 6_000, 0]
    assert [integer(text) for text in ("12", "+3", "-4", "", "-", "1.0", "٣")] == [12, 3, -4, -1, -1, -1, -1]


# ---------------------------------------------------------------- back to the half topic


def test_a_half_message_goes_back_as_rocketmq_puts_it(pending: PendingStore) -> None:
    """Checked ones lose the flag and keep WAIT, immune ones have WAIT=false and their first queue offset."""
    checked = immune = 0
    halves = pending.of(HALF_TOPIC)
    for record in halves:
        times = int(record.properties.get(Property.TRANSACTION_CHECK_TIMES, 0))
        if times:
            source = pending.with_key(HALF_TOPIC, record.properties[Property.UNIQUE_KEY])[times - 1]
            if Property.TRANSACTION_PREPARED_QUEUE_OFFSET in record.properties:
                assert pending.has(renewed_immune_half(source, times), record)
                immune += 1
            else:
                assert pending.has(renewed_half(source, times), record)
                checked += 1
    assert (checked, immune) == (15, 2)


def test_a_discarded_half_message_keeps_its_real_topic(pending: PendingStore) -> None:
    stored = pending.of(DISCARD_TOPIC)
    assert len(stored) == 2
    for record in stored:
        source = pending.with_key(HALF_TOPIC, record.properties[Property.UNIQUE_KEY])[-1]
        assert Property.REAL_TOPIC in record.properties
        assert pending.has(discarded_record(source), record)


# ---------------------------------------------------------------- op messages


def test_an_op_message_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    stored = pending.of(OP_TOPIC)
    assert [op_offsets(one) for one in stored] == [
        [3, 2, 5, 4],
        [15, 13],
        [19, 18],
        [32, 31, 34, 35, 38, 37, 41, 40],
    ]
    for record in stored:
        made = op_record(op_offsets(record), 0, record.born_timestamp, BROKER)
        assert pending.has(made, record)


def test_what_is_no_op_message_names_nothing() -> None:
    assert op_offsets(Record(OP_TOPIC, properties={"TAGS": "d"}, body=b"1,x,,-2,3")) == [1, 3]
    assert op_offsets(Record(OP_TOPIC, properties={"TAGS": "e"}, body=b"1,")) == []
    assert op_offsets(Record(OP_TOPIC, body=b"1,")) == []


def test_an_op_message_waits_for_the_interval_or_for_its_size() -> None:
    buffer = OpBuffer(last_write_ms=10_000, interval_ms=3_000, max_bytes=6)
    assert buffer.due_in_ms(99_000) is None
    buffer.add(12)
    assert buffer.due_in_ms(11_000) == 2_000
    assert buffer.due_in_ms(13_000) == 0
    buffer.add(13)
    assert buffer.due_in_ms(11_000) == 0, "6 bytes wait: 12,13,"
    buffer.add(14)
    assert buffer.take(11_000) == [12, 13]
    assert buffer.take(11_000) == [14]
    assert buffer.take(11_000) == []
    assert buffer.due_in_ms(11_000) is None


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 60))
def test_every_end_comes_into_one_op_message_in_its_order(offsets: list[int], max_bytes: int) -> None:
    buffer = OpBuffer(0, max_bytes=max_bytes)
    for offset in offsets:
        buffer.add(offset)
    found: list[int] = []
    while taken := buffer.take(0):
        record = op_record(taken, 0, 0, BROKER)
        assert op_offsets(record) == taken
        assert len(record.body) - len(f"{taken[-1]},") < max_bytes
        found += taken
    assert found == offsets
