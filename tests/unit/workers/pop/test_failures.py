"""Goal: a failure in the middle neither loses a message nor multiplies it.

Method: the parts of the process with others around them that fail where a node's would: the writer refuses, the coordinator
does not answer, a filter or a read raises, the writer dies before the end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from commitmq.config import NodeConfig, PopConfig
from commitmq.errors import CorruptRecordError
from commitmq.semantics.pop_revive import Ack, CheckPoint, CheckPointKey, DuePoint, ReviveRound, revive_topic
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.pop import finder as finder_module
from commitmq.workers.pop import handler as handler_module
from commitmq.workers.pop import revival as revive_module
from commitmq.workers.pop.finder import Finder
from commitmq.workers.pop.handler import Handler
from commitmq.workers.pop.points import CheckPoints, OpenCheckPoint, PopStep, PopTurn, Records
from commitmq.workers.pop.process import PopProcess
from commitmq.workers.pop.recovery import Reading
from commitmq.workers.pop.requests import ParkedPops, PopRequest
from commitmq.workers.pop.revival import RevivedMessage, ReviveOutcome, ReviveQueues
from commitmq.workers.pop.shares import Share
from commitmq.workers.runtime.run_mover import PutMessageResult
from commitmq.workers.runtime.topic_view import TopicView

KEY = CheckPointKey("orders", "g", 0, 40, 1_000, "b")


class Revival:
    """Copies what is in no topic of ``refused``, the rest gets the outcome ``AGAIN`` or PUT_OFF."""

    def __init__(self, *refused: str, outcome: ReviveOutcome = ReviveOutcome.AGAIN) -> None:
        self.refused, self.outcome = set(refused), outcome
        self.copied: list[tuple[str, int]] = []
        self.stored: list[CheckPoint] = []

    def copy(self, returns: list[RevivedMessage]) -> list[ReviveOutcome]:
        outcomes = [
            ReviveOutcome.DONE if one.check_point.key.topic not in self.refused else self.outcome for one in returns
        ]
        self.copied += [
            (one.check_point.key.topic, one.offset)
            for one, outcome in zip(returns, outcomes, strict=True)
            if outcome is ReviveOutcome.DONE
        ]
        return outcomes

    def put_off(self, check_points: list[CheckPoint], revive_queue: int, now_ms: int) -> bool:
        self.stored += check_points
        return True


def test_messages_that_could_not_come_back_come_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10_000
    monkeypatch.setattr(handler_module, "now_ms", lambda: now)
    points, revival = CheckPoints(PopConfig()), Revival("orders")
    handler = Handler(
        PopConfig(), 8, MagicMock(), points, MagicMock(), MagicMock(), revival, MagicMock(), MagicMock(), MagicMock()  # type: ignore[arg-type]
    )  # fmt: skip
    points.add(OpenCheckPoint(CheckPoint(KEY, 5_000, tuple(range(32))), 1, b"c", 0))
    for _ in range(3):
        handler.revive(points.due(now, 500))
        now += 1_000
    revival.refused.clear()
    handler.revive(points.due(now, 500))
    assert revival.copied == [("orders", offset) for offset in range(40, 72)]
    assert points.open == 0


def units(*offsets: int) -> Any:
    return np.array([(offset * 100, 100) for offset in offsets], [("physical_offset", "<i8"), ("size", "<i4")])


class Queues(QueueReader):
    """Queue 0 has messages; a read of queue 1 raises."""

    def __init__(self) -> None:
        self.is_damaged = True

    def bounds(self, topic: str, queue: int, **_: Any) -> Any:
        return 0, 4

    def read(self, topic: str, queue: int, offset: int, **_: Any) -> Any:
        if queue == 1 and self.is_damaged:
            raise CorruptRecordError("a filter read a damaged record")
        if offset >= 4:
            return SimpleNamespace(count=0, status=None, next_offset=offset, max_offset=4)
        return SimpleNamespace(count=4 - offset, next_offset=4, units=units(*range(offset, 4)))

    def frames(self, units: Any) -> list[Any]:
        return [b"x" * 100] * len(units)


class Places:
    def __init__(self) -> None:
        self.topics = MagicMock(get=lambda name: TopicView(2, 2, 6) if name == "orders" else None)
        data = b"".join(bytes(20) + number.to_bytes(8, "big") + bytes(72) for number in range(4))
        self.log = SimpleNamespace(segment_bytes=len(data), read=lambda place, size: data[place : place + size])
        self._place = SimpleNamespace(queues=Queues(), bound=1 << 40, floor=0)

    def place(self, name: str, topic: Any) -> Any:
        return self._place


def test_a_pop_that_fails_in_a_later_queue_hands_out_nothing_and_passes_over_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finder_module, "MOST_MS", 60_000)  # a machine that stands still cuts no pop short here
    share, places = Share("g"), Places()
    share.next = {("orders", 0): 0, ("orders", 1): 0}
    shares = MagicMock(of=lambda group, topics: share)
    pop = PopRequest(b"c", 1, "g", ["orders"], 32, 5_000, 0, None, "earliest")
    for seed in range(1, 20):  # the queue to begin with is a matter of chance
        places._place.queues.is_damaged = True
        finder = Finder(MagicMock(), places, shares, CheckPoints(PopConfig()), 1 << 20, seed)  # type: ignore[arg-type]
        with pytest.raises(CorruptRecordError):
            finder.find(pop)
        assert share.next == {("orders", 0): 0, ("orders", 1): 0}, seed
    places._place.queues.is_damaged = False
    assert finder.find(pop).count == 8
    assert share.next == {("orders", 0): 4, ("orders", 1): 4}


def test_a_round_that_is_held_up_brings_each_message_back_once() -> None:
    """Check points of RocketMQ: the first one cannot come back for now, the second one can."""
    revival = Revival("orders")
    queues = ReviveQueues.__new__(ReviveQueues)
    queues._points, queues._revival, queues._done = CheckPoints(PopConfig()), revival, {}  # type: ignore[assignment]
    acks = [{"orders": set(), "others": {41}}]
    queues._acks = MagicMock(  # each ack is found once
        acked=lambda keys: {key: (acks[0].pop(key.topic, set())) for key in keys}
    )
    due = [
        DuePoint(n, CheckPoint(KEY._replace(topic=name), 5_000, (0, 1))) for n, name in enumerate(("orders", "others"))
    ]
    one = ReviveRound(-1)
    for _ in range(3):
        queues._process(3, one, due)
        assert one.position == -1
    revival.refused.clear()
    queues._process(3, one, due)
    assert revival.copied == [("others", 40), ("orders", 40), ("orders", 41)]
    assert one.position == 1
    assert not queues._done


def test_what_its_group_does_not_allow_is_put_off_and_holds_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check points of RocketMQ: the group of the first one was switched off."""
    now = KEY.pop_time + 86_400_000
    monkeypatch.setattr(revive_module, "now_ms", lambda: now)
    revival, points = Revival("orders", outcome=ReviveOutcome.PUT_OFF), CheckPoints(PopConfig())
    queues = ReviveQueues.__new__(ReviveQueues)
    queues._points, queues._revival, queues._done = points, revival, {}  # type: ignore[assignment]
    queues._acks = MagicMock(acked=lambda keys: {key: {41} if key.topic == "orders" else set() for key in keys})
    queues._context = MagicMock(control=MagicMock(get=lambda word: 7_000))
    due = [
        DuePoint(n, CheckPoint(KEY._replace(topic=name), 5_000, (0, 1, 2))) for n, name in enumerate(("orders", "rest"))
    ]
    one = ReviveRound(-1)
    queues._process(3, one, due)
    assert one.position == 1, "the other one is done too"
    assert [offset for _, offset in revival.copied] == [40, 41, 42]
    assert [(at.key.start_offset, at.revive_ms, at.rewrites) for at in revival.stored] == [
        (42, now + 10_000, 1),
        (40, now + 10_000, 1),
    ], "not the one that was acked; the one that replaces the old check point comes last"
    assert points.due(now + 9_999, 9) == []
    assert [(at.check_point.offsets, at.log) for at in points.due(now + 10_000, 9)] == [((42,), 7_000), ((40,), 7_000)]
    # After a death the log says the same.
    again = CheckPoints(PopConfig())
    reading = Reading(again, lambda topic: 0, now)
    reading.check_point(due[0].check_point, 3, 6_000)
    for check_point in revival.stored:
        reading.check_point(check_point, 3, 7_000)
    assert again.due(now + 9_999, 9) == []
    assert [at.check_point.offsets for at in again.due(now + 10_000, 9)] == [(42,), (40,)]
    assert again.open == 2


