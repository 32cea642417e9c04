"""Goal: a message comes back as itself or not at all, and one that cannot come back takes no other one with it.

Method: the process's part that makes copies, with topics, queues, a log and a writer of a few lines.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from commitmq.config import load
from commitmq.errors import ProtocolError, StoreError
from commitmq.format.record import Record
from commitmq.semantics.pop_revive import CheckPoint, CheckPointKey
from commitmq.workers.pop.points import Records
from commitmq.workers.pop.revival import Revival, RevivedMessage, ReviveOutcome
from commitmq.workers.runtime.run_mover import PutMessageResult

KEY = CheckPointKey("orders", "g", 0, 40, 1_000, "b")
POINT = CheckPoint(KEY, 5_000, tuple(range(8)))
BAD = PutMessageResult("MESSAGE_ILLEGAL", "too large")


class Node:
    """Topics, one queue with a message at each offset below 50, and a writer that refuses runs with the body ``bad``."""

    def __init__(self) -> None:
        view = SimpleNamespace(is_memory=False, is_batch=False)
        self.views: dict[str, Any] = {"orders": view, "%RETRY%g_orders": view}
        self.floors: dict[str, int] = {}
        self.store_timestamp = 500
        self.bodies: dict[int, bytes] = {}
        self.error: Exception | None = None
        self.puts: list[int] = []
        self.refusal = BAD
        self.aside: list[int] = []
        self.topics = SimpleNamespace(get=self.views.get, tombstone=lambda name: self.floors.get(name, 0))
        self.queues = SimpleNamespace(units=self.units)
        self.log = SimpleNamespace(record=self.record)

    def bound(self) -> int:
        return 1 << 40

    def floor(self, topic: str) -> int:
        return self.floors.get(topic, 0)

    def units(self, topic: str, queue: int, offset: int, count: int, **_: Any) -> Any:
        if self.error is not None:
            raise self.error
        units = np.array([(offset * 100, 100)] if offset < 50 else [], [("physical_offset", "<i8"), ("size", "<i4")])
        return offset, units

    def record(self, place: int) -> Record:
        body = self.bodies.get(place // 100, b"%d" % (place // 100))
        return Record("orders", body=body, store_timestamp=self.store_timestamp)

    def put(self, runs: list[Any]) -> list[PutMessageResult]:
        self.puts += [one.run.count for one in runs]
        return [self.refusal if b"bad" in one.run.data.tobytes() else PutMessageResult() for one in runs]


@pytest.fixture
def node() -> Node:
    return Node()


def revival(node: Node, most: Any = 16) -> Revival:
    shares = MagicMock(max_retries=MagicMock(side_effect=[most] * 99 if isinstance(most, int) else most))
    aside: Any = SimpleNamespace(note=lambda _why, **place: node.aside.append(place["queue_offset"]))
    return Revival(MagicMock(), node, shares, Records(load(None), "C"), node, aside)  # type: ignore[arg-type]


def returns(*offsets: int, log: int = 9_000) -> list[RevivedMessage]:
    return [RevivedMessage(POINT, offset, log) for offset in offsets]


def test_a_message_of_a_deleted_topic_does_not_come_back(node: Node) -> None:
    del node.views["orders"]
    one = revival(node)
    assert one.copy(returns(40, 41)) == [ReviveOutcome.DONE] * 2
    assert (node.puts, len(node.aside)) == ([], 2)


def test_another_message_at_its_offset_does_not_come_back_instead(node: Node) -> None:
    """The topic was deleted and made anew while the message was in flight."""
    node.floors["orders"] = 3_000
    one = revival(node)
    assert one.copy(returns(40, log=3_000)) == [ReviveOutcome.DONE]
    assert node.puts == [1], "this one was received from the new topic"
    assert one.copy(returns(40, log=2_999)) == [ReviveOutcome.DONE]
    assert one.copy(returns(41, log=-1)) == [ReviveOutcome.DONE]
    assert (node.puts, len(node.aside)) == ([1, 1], 1), "RocketMQ's check point: the message was there when it was made"
    node.store_timestamp = KEY.pop_time + 1
    assert one.copy(returns(41, log=-1)) == [ReviveOutcome.DONE]
    assert (node.puts, len(node.aside)) == ([1, 1], 2)


def test_what_can_never_come_back_is_reported_and_done(node: Node) -> None:
    one = revival(node)
    evil = RevivedMessage(CheckPoint(KEY._replace(topic="../x"), 5_000, (0,)), 40)
    nobody = RevivedMessage(CheckPoint(KEY._replace(group="a b"), 5_000, (0,)), 40)
    assert one.copy([evil, nobody, *returns(60)]) == [ReviveOutcome.DONE] * 3
    assert (node.puts, len(node.aside)) == ([], 3)


def test_a_message_that_the_writer_never_takes_keeps_no_other_one_back(node: Node) -> None:
    node.bodies[42] = b"bad"
    one = revival(node)
    assert one.copy(returns(40, 41, 42, 43)) == [ReviveOutcome.DONE] * 4
    assert node.puts == [4, 1, 1, 1, 1]
    assert (one.came_back, len(node.aside)) == (3, 1)


@pytest.mark.parametrize(
    ("refusal", "outcome"),
    [
        (PutMessageResult("SYSTEM_BUSY", "", retry=True), ReviveOutcome.AGAIN),
        (PutMessageResult("TOPIC_NOT_EXIST"), ReviveOutcome.AGAIN),
        (PutMessageResult("NO_PERMISSION"), ReviveOutcome.PUT_OFF),
    ],
)
def test_a_refusal_that_may_end_loses_nothing(node: Node, refusal: PutMessageResult, outcome: ReviveOutcome) -> None:
    node.refusal, node.bodies[41] = refusal, b"bad"
    one = revival(node)
    assert one.copy(returns(40, 41)) == [outcome] * 2
    assert len(node.aside) == 0


def test_a_node_that_cannot_read_now_loses_nothing(node: Node) -> None:
    node.error = StoreError("too many open files")
    assert revival(node).copy(returns(40)) == [ReviveOutcome.AGAIN]
    node.error = None
    away = ProtocolError("SERVICE_NOT_AVAILABLE", "the coordinator is away")
    off = ProtocolError("NO_PERMISSION", "the group is switched off")
    assert revival(node, [away, off]).copy(returns(40, 41)) == [ReviveOutcome.AGAIN, ReviveOutcome.PUT_OFF]
