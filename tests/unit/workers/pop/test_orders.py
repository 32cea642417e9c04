"""Goal: the states of ordered receives are RocketMQ's file, in memory and on disk, and a failed request changes nothing.

Method: states set by hand, stored and loaded; the handler of a turn with a finder, a coordinator and a disk that fail.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest

from commitmq.config import PopConfig
from commitmq.errors import ProtocolError, StoreError
from commitmq.semantics.pop import FORGET_AFTER_MS, OrderState, ReceiptHandle, first_pop, table_from_json, table_to_json
from commitmq.semantics.pop_revive import CheckPointKey
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import journal as orders_journal
from commitmq.store.metadata import json_config
from commitmq.workers.pop import handler as module
from commitmq.workers.pop import orders as orders_module
from commitmq.workers.pop.finder import OrderedPopResult, PoppedMessages, _first, _handed_out
from commitmq.workers.pop.handler import OrderedHandler
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.requests import DeliveryReference, PopRequest, receipts_of
from commitmq.workers.pop.shares import Share
from small_disk import room

NOW = 1_800_000_000_000
KEY = OrderKey("orders", "g", 2)
QUEUE = ("orders", 2)
STATE = first_pop(NOW, 60_000, [10, 11, 13], NOW)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "now_ms", lambda: NOW)


def orders(folder: Path, most: int = 100) -> Orders:
    StoreLayout(folder).own.mkdir(exist_ok=True)
    return Orders(StoreLayout(folder), MagicMock(), room(), PopConfig(max_ordered_queues=most))


def test_the_file_is_rocketmqs(tmp_path: Path) -> None:
    one = orders(tmp_path)
    one.load()
    one.put(KEY, STATE)
    one.put(KEY._replace(queue=0), STATE.changed(11, NOW, NOW + 5))
    one.put(OrderKey("else", "g", 1), STATE)
    one.store()
    assert not (tmp_path / "config").exists(), "the journal has it"
    one.snapshot(0)
    text = (tmp_path / "config" / "consumerOrderInfo.json").read_text(encoding="utf-8")
    assert text.startswith('{\n\t"orderedConsumptionLevel":"QUEUE",\n\t"table":{\n\t\t"orders@g":{\n\t\t\t2:{')
    assert table_from_json(json_config.loads(text)) == {
        ("orders", "g"): {2: STATE, 0: STATE.changed(11, NOW, NOW + 5)},
        ("else", "g"): {1: STATE},
    }
    again = orders(tmp_path)
    again.load()
    assert (again.get(KEY), len(again)) == (STATE, 3)
    again.put(KEY, None)
    again.put(KEY._replace(queue=0), None)
    again.store()
    again.close()
    content = json_config.load(tmp_path / "config" / "consumerOrderInfo.json")
    assert content is not None
    assert list(content["table"]) == ["else@g"]


def files(folder: Path) -> tuple[bytes, bytes]:
    """RocketMQ's file and the journal."""
    layout = StoreLayout(folder)
    path = orders_journal.snapshot_path(layout)
    return (path.read_bytes() if path.exists() else b""), orders_journal.journal_path(layout).read_bytes()


def loaded(folder: Path) -> Orders:
    """As after a death: the one before is not closed."""
    one = orders(folder)
    one.load()
    return one


def test_each_store_survives_a_death_and_costs_what_changed(tmp_path: Path) -> None:
    one = loaded(tmp_path)
    for queue in range(300):
        one.put(KEY._replace(queue=queue), STATE.changed(11, NOW, NOW + queue))
    one.store()
    one.snapshot(0)
    sizes = []
    for number in range(3):
        before = len(files(tmp_path)[1])
        one.put(KEY, STATE.changed(13, NOW, NOW + number))
        one.store()
        sizes.append(len(files(tmp_path)[1]) - before)
    assert max(sizes) < 300, "one state, and not three hundred"
    again = loaded(tmp_path)
    assert again.get(KEY) == STATE.changed(13, NOW, NOW + 2)
    assert again.get(KEY._replace(queue=299)) == STATE.changed(11, NOW, NOW + 299)
    assert len(again) == 300
    again.put(KEY, None)
    again.store()
    again.store()
    last = loaded(tmp_path)
    assert (last.get(KEY), len(last)) == (None, 299)
    assert dict(last._all()) == {
        OrderKey(topic, group, queue): state
        for (topic, group), states in orders_journal.read(StoreLayout(tmp_path)).items()
        for queue, state in states.items()
    }