def test_acks_that_are_not_all_read_are_waited_for() -> None:
    revival = Revival()
    queues = ReviveQueues.__new__(ReviveQueues)
    queues._points, queues._revival, queues._done = CheckPoints(PopConfig()), revival, {}  # type: ignore[assignment]
    answers: list[Any] = [None, {KEY: {40}}]
    queues._acks = MagicMock(acked=lambda keys: answers.pop(0))
    queues._look_at_ms = 99
    one, due = ReviveRound(-1), [DuePoint(0, CheckPoint(KEY, 5_000, (0, 1)))]
    queues._process(3, one, due)
    assert (one.position, revival.copied, queues._look_at_ms) == (-1, [], 0)
    queues._process(3, one, due)
    assert (one.position, revival.copied) == (0, [("orders", 41)])


@pytest.mark.parametrize("lost", [True, False])
def test_offsets_are_not_committed_while_it_is_open_what_is_stored(lost: bool) -> None:
    """The writer died in an append and the node ends: the check points before the offsets may be lost."""
    process = PopProcess.__new__(PopProcess)
    names = "_router _parked _control _context _line _mover _changes _places _handler _queues _shares _limits _points"
    for name in names.split():
        setattr(process, name, MagicMock())
    process._parked.all.return_value = []  # type: ignore[attr-defined]
    process._ringers, process._is_dirty, process._commit_at_ms = [], False, 0
    process._limits.commit_interval_ms = 1  # type: ignore[misc]
    process._unflushed, process._orders = MagicMock(), MagicMock()
    process._queues.commits.return_value = [{"op": "offset.commit"}]  # type: ignore[attr-defined]
    process.close(lost=lost)
    assert process._shares.commit.called is not lost  # type: ignore[attr-defined]


