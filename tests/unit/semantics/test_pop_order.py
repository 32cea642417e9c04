"""Goal: ordered pops block, commit and repeat as RocketMQ's do, and keep its file.

Method: the golden store's consumerOrderInfo.json is read and written again, and reached anew by the pops, acks and
changes that led to it; each rule is tried by hand; generated acks commit without a gap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.semantics.pop import OrderAck, OrderState, first_pop, table_from_json, table_to_json
from commitmq.store.metadata import json_config
from pending_store import PendingStore

NOW = 1_795_339_374_286
HOUR_MS = 3_600_000
STATE = first_pop(NOW, HOUR_MS, [10, 11, 13], NOW + 1)


def golden(pending: PendingStore) -> dict[int, OrderState]:
    text = (pending.root / "config" / "consumerOrderInfo.json").read_text(encoding="utf-8")
    content = json_config.loads(text)
    table = table_from_json(content)
    assert table_to_json(table) == content
    return table["PendingPopOrder", "Pending_popfifo"]


def test_the_golden_states_are_those_of_their_pops(pending: PendingStore) -> None:
    states = golden(pending)
    times = {queue: (state.pop_time, state.invisible_ms) for queue, state in states.items()}
    first = first_pop(*times[0], range(5), states[0].last_pop_ms)
    assert first == states[0]

    second = first_pop(*times[1], range(5), states[1].last_pop_ms)
    for offset, commit in ((0, 1), (1, 2)):
        second, found = second.acked(offset, times[1][0])
        assert found == commit
    second = second.changed(3, times[1][0], states[1].visible_ms[3])
    assert second == states[1]
    assert second.next_offset() == 2, "the group's offset in consumerOffset.json"

    before = first_pop(NOW, HOUR_MS, range(3), NOW)
    third = before.popped(*times[2], [3, 4], states[2].last_pop_ms)
    assert third == states[2]
    assert third.to_json()["oc"] == {}


def test_an_empty_file_has_no_states() -> None:
    assert table_from_json({"orderedConsumptionLevel": "QUEUE", "table": {}}) == {}
    assert table_from_json({"table": {"no-group": {}, "t@g": {"3": {"o": [7], "oc": {"7": 2}}}}}) == {
        ("t", "g"): {3: OrderState(0, 0, (7,), 0, counts={7: 2})}
    }
    files: list[Any] = [[], {"table": {"t@g": {0: []}}}, {"table": {"t@g": {0: {"o": ["x"]}}}}]
    for broken in files:
        with pytest.raises(InvalidMessageError):
            table_from_json(broken)


def test_a_queue_with_messages_out_is_blocked_until_their_time() -> None:
    assert STATE.is_blocked(NOW + HOUR_MS - 1)
    assert not STATE.is_blocked(NOW + HOUR_MS)
    assert STATE.free_at(NOW) == NOW + HOUR_MS


def test_a_changed_time_counts_instead() -> None:
    later = STATE.changed(11, NOW, NOW + 2 * HOUR_MS)
    assert later.is_blocked(NOW + HOUR_MS)
    assert later.free_at(NOW) == NOW + 2 * HOUR_MS
    assert STATE.changed(11, NOW - 1, 0) == STATE, "of an earlier pop"


def test_acked_messages_do_not_block() -> None:
    state = STATE
    for offset in (10, 11, 13):
        state, _ = state.acked(offset, NOW)
    assert not state.is_blocked(NOW)
    assert state.free_at(NOW) == NOW


def test_a_repeated_request_gets_the_same_messages_without_a_count() -> None:
    state = replace(STATE, attempt_id="a", counts={10: 1})
    assert not state.is_blocked(NOW, "a")
    assert state.is_blocked(NOW, "b")
    assert state.is_blocked(NOW)
    assert state.popped(NOW + 9, HOUR_MS, [10, 11, 13], NOW + 9, "a").counts == {10: 1}
    assert state.popped(NOW + 9, HOUR_MS, [10, 11, 13], NOW + 9, "b").counts == {10: 2, 11: 1, 13: 1}


def test_what_comes_again_is_counted_also_behind_a_gap() -> None:
    state, _ = STATE.acked(11, NOW)
    again = state.popped(NOW + HOUR_MS, HOUR_MS, [10, 11, 13, 14], NOW + HOUR_MS)
    assert again.repeated() == [(10, 1), (11, 1), (13, 1)]
    assert again.acked_bits == 0
    third = again.popped(NOW + 2 * HOUR_MS, HOUR_MS, [13, 14], NOW + 2 * HOUR_MS)
    assert third.repeated() == [(13, 2), (14, 1)]


def test_an_ack_of_an_earlier_pop_is_ignored_and_an_unknown_offset_is_illegal() -> None:
    assert STATE.acked(10, NOW - 1) == (STATE, OrderAck.IGNORED)
    assert STATE.acked(12, NOW) == (STATE, OrderAck.ILLEGAL)
    empty = replace(STATE, offsets=())
    assert empty.acked(10, NOW) == (empty, OrderAck.ILLEGAL)


@given(st.permutations([10, 11, 13, 20]))
def test_acks_in_any_order_commit_up_to_the_first_gap(order: list[int]) -> None:
    state = first_pop(NOW, HOUR_MS, [10, 11, 13, 20], NOW)
    acked: set[int] = set()
    for offset in order:
        acked.add(offset)
        state, commit = state.acked(offset, NOW)
        assert commit == next((one for one in (10, 11, 13, 20) if one not in acked), 21)


offsets = st.lists(st.integers(0, 2**40), min_size=1, max_size=64, unique=True).map(sorted)
counts = st.none() | st.dictionaries(st.integers(0, 2**40), st.integers(1, 99), max_size=3)


@given(offsets, st.integers(0, 2**64 - 1), st.none() | st.text(max_size=9), counts)
def test_a_state_comes_back_from_its_json(
    places: list[int], bits: int, attempt: str | None, times: dict[int, int] | None
) -> None:
    state = OrderState(NOW, 5, tuple(places), NOW, bits, attempt, {1: 2}, times)
    text = json_config.dumps(table_to_json({("t", "g"): {0: state}}))
    assert table_from_json(json_config.loads(text)) == {("t", "g"): {0: state}}
    assert -(2**63) <= state.to_json()["cm"] < 2**63, "Java's long"


def test_what_comes_back_untried_is_not_counted() -> None:
    state = STATE.changed(11, NOW, NOW, untried=True)
    assert state.changed(11, NOW, NOW) == STATE.changed(11, NOW, NOW), "what is said last counts"
    assert state.changed(13, NOW - 1, NOW, untried=True) == state, "an earlier pop"
    values = state.to_json()
    assert values["untried"] == [11]
    assert OrderState.from_json(values) == state
    assert "untried" not in STATE.to_json()

    second = state.popped(NOW + 1, HOUR_MS, [10, 11, 13], NOW + 1)
    assert (second.counts, second.untried) == ({10: 1, 13: 1}, frozenset())
    third = second.changed(13, NOW + 1, NOW, untried=True).popped(NOW + 2, HOUR_MS, [10, 11, 13], NOW + 2)
    assert third.counts == {10: 2, 11: 1, 13: 1}


def test_what_came_back_untried_and_waits_behind_a_short_pop_is_not_counted_later() -> None:
    state = STATE.changed(13, NOW, NOW, untried=True)
    short = state.popped(NOW + 1, HOUR_MS, [10], NOW + 1).keeping(state)
    assert short.untried == {13}
    assert short.popped(NOW + 2, HOUR_MS, [10, 11, 13], NOW + 2).counts == {10: 2, 11: 1}