def test_a_file_of_every_moment_and_a_journal_that_fit_give_the_state(tmp_path: Path) -> None:
    """A death may leave the file before or after any snapshot, with the journal before or after it."""
    states = [STATE, STATE.acked(10, NOW)[0], STATE.acked(10, NOW)[0].acked(11, NOW)[0]]
    one = loaded(tmp_path)
    found = []
    for state in states:
        one.put(KEY, state)
        one.store()
        found.append((files(tmp_path), state))
        one.snapshot(0, at_once=True)
        found.append((files(tmp_path), state))
    layout = StoreLayout(tmp_path)
    for (snapshot, journal), state in found:
        path = orders_journal.snapshot_path(layout)
        json_config.backup_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if snapshot:
            path.write_bytes(snapshot)
        orders_journal.journal_path(layout).write_bytes(journal)
        again = loaded(tmp_path)
        assert again.get(KEY) == state
        again.close()


@pytest.mark.parametrize("step", ["append", "write", "journal"])
def test_a_store_that_failed_is_made_up_for_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    one = loaded(tmp_path)
    one.put(KEY, STATE)
    one.store()
    acked = STATE.acked(10, NOW)[0]
    places = {
        "append": ("commitmq.store.metadata.journal.disk.sync", OSError(5, "no")),
        "write": ("commitmq.store.metadata.json_config.replace_bytes", StoreError("no")),
        "journal": ("commitmq.store.metadata.journal.Journal._new_file", StoreError("no")),
    }
    with monkeypatch.context() as broken:
        broken.setattr(places["append"][0], MagicMock(side_effect=places["append"][1]))
        one.put(KEY, acked)
        with pytest.raises(StoreError):
            one.store()
    one.put(KEY, STATE)  # (the handler takes it back)
    if step != "append":
        with monkeypatch.context() as broken:
            broken.setattr(places[step][0], MagicMock(side_effect=places[step][1]))
            with pytest.raises(StoreError):
                one.store()
            assert loaded(tmp_path).get(KEY) in (STATE, acked)
    one = loaded(tmp_path) if step == "journal" else one
    one.put(KEY, acked)
    one.store()
    assert loaded(tmp_path).get(KEY) == acked


def test_a_file_of_rocketmqs_that_the_journal_does_not_know(tmp_path: Path) -> None:
    one = loaded(tmp_path)
    kept, older, same, dropped = (KEY._replace(queue=queue) for queue in range(4))
    for key in (kept, older, same, dropped):
        one.put(key, STATE.acked(10, NOW)[0])
    one.put(same, STATE.acked(10, NOW)[0].changed(11, NOW, NOW, untried=True))
    one.store()
    one.put(dropped, None)
    one.store()
    theirs = {1: first_pop(NOW + 5, 60_000, [13], NOW + 5), 2: STATE.acked(13, NOW)[0], 7: STATE}
    layout = StoreLayout(tmp_path)
    json_config.persist(orders_journal.snapshot_path(layout), table_to_json({("orders", "g"): theirs}))
    again = loaded(tmp_path)
    assert again.get(kept) == STATE.acked(10, NOW)[0]
    assert again.get(older) == theirs[1], "a later receive counts"
    both = again.get(same)
    assert both is not None
    assert both.acked_bits == 0b101, "acked by either"
    assert both.untried == {11}
    assert again.get(KEY._replace(queue=7)) == STATE
    assert again.get(dropped) is None


