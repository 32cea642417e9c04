"""Goal: a transaction has one outcome, whichever of its places an end names, and what is forgotten is bounded.

Method: half messages made by hand, put back and ended.
"""

from __future__ import annotations

from dataclasses import replace

from commitmq.format.record import Record, decode_record, encode_record
from commitmq.semantics.transaction import COMMIT, HALF_TOPIC, ROLLBACK, OpBuffer, committed_record, renewed_half
from commitmq.workers.transaction import ends as module
from commitmq.workers.transaction.ends import ENDED, PASSED, HalfPosition, TransactionTable, key_of


def half(offset: int, unique: str = "id", **changes: object) -> Record:
    properties = {"REAL_TOPIC": "orders", "REAL_QID": "1", "PGROUP": "g", "UNIQ_KEY": unique, "TRAN_MSG": "true"}
    made = Record(HALF_TOPIC, 0, properties=properties, body=b"x", born_timestamp=5)
    stored = decode_record(encode_record(replace(made, queue_offset=offset, physical_offset=offset * 1_000)))
    return replace(stored, **changes)  # type: ignore[arg-type]


def put_back(transactions: TransactionTable, source: Record, offset: int) -> Record:
    copy = decode_record(
        encode_record(replace(renewed_half(source, 1), queue_offset=offset, physical_offset=offset * 1_000))
    )
    transactions.note_passed(source.queue_offset, source, HalfPosition(offset, offset * 1_000))
    return copy


def test_an_open_transaction_is_at_its_place() -> None:
    transactions = TransactionTable(3, 0, OpBuffer(0))
    assert transactions.newest(half(3)) == HalfPosition(3, 3_000)
    assert transactions.outcome(half(3)) is None
    assert transactions.newest(half(2)) is None, "behind the position nothing is open"


def test_any_place_ends_a_transaction_that_was_put_back() -> None:
    transactions = TransactionTable(0, 0, OpBuffer(0))
    first = half(0)
    second = put_back(transactions, first, 7)
    assert transactions.newest(first) == transactions.newest(second) == HalfPosition(7, 7_000)
    assert (transactions.put_back_from(7), transactions.put_back_from(8)) == ([HalfPosition(7, 7_000)], [])
    transactions.note_end(first, HalfPosition(7, 7_000), int(COMMIT))
    assert transactions.newest(first) is None
    assert transactions.newest(second) is None
    assert transactions.outcome(first) == transactions.outcome(second) == COMMIT
    assert transactions.ops.take(0) == [7], "the op message names the newest place"
    transactions.pass_to(8, 0)
    assert transactions.outcome(first) == transactions.outcome(second) == COMMIT, "an end may come again later"


def test_what_is_given_up_stays_so() -> None:
    transactions = TransactionTable(0, 0, OpBuffer(0))
    transactions.note_passed(0, half(0), None)
    assert (transactions.newest(half(0)), transactions.outcome(half(0))) == (None, PASSED)


def test_an_op_message_of_another_process_ends_a_transaction() -> None:
    transactions = TransactionTable(5, 0, OpBuffer(0))
    transactions.note_known_end(6)
    transactions.note_known_end(4)
    assert not transactions.is_open(6)
    assert transactions.outcome(half(6)) == ENDED
    assert transactions.decided_before == {4}


def test_a_rollback_wants_its_op_message_at_once() -> None:
    transactions = TransactionTable(0, 0, OpBuffer(0))
    transactions.note_end(half(0), HalfPosition(0, 0), int(COMMIT))
    assert not transactions.has_rollback
    transactions.note_end(half(1, "other"), HalfPosition(1, 1_000), int(ROLLBACK))
    assert transactions.has_rollback


def test_the_memory_of_past_ends_is_bounded() -> None:
    transactions = TransactionTable(0, 0, OpBuffer(0))
    count = module._MOST_PAST + 10
    for offset in range(count):
        transactions.note_end(half(offset, str(offset)), HalfPosition(offset, offset * 1_000), int(COMMIT))
    transactions.pass_to(count, 0)
    assert transactions.outcome(half(0, "0")) is None
    assert transactions.outcome(half(count - 1, str(count - 1))) == COMMIT


def test_all_records_of_a_transaction_have_its_key() -> None:
    source = half(0)
    committed = decode_record(encode_record(committed_record(source)))
    assert key_of(committed) == key_of(source) == key_of(decode_record(encode_record(renewed_half(source, 2))))
    for other in (half(0, "2"), half(0, born_timestamp=6), half(0, body_crc=1)):
        assert key_of(other) != key_of(source)
