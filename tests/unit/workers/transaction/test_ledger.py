"""Goal: a transaction has one outcome, whichever of its places an end names, and what is forgotten is bounded.

Method: half messages made by hand, put back and ended.
"""

from __future__ import annotations

from dataclasses import replace

from commitmq.format.record import Record, decode_record, encode_record
from commitmq.semantics.transaction import COMMIT, HALF_TOPIC, ROLLBACK, OpBuffer, committed_record, renewed_half
from commitmq.workers.transaction import ledger as module
from commitmq.workers.transaction.ledger import ENDED, PASSED, Ledger, Place, key_of


def half(offset: int, unique: str = "id", **changes: object) -> Record:
    properties = {"REAL_TOPIC": "orders", "REAL_QID": "1", "PGROUP": "g", "UNIQ_KEY": unique, "TRAN_MSG": "true"}
    made = Record(HALF_TOPIC, 0, properties=properties, body=b"x", born_timestamp=5)
    stored = decode_record(encode_record(replace(made, queue_offset=offset, physical_offset=offset * 1_000)))
    return replace(stored, **changes)  # type: ignore[arg-type]


def put_back(ledger: Ledger, source: Record, offset: int) -> Record:
    copy = decode_record(
        encode_record(replace(renewed_half(source, 1), queue_offset=offset, physical_offset=offset * 1_000))
    )
    ledger.note_passed(source.queue_offset, source, Place(offset, offset * 1_000))
    return copy


def test_an_open_transaction_is_at_its_place() -> None:
    ledger = Ledger(3, 0, OpBuffer(0))
    assert ledger.newest(half(3)) == Place(3, 3_000)
    assert ledger.outcome(half(3)) is None
    assert ledger.newest(half(2)) is None, "behind the position nothing is open"


def test_any_place_ends_a_transaction_that_was_put_back() -> None:
    ledger = Ledger(0, 0, OpBuffer(0))
    first = half(0)
    second = put_back(ledger, first, 7)
    assert ledger.newest(first) == ledger.newest(second) == Place(7, 7_000)
    assert (ledger.put_back_from(7), ledger.put_back_from(8)) == ([Place(7, 7_000)], [])
    ledger.note_end(first, Place(7, 7_000), int(COMMIT))
    assert ledger.newest(first) is None
    assert ledger.newest(second) is None
    assert ledger.outcome(first) == ledger.outcome(second) == COMMIT
    assert ledger.ops.take(0) == [7], "the op message names the newest place"
    ledger.pass_to(8, 0)
    assert ledger.outcome(first) == ledger.outcome(second) == COMMIT, "an end may come again later"


def test_what_is_given_up_stays_so() -> None:
    ledger = Ledger(0, 0, OpBuffer(0))
    ledger.note_passed(0, half(0), None)
    assert (ledger.newest(half(0)), ledger.outcome(half(0))) == (None, PASSED)


def test_an_op_message_of_another_process_ends_a_transaction() -> None:
    ledger = Ledger(5, 0, OpBuffer(0))
    ledger.note_known_end(6)
    ledger.note_known_end(4)
    assert not ledger.is_open(6)
    assert ledger.outcome(half(6)) == ENDED
    assert ledger.decided_before == {4}


def test_a_rollback_wants_its_op_message_at_once() -> None:
    ledger = Ledger(0, 0, OpBuffer(0))
    ledger.note_end(half(0), Place(0, 0), int(COMMIT))
    assert not ledger.has_rollback
    ledger.note_end(half(1, "other"), Place(1, 1_000), int(ROLLBACK))
    assert ledger.has_rollback


def test_the_memory_of_past_ends_is_bounded() -> None:
    ledger = Ledger(0, 0, OpBuffer(0))
    count = module._MOST_PAST + 10
    for offset in range(count):
        ledger.note_end(half(offset, str(offset)), Place(offset, offset * 1_000), int(COMMIT))
    ledger.pass_to(count, 0)
    assert ledger.outcome(half(0, "0")) is None
    assert ledger.outcome(half(count - 1, str(count - 1))) == COMMIT


def test_all_records_of_a_transaction_have_its_key() -> None:
    source = half(0)
    committed = decode_record(encode_record(committed_record(source)))
    assert key_of(committed) == key_of(source) == key_of(decode_record(encode_record(renewed_half(source, 2))))
    for other in (half(0, "2"), half(0, born_timestamp=6), half(0, body_crc=1)):
        assert key_of(other) != key_of(source)
