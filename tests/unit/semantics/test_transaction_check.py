"""Goal: the check service decides as RocketMQ's does, round for round, and keeps its two positions.

Method: the golden broker's first six rounds are run anew over its half and op queues, and must append what it appended;
each rule is tried alone on made-up halves; generated rounds never lose or double a half message.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.transaction import (
    DISCARD_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    CheckRound,
    CheckRules,
    CheckStep,
    integer,
)
from pending_store import PendingStore

APPENDS = (CheckStep.CHECK, CheckStep.RENEW, CheckStep.DISCARD)
GOLDEN = CheckRules(timeout_ms=3_000, check_max=3)
# Just before the first append of each round of the golden broker's first run.
GOLDEN_ROUNDS_MS = [1_795_339_300_000 + ms for ms in (28_620, 32_629, 36_636, 39_649, 42_652, 45_654)]


def run(
    round_: CheckRound, halves: list[Record], ops: list[Record], now_ms: int
) -> list[tuple[CheckStep, Record | None, Record]]:
    """Steps of a round over the queues ``halves`` and ``ops``, without those that ask for more ops."""
    found: list[tuple[CheckStep, Record | None, Record]] = []
    round_.take_ops(ops[round_.next_op_offset :][:32])
    while round_.next_undecided() < len(halves):
        half = halves[round_.half_offset]
        decision = round_.decide(half, now_ms)
        if decision.step is CheckStep.MORE_OPS:
            round_.take_ops(ops[round_.next_op_offset :][:32])
            continue
        found.append((decision.step, decision.record, half))
        if decision.step is CheckStep.STOP:
            break
        round_.passed()
    return found


def test_the_rounds_of_the_golden_broker(pending: PendingStore) -> None:
    half_offset = op_offset = 0
    steps: list[list[str]] = []
    for start_ms in GOLDEN_ROUNDS_MS:
        halves = [one for one in pending.of(HALF_TOPIC) if one.store_timestamp < start_ms]
        ops = [one for one in pending.of(OP_TOPIC) if one.store_timestamp < start_ms]
        round_ = CheckRound(half_offset, op_offset, start_ms, GOLDEN)
        taken = run(round_, halves, ops, start_ms)
        discards = iter([one for one in pending.of(DISCARD_TOPIC) if one.store_timestamp >= start_ms])
        renewals = iter([one for one in pending.of(HALF_TOPIC) if one.store_timestamp >= start_ms])
        for step, made, _ in taken:
            if made is not None:
                assert pending.has(made, next(discards if step is CheckStep.DISCARD else renewals)), step
        steps.append([step.value for step, _, _ in taken])
        half_offset, op_offset = round_.half_offset, round_.new_op_offset()
    assert steps == [
        ["check"] * 6,
        ["check"] * 4,
        ["check"] * 2,
        ["discard"] * 2,
        ["renew", "stop"],
        ["check"] * 3 + ["renew"],
    ]
    # What consumerOffset.json has for CID_RMQ_SYS_TRANS.
    assert (half_offset, op_offset) == (27, 3)


# ---------------------------------------------------------------- rule by rule

BORN = 1_000_000_000
RULES = CheckRules()


def half(offset: int = 0, *, age_ms: int = 60_000, **properties: str) -> Record:
    """A half message whose age is ``age_ms`` at the time 0 of the rounds below."""
    return Record(
        HALF_TOPIC,
        queue_offset=offset,
        born_timestamp=BORN - age_ms,
        store_timestamp=BORN - age_ms,
        properties=properties,
    )


def op(offset: int, *halves: int, born_ms: int = 0) -> Record:
    body = "".join(f"{one}," for one in halves).encode()
    return Record(OP_TOPIC, queue_offset=offset, born_timestamp=BORN + born_ms, properties={"TAGS": "d"}, body=body)


def decided(record: Record, *, ops: tuple[Record, ...] = (), now_ms: int = 0) -> CheckStep:
    round_ = CheckRound(0, 0, BORN, RULES)
    round_.take_ops(ops)
    return round_.decide(record, BORN + now_ms).step


def test_a_half_message_that_is_old_enough_is_checked() -> None:
    assert decided(half(age_ms=6_001)) is CheckStep.CHECK
    assert decided(half(age_ms=6_000)) is CheckStep.STOP


def test_the_counter_begins_with_one_and_15_checks_are_the_last() -> None:
    round_ = CheckRound(0, 0, BORN, RULES)
    record = round_.decide(half(), BORN).record
    assert record is not None
    assert record.properties[Property.TRANSACTION_CHECK_TIMES] == "1"
    assert decided(half(TRANSACTION_CHECK_TIMES="14")) is CheckStep.CHECK
    assert decided(half(TRANSACTION_CHECK_TIMES="15")) is CheckStep.DISCARD
    assert decided(half(TRANSACTION_CHECK_TIMES="what")) is CheckStep.CHECK


def test_a_half_message_older_than_the_log_is_kept_is_discarded() -> None:
    assert decided(half(age_ms=72 * 3_600_000 + 1)) is CheckStep.DISCARD
    assert decided(half(age_ms=72 * 3_600_000)) is CheckStep.CHECK


def test_what_was_stored_after_the_rounds_begin_ends_it() -> None:
    fresh = replace(half(), store_timestamp=BORN)
    assert decided(fresh, now_ms=60_000) is CheckStep.STOP


def test_an_immune_half_message_is_put_again_and_not_asked_about() -> None:
    assert decided(half(age_ms=10_000, CHECK_IMMUNITY_TIME_IN_SECONDS="10")) is CheckStep.RENEW
    assert decided(half(age_ms=10_001, CHECK_IMMUNITY_TIME_IN_SECONDS="10")) is CheckStep.CHECK


def test_an_immune_half_message_can_be_discarded_without_a_check() -> None:
    immune = half(age_ms=1, CHECK_IMMUNITY_TIME_IN_SECONDS="10", TRANSACTION_CHECK_TIMES="15")
    assert decided(immune) is CheckStep.DISCARD


def test_a_renewed_immune_message_that_was_ended_by_its_first_offset_is_passed() -> None:
    renewed = half(9, age_ms=1, CHECK_IMMUNITY_TIME_IN_SECONDS="10", TRAN_PREPARED_QUEUE_OFFSET="4")
    round_ = CheckRound(4, 0, BORN, RULES)
    round_.take_ops([op(0, 4)])
    round_.half_offset = 9
    assert round_.decide(renewed, BORN).step is CheckStep.PASS
    assert round_.new_op_offset() == 1


def test_an_end_from_an_earlier_round_counts_when_the_caller_knows_it() -> None:
    renewed = half(9, age_ms=1, CHECK_IMMUNITY_TIME_IN_SECONDS="10", TRAN_PREPARED_QUEUE_OFFSET="4")
    assert CheckRound(9, 0, BORN, RULES).decide(renewed, BORN).step is CheckStep.RENEW
    assert CheckRound(9, 0, BORN, RULES, decided={4}).decide(renewed, BORN).step is CheckStep.PASS


def test_with_op_messages_at_hand_the_newest_one_decides_whether_more_are_read() -> None:
    """An end that was sent in time may still wait among the unread op messages."""
    assert decided(half(), ops=(op(0, 99, born_ms=6_000),)) is CheckStep.MORE_OPS
    assert decided(half(), ops=(op(0, 99, born_ms=6_001),)) is CheckStep.CHECK


def test_a_producer_whose_clock_is_ahead_is_asked_at_once() -> None:
    assert decided(half(age_ms=-1), now_ms=0) is CheckStep.STOP, "stored after the round began"
    ahead = replace(half(age_ms=-1), store_timestamp=BORN - 1)
    assert decided(ahead) is CheckStep.CHECK


def test_done_half_messages_are_passed_and_their_op_messages_are_done() -> None:
    round_ = CheckRound(10, 5, BORN, RULES)
    round_.take_ops([op(5, 10, 11), op(6, 3), op(7, 13), op(8, 14)])
    assert round_.next_op_offset == 9
    assert round_.next_undecided() == 12
    assert round_.new_op_offset() == 7, "the op messages of halves that lie before the round are done too"
    round_.passed()
    assert round_.next_undecided() == 15
    assert round_.new_op_offset() == 9


def test_an_op_message_behind_an_open_one_does_not_move_the_position() -> None:
    round_ = CheckRound(10, 0, BORN, RULES)
    round_.take_ops([op(0, 11), op(1, 10)])
    assert round_.next_undecided() == 12
    assert round_.new_op_offset() == 2
    waiting = CheckRound(10, 0, BORN, RULES)
    waiting.take_ops([op(0, 12), op(1, 10)])
    assert waiting.next_undecided() == 11
    assert waiting.new_op_offset() == 0


def test_an_unreadable_half_message_is_skipped() -> None:
    round_ = CheckRound(10, 0, BORN, RULES)
    round_.skip_to(14)
    assert round_.half_offset == 14
    round_.skip_to(2)
    assert round_.half_offset == 15, "never back"


def test_a_round_takes_a_minute_at_most() -> None:
    round_ = CheckRound(0, 0, BORN, RULES)
    assert not round_.is_over(BORN + 60_000)
    assert round_.is_over(BORN + 60_001)


@given(st.data())
def test_rounds_neither_lose_nor_double_a_half_message(data: st.DataObject) -> None:
    """Producers end transactions at any time; at last each is ended, or was asked about until it was discarded."""
    rules = CheckRules(check_max=3)
    halves = [half(offset, age_ms=60_000, UNIQ_KEY=str(offset)) for offset in range(data.draw(st.integers(1, 6)))]
    ops: list[Record] = []
    ended: set[str] = set()
    discarded: set[str] = set()
    half_offset = op_offset = 0
    for number in range(6):
        now_ms = BORN + 60_000 * number
        alive = [one for one in halves[half_offset:] if one.properties["UNIQ_KEY"] not in ended | discarded]
        for one in data.draw(st.lists(st.sampled_from(alive), unique_by=id)) if alive else ():
            if one.properties["UNIQ_KEY"] not in ended:
                ops.append(op(len(ops), one.queue_offset, born_ms=60_000 * number - 1))
                ended.add(one.properties["UNIQ_KEY"])
        round_ = CheckRound(half_offset, op_offset, now_ms, rules)
        for step, record, source in run(round_, halves, ops, now_ms):
            key = source.properties["UNIQ_KEY"]
            assert key not in ended | discarded, "nobody asks about what is decided"
            if step is CheckStep.DISCARD:
                discarded.add(key)
            elif step in APPENDS:
                assert record is not None
                halves.append(replace(record, queue_offset=len(halves), store_timestamp=now_ms))
        assert round_.half_offset >= half_offset
        assert round_.new_op_offset() >= op_offset
        half_offset, op_offset = round_.half_offset, round_.new_op_offset()
    assert ended | discarded == {one.properties["UNIQ_KEY"] for one in halves}
    assert half_offset == len(halves)


def test_a_clock_that_was_set_back_stops_no_round() -> None:
    """Half messages have the time of a clock that was four days ahead, by their producers and by the node."""
    ahead = replace(half(age_ms=-345_600_000), store_timestamp=BORN + 345_600_000)
    assert decided(ahead) is CheckStep.STOP, "RocketMQ's rule"
    round_ = CheckRound(0, 0, BORN, RULES, end_offset=1)
    round_.take_ops([])
    assert round_.decide(ahead, BORN).step is CheckStep.CHECK
    immune = replace(ahead, properties={**ahead.properties, "CHECK_IMMUNITY_TIME_IN_SECONDS": "10"})
    assert round_.decide(immune, BORN).step is CheckStep.CHECK, "put back fifteen times, it would be given up"
    assert round_.decide(replace(ahead, queue_offset=1), BORN).step is CheckStep.STOP, "it came in this round"


def test_a_doubted_clock_gives_nothing_up() -> None:
    day_ms = 86_400_000
    round_ = CheckRound(0, 0, BORN + 4 * day_ms, RULES, end_offset=1)
    round_.take_ops([])
    old = half(age_ms=60_000)
    assert round_.decide(old, BORN + 4 * day_ms).step is CheckStep.DISCARD
    assert round_.decide(old, BORN + 4 * day_ms, BORN).step is CheckStep.CHECK
    assert round_.decide(old, BORN + 4 * day_ms, BORN + 4 * day_ms).step is CheckStep.DISCARD


@given(st.text("0123456789-+ x", max_size=9) | st.integers(1, 6_000).map(lambda size: "9" * size), st.integers(0, 3))
def test_what_a_client_writes_into_the_nodes_properties_ends_no_round(text: str, which: int) -> None:
    """Python reads no number of more than 4,300 digits; RocketMQ takes what is no long for none."""
    names = (
        Property.TRANSACTION_CHECK_TIMES,
        Property.TRANSACTION_IMMUNITY_SECONDS,
        Property.TRANSACTION_PREPARED_QUEUE_OFFSET,
    )
    properties = {name: text for name in names[:which] + names[which : which + 1] if text}
    half = Record(HALF_TOPIC, properties=properties, born_timestamp=5, store_timestamp=5)
    assert CheckRound(0, 0, 1_000_000, CheckRules()).decide(half, 1_000_000).step in CheckStep
    assert -(1 << 63) <= integer(text) < 1 << 63