def test_damaged_files_are_set_aside(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    one = loaded(tmp_path)
    one.put(KEY, STATE)
    one.store()
    one.snapshot(0)
    one.put(KEY._replace(queue=0), STATE)
    one.store()
    orders_journal.journal_path(layout).write_bytes(b"no journal")
    again = loaded(tmp_path)
    assert (again.get(KEY), again.get(KEY._replace(queue=0))) == (STATE, None)
    assert orders_journal.journal_path(layout).with_name("orders.journal.damaged").exists()
    again.put(KEY._replace(queue=1), STATE)
    again.store()
    orders_journal.snapshot_path(layout).write_text("{no")
    last = loaded(tmp_path)
    assert (last.get(KEY), last.get(KEY._replace(queue=1))) == (None, STATE), "what the journal has is left"
    last.put(KEY, STATE)
    last.store()
    assert loaded(tmp_path).get(KEY) == STATE


def test_the_end_of_a_block_is_told(tmp_path: Path) -> None:
    one = orders(tmp_path)
    one.put(KEY, STATE)
    assert one.next_end_ms() == NOW + 60_000
    assert one.ended(NOW + 59_999) == set()
    assert one.ended(NOW + 60_000) == {KEY}
    acked = STATE
    for offset in STATE.offsets:
        acked, _ = acked.acked(offset, NOW)
    one.put(KEY, acked)
    assert one.ended(NOW) == {KEY}, "all of it is done"
    for _ in range(5_000):
        one.put(KEY, STATE)
    assert len(one._ends) < 1_100


def test_too_many_queues_are_refused_when_none_is_done(tmp_path: Path) -> None:
    one = orders(tmp_path, most=2)
    done, _ = first_pop(NOW, 60_000, [5], NOW).acked(5, NOW)
    one.put(KEY, STATE)
    one.put(KEY._replace(queue=0), done)
    one.check_room(KEY, NOW)
    one.check_room(KEY._replace(queue=7), NOW)
    assert len(one) == 1, "the one that is done made room"
    one.put(KEY._replace(queue=7), STATE)
    with pytest.raises(ProtocolError, match=re.escape("pop.max_ordered_queues")):
        one.check_room(KEY._replace(queue=8), NOW)
    one.check_room(KEY, NOW)


def test_what_rocketmq_drops_is_dropped(tmp_path: Path) -> None:
    one = orders(tmp_path)
    old = first_pop(NOW - FORGET_AFTER_MS - 1, 60_000, [1], NOW - FORGET_AFTER_MS - 1)
    long = first_pop(NOW - FORGET_AFTER_MS - 1, 2 * FORGET_AFTER_MS, [1], NOW - FORGET_AFTER_MS - 1)
    for queue, state in enumerate((old, long, STATE, STATE)):
        one.put(KEY._replace(queue=queue), state)
    one.forget_old(NOW, lambda topic, queue: queue < 3)
    assert [key.queue for key, _ in one._all()] == [1, 2]


@pytest.mark.parametrize("jump_ms", [2_000, -2_000, 3_600_000, -3_600_000, 345_600_000, -345_600_000])
def test_a_queue_is_blocked_for_as_long_as_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_ms: int
) -> None:
    """The clock is set in the middle of the minute; then the process dies."""
    one = orders(tmp_path)
    one.load()
    one.put(KEY, STATE)

    def is_blocked(orders: Orders, now: int) -> bool:
        monkeypatch.setattr(orders_module, "now_ms", lambda: now)
        state = orders.get(KEY)
        assert state is not None
        return state.is_blocked(orders.time_of(KEY))

    one.shift(jump_ms)
    assert is_blocked(one, NOW + jump_ms + 59_999)
    assert one.next_end_ms() == NOW + jump_ms + 60_000
    assert not is_blocked(one, NOW + jump_ms + 60_000)
    one.store()
    monkeypatch.setattr(orders_module, "now_ms", lambda: NOW + jump_ms)
    again = loaded(tmp_path)
    if jump_ms < 0:
        assert is_blocked(again, NOW + jump_ms + 59_999), "a new process knows no better than that it was just now"
    assert not is_blocked(again, NOW + jump_ms + 60_000)
    assert again.ended(NOW + jump_ms + 60_000) == {KEY}


def test_messages_acked_behind_a_gap_are_passed_over() -> None:
    state, _ = STATE.acked(11, NOW)
    assert [offset for offset in range(9, 15) if state.passes_over(offset, 10)] == [11, 12]
    assert not any(state.passes_over(offset, 9) for offset in range(9, 15)), "a person has set the offset"
    assert not OrderState(0, 0, (), 0).passes_over(0, 0)
    behind = state.acked_below(11)
    assert (behind.next_offset(), behind.acked_below(11)) == (13, behind)
    assert not behind.passes_over(11, 11)
    assert not behind.acked_below(14).is_blocked(NOW)


