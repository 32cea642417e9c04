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
from commitmq.semantics.pop import ReceiptHandle
from commitmq.semantics.pop_order import FORGET_AFTER_MS, OrderState, first_pop, table_from_json
from commitmq.semantics.pop_revive import CheckPointKey
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.workers.pop import ordered_handler as module
from commitmq.workers.pop.finder import Portion
from commitmq.workers.pop.ordered_finder import Taken, _first, _handed_out
from commitmq.workers.pop.ordered_handler import OrderedHandler
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.parked_pops import Pop
from commitmq.workers.pop.requests import Receipt, receipts_of
from commitmq.workers.pop.shares import Share

NOW = 1_800_000_000_000
KEY = OrderKey("orders", "g", 2)
QUEUE = ("orders", 2)
STATE = first_pop(NOW, 60_000, [10, 11, 13], NOW)


def orders(folder: Path, most: int = 100) -> Orders:
    return Orders(StoreLayout(folder), MagicMock(), most)


def test_the_file_is_rocketmqs(tmp_path: Path) -> None:
    one = orders(tmp_path)
    one.load()
    one.put(KEY, STATE)
    one.put(KEY._replace(queue=0), STATE.changed(11, NOW, NOW + 5))
    one.put(OrderKey("else", "g", 1), STATE)
    one.store()
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
    content = json_config.load(tmp_path / "config" / "consumerOrderInfo.json")
    assert content is not None
    assert list(content["table"]) == ["else@g"]


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
        finder = MagicMock(find=lambda pop: Taken(self.share, [self.portion()] if self.taken else [], False))
        answers = MagicMock(send=lambda client, header, frames=None: self.answers.append(orjson.loads(header)))
        self.revival = MagicMock()
        self.handler = OrderedHandler(finder, self.orders, shares, MagicMock(), self.revival, answers, "b")

    def portion(self) -> Portion:
        return Portion("orders", *QUEUE, 10, tuple(self.taken), self.taken[-1] + 1, [b"x"])

    def commit(self) -> None:
        if self.is_away:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", "the coordinator is away")
        self.commits += 1
        self.share.committed.update(self.share.next)

    def pop(self, request: int = 1, attempt: str | None = None) -> None:
        self.handler.serve(
            Pop(b"c", request, "g", ["orders"], 32, 60_000, 0, None, "earliest", ordered=True, attempt=attempt)
        )

    def store(self) -> list[dict[str, Any]]:
        self.answers.clear()
        self.handler.store(self.commit)
        return self.answers


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turn:
    return Turn(tmp_path, monkeypatch)


def receipt(offset: int, pop_time: int = NOW) -> Receipt:
    key = CheckPointKey("orders", "g", 2, 10, pop_time, "b")
    return Receipt(key, offset, ReceiptHandle(10, pop_time, 60_000, 999, 0, "b", 2, offset))


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