def test_check_points_are_stored_before_the_acks_of_those_they_replace() -> None:
    """Both are overdue: the acks go to the revive topic itself, and one of them came first in the turn."""
    records = Records(NodeConfig(), "C")
    turn, mover = PopTurn(), MagicMock()
    mover.put.side_effect = lambda runs, *_: [PutMessageResult() for _ in runs]
    now = 1_000_000
    turn.records += [
        records.ack(Ack(KEY, 40), 5_000, 1, now),
        records.check_point(CheckPoint(KEY._replace(start_offset=41, pop_time=now), 5_000, (0,)), 1, now),
        records.ack(Ack(KEY, 41), 5_000, 1, now),
    ]
    turn.store(records, mover, MagicMock(), MagicMock())
    runs = [one.args[0] for one in mover.put.call_args_list]
    found = [[(run.topic, run.run.count) for run in some] for some in runs]
    assert found == [[(TIMER_TOPIC, 1)], [(revive_topic("C"), 2)]]


@pytest.mark.parametrize("code", ["", "SYSTEM_BUSY"])
def test_an_answer_is_made_while_the_writer_works_and_sent_when_it_is_done(code: str) -> None:
    turn, mover, answers = PopTurn(), MagicMock(), MagicMock()
    order: list[str] = []

    def answer() -> tuple[bytes, list[Any]]:
        order.append("made")
        return b"done", []

    def put(runs: list[Any], ack: str, meanwhile: Callable[[], None]) -> list[PutMessageResult]:
        meanwhile()
        order.append("written")
        return [PutMessageResult(code, "it is full", retry=True)]

    mover.put = put
    answers.send = lambda _client, header, *_frames: order.append("told" if header == b"done" else "refused")

    def settle(stored: list[bool]) -> bool:
        order.append("stored" if stored == [True] else "taken back")
        return stored == [True]

    turn.steps.append(PopStep(b"c", 7, range(1), settle, answer))
    turn.records.append(Records(NodeConfig(), "C").ack(Ack(KEY, 40), 5_000, 1, 1_000_000))
    assert turn.store(Records(NodeConfig(), "C"), mover, answers, MagicMock()) is not bool(code)
    assert order == ["made", "written", *(["taken back", "refused"] if code else ["stored", "told"])]


def test_a_request_that_fails_half_way_stores_nothing() -> None:
    turn = PopTurn()
    turn.records.append(MagicMock())
    turn.claimed[KEY, 40] = None
    mark = turn.mark()
    turn.records.append(MagicMock())
    turn.steps.append(MagicMock())
    turn.claimed[KEY, 41] = None
    turn.roll_back(mark)
    assert (len(turn.records), turn.steps, list(turn.claimed)) == (1, [], [(KEY, 40)])


def test_a_receive_of_one_queue_holds_up_none_of_another() -> None:
    parked, served = ParkedPops(10), MagicMock()
    handler = Handler(
        PopConfig(), 8, MagicMock(), CheckPoints(PopConfig()), parked,
        MagicMock(), MagicMock(), MagicMock(), MagicMock(), served
    )  # fmt: skip
    handler._answers.unsent.is_over.return_value = False  # type: ignore[attr-defined]
    served.serve.side_effect = lambda pop: pop.queue == 1
    pops = [
        PopRequest(b"c", n, "g", ["orders"], 32, 5_000, 9, None, "earliest", ordered=True, queue=n) for n in range(3)
    ]
    for pop in pops:
        parked.add(pop, 0)
    parked.wake("orders")
    while parked.has_woken:  # each look has its time: a busy machine needs several
        handler.look_again()
    assert parked.all() == [pops[0], pops[2]]