def test_acks_behind_a_gap_are_kept_by_the_next_receives() -> None:
    """RocketMQ forgets them. A receive of fewer messages must not either."""
    state = first_pop(NOW, 60_000, [10, 11, 13, 14], NOW)
    for offset in (11, 14):
        state, _ = state.acked(offset, NOW)
    again = state.popped(NOW + 1, 60_000, [10], NOW + 1).keeping(state)
    assert (again.offsets, again.next_offset(), again.repeated()) == ((10, 11, 13, 14), 10, [(10, 1)])
    assert not again.is_blocked(NOW + 60_001), "the one that was not handed out holds up nothing"
    assert not again.is_out(11, NOW + 1)
    after, commit = again.acked(10, NOW + 1)
    assert commit == 13
    third = after.popped(NOW + 2, 60_000, [13, 15], NOW + 2).keeping(after)
    assert (third.offsets, third.repeated()) == ((13, 14, 15), [(13, 1)])
    assert OrderState.from_json(third.to_json()) == third
    third, commit = third.acked(13, NOW + 2)
    assert commit == 15
    assert third.room(13) == 61


def test_what_is_handed_out_behind_a_message_is_bounded() -> None:
    state = first_pop(NOW, 60_000, range(10, 74), NOW)
    for offset in range(11, 74):
        state, _ = state.acked(offset, NOW)
    assert state.to_json()["cm"] == -2
    assert (state.room(10), _handed_out(state, 10, [10, 11, 74])) == (0, [0])
    assert _handed_out(state, 9, [9, 10, 11]) == [0, 1, 2], "a person has set the offset back"
    assert _handed_out(None, 9, [9]) == [0]
    assert (_first(state, 10, 12), _first(state, 10, 10), _first(None, 3, 7)) == (74, 10, 7), "the filter has changed"


# ---------------------------------------------------------------- the handler


class Turn:
    """A handler with what is around it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "now_ms", lambda: NOW)
        self.orders = orders(folder)
        self.share = Share("g", ordered=True, next={QUEUE: 10}, committed={QUEUE: 10})
        self.answers: list[dict[str, Any]] = []
        self.taken = [10, 11, 13]
        self.commits = 0
        self.is_away = False
        shares = MagicMock(of=lambda *_, **__: self.share, get=lambda group: self.share)
        finder = MagicMock(
            find=lambda pop: OrderedPopResult(self.share, [self.portion()] if self.taken else [], False),
            state=self.orders.get,
        )
        answers = MagicMock(send=lambda client, header, frames=None: self.answers.append(orjson.loads(header)))
        self.revival = MagicMock()
        self.handler = OrderedHandler(finder, self.orders, shares, MagicMock(), self.revival, answers, "b")

    def portion(self) -> PoppedMessages:
        return PoppedMessages("orders", *QUEUE, 10, tuple(self.taken), self.taken[-1] + 1, [b"x"])

    def commit(self) -> None:
        if self.is_away:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", "the coordinator is away")
        self.commits += 1
        self.share.committed.update(self.share.next)

    def pop(self, request: int = 1, attempt: str | None = None) -> None:
        self.handler.serve(
            PopRequest(b"c", request, "g", ["orders"], 32, 60_000, 0, None, "earliest", ordered=True, attempt=attempt)
        )

    def store(self) -> list[dict[str, Any]]:
        self.answers.clear()
        self.handler.store(self.commit)
        return self.answers


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turn:
    return Turn(tmp_path, monkeypatch)


def receipt(offset: int, pop_time: int = NOW) -> DeliveryReference:
    key = CheckPointKey("orders", "g", 2, 10, pop_time, "b")
    return DeliveryReference(key, offset, ReceiptHandle(10, pop_time, 60_000, 999, 0, "b", 2, offset))


def test_an_ack_commits_the_first_message_that_is_out(turn: Turn) -> None:
    turn.pop()
    (answer,) = turn.store()
    assert (answer["revive_queue"], answer["pop_time"], answer["parts"][0]["counts"]) == (999, NOW, [])
    assert turn.commits == 0
    turn.handler.ack(b"c", {"id": 2}, [receipt(11), receipt(12), receipt(13, NOW - 1)])
    assert turn.store()[0]["late"] == [1, 2], "one was not handed out, one is of another receive"
    assert (turn.share.committed[QUEUE], turn.commits) == (10, 1)
    turn.handler.ack(b"c", {"id": 3}, [receipt(10)])
    assert turn.store()[0]["late"] == []
    assert turn.share.committed[QUEUE] == 13
    turn.handler.ack(b"c", {"id": 4}, [receipt(10), receipt(13)])
    assert turn.store()[0]["late"] == [0]
    assert turn.share.committed[QUEUE] == 14


def test_an_ack_whose_offset_could_not_be_committed_is_repeated(turn: Turn) -> None:
    turn.pop()
    turn.store()
    turn.is_away = True
    turn.handler.ack(b"c", {"id": 2}, [receipt(10)])
    (answer,) = turn.store()
    assert (answer["code"], answer["retry_after_ms"]) == ("SERVICE_NOT_AVAILABLE", 200)
    turn.is_away = False
    turn.handler.ack(b"c", {"id": 3}, [receipt(10)])
    assert turn.store()[0]["late"] == []
    assert turn.share.next[QUEUE] == turn.share.committed[QUEUE] == 11
    turn.handler.ack(b"c", {"id": 4}, [receipt(10)])
    assert turn.store()[0]["late"] == [0]


def test_a_disk_that_is_full_takes_everything_of_the_turn_back(turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    turn.pop()
    turn.store()
    before = turn.orders.get(KEY)
    with monkeypatch.context() as full:
        full.setattr(turn.orders, "store", MagicMock(side_effect=StoreError("no space")))
        turn.handler.ack(b"c", {"id": 2}, [receipt(10)])
        turn.handler.nack(b"c", {"id": 3}, [receipt(11)])
        assert [one["code"] for one in turn.store()] == ["SERVICE_NOT_AVAILABLE"] * 2
    assert (turn.orders.get(KEY), turn.share.committed[QUEUE]) == (before, 11), "the offset went first"
    turn.handler.ack(b"c", {"id": 4}, [receipt(11)])
    assert turn.store()[0]["late"] == []
    assert turn.share.committed[QUEUE] == 13, "what lies below the offset is acked"


def test_what_comes_back_untried_is_no_dead_letter(turn: Turn) -> None:
    turn.share.max_retries = 0
    turn.pop()
    turn.store()
    turn.handler.nack(b"c", {"id": 2, "untried": True}, [receipt(11)])
    assert turn.store()[0]["late"] == []
    turn.handler._revival.copy.assert_called_once_with([])  # type: ignore[attr-defined]
    state = turn.orders.get(KEY)
    assert state is not None
    assert state.untried == {11}
    assert state.is_out(11, state.pop_time)


def test_a_request_that_fails_leaves_the_others_of_its_turn_alone(turn: Turn) -> None:
    turn.pop()
    turn.store()
    turn.handler.ack(b"c", {"id": 2}, [receipt(10)])
    mark = turn.handler.mark()
    turn.handler.ack(b"c", {"id": 3}, [receipt(11)])
    turn.handler.roll_back(mark)
    assert [one["id"] for one in turn.store()] == [2]
    assert turn.share.committed[QUEUE] == 11
    state = turn.orders.get(KEY)
    assert state is not None
    assert state.acked_bits == 0b001


def test_each_receive_of_a_queue_has_a_time_of_its_own(turn: Turn) -> None:
    turn.pop(1)
    turn.pop(2)
    assert [one["pop_time"] for one in turn.store()] == [NOW, NOW + 1]
    turn.handler.ack(b"c", {"id": 3}, [receipt(10)])
    assert turn.store()[0]["late"] == [0], "of the receive before"


def test_a_change_keeps_the_time_by_which_acks_are_known(turn: Turn) -> None:
    turn.pop()
    turn.store()
    turn.handler.extend(b"c", {"id": 2}, [receipt(11), receipt(99)], 300_000)
    assert turn.store()[0]["handles"] == [f"11 {NOW} 300000 999 0 b 2 11", None]
    state = turn.orders.get(KEY)
    assert state is not None
    assert (state.visible_ms, state.free_at(NOW)) == ({11: NOW + 300_000}, NOW + 300_000)
    (again,) = receipts_of(
        {"group": "g", "receipts": [["orders", f"11 {NOW} 900000000 999 0 b 2 11"]]}, PopConfig(), 8, NOW
    )
    assert again.offset == 11, "however long it was extended"


def test_what_comes_in_order_needs_no_retry_topic() -> None:
    with pytest.raises(ProtocolError, match="none of this node"):
        receipts_of({"group": "g", "receipts": [["orders", f"11 {NOW} 60000 999 1 b 2 11"]]}, PopConfig(), 8, NOW)
