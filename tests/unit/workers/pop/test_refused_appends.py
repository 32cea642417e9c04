"""Goal: where the writer refuses a part of what a turn stores, as on a full disk, no message is shown without its check point,
none is shown by two check points, and none is passed over.

Method: hypothesis lets clients receive, acknowledge and extend in turns whose records are appended one by one; the writer
refuses some. The log that comes out is read as after a death of the process: it must say what the process has in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.config import NodeConfig, PopConfig
from commitmq.format.record import decode_record
from commitmq.semantics.pop import ReceiptHandle
from commitmq.semantics.pop_revive import CHECK_POINT_TAG, Ack, CheckPoint
from commitmq.workers.pop import handler as handler_module
from commitmq.workers.pop.finder import PoppedMessages, PopResult
from commitmq.workers.pop.handler import Handler
from commitmq.workers.pop.points import CheckPoints, Records
from commitmq.workers.pop.recovery import Reading
from commitmq.workers.pop.requests import ParkedPops, PopRequest
from commitmq.workers.pop.shares import Share
from commitmq.workers.runtime.run_mover import MovedRun, PutMessageResult

INVISIBLE_MS = 2_000
POP, ACK, EXTEND = "pop", "ack", "extend"
OPERATION = st.tuples(st.sampled_from([POP, ACK, EXTEND]), st.integers(0, 99))
TURN = st.tuples(
    st.lists(OPERATION, min_size=1, max_size=4), st.lists(st.booleans(), max_size=8), st.integers(0, 1_500)
)


@dataclass
class World:
    """A pop process and its writer. ``refuses``: of the next runs, which ones."""

    now_ms: int = 1_000_000
    refuses: list[bool] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    receipts: list[ReceiptHandle] = field(default_factory=list)
    shown: list[tuple[int, int]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.share = Share("g", next={("orders", queue): 0 for queue in range(3)})
        self.points = CheckPoints(PopConfig())
        self.records = Records(NodeConfig(), "C")
        self.records._run_bytes = 1
        self.handler = Handler(
            PopConfig(), 8, MagicMock(find=self.find), self.points, ParkedPops(9), self.records,
            MagicMock(is_deleted=lambda _: False), self, MagicMock(), MagicMock(mark=lambda: (0, 0)),  # type: ignore[arg-type]
        )  # fmt: skip
        self.unsent = SimpleNamespace(is_over=lambda _: False)

    def find(self, pop: PopRequest) -> PopResult:
        """Two messages of two queues each."""
        found = PopResult(self.share)
        for queue in (pop.max_messages % 3, (pop.max_messages + 1) % 3):
            start = self.share.next["orders", queue]
            found.moved.setdefault(("orders", queue), start)
            self.share.next["orders", queue] = start + 2
            portion = PoppedMessages("orders", "orders", queue, start, (start, start + 1), start + 2, [b""] * 2)
            found.portions.append(portion)
        return found

    def put(self, runs: list[MovedRun], _ack: str, meanwhile: Any) -> list[PutMessageResult]:
        if meanwhile is not None:
            meanwhile()
        puts = []
        for one in runs:
            if self.refuses and self.refuses.pop():
                puts.append(PutMessageResult("SERVICE_NOT_AVAILABLE", "no space", retry=True))
                continue
            self.log.append(decode_record(one.run.data.tobytes(), check_crc=False))
            puts.append(PutMessageResult())
        return puts

    def send(self, _client: bytes, header: bytes, _frames: Any = None) -> None:
        answer = orjson.loads(header)
        self.answers.append(answer)
        for part in answer.get("parts", ()):
            for offset in (part["start_offset"], part["start_offset"] + 1):
                place = part["start_offset"], answer["pop_time"], answer["invisible_ms"], answer["revive_queue"]
                self.receipts.append(ReceiptHandle(*place, 0, answer["broker"], part["queue"], offset))
                self.shown.append((part["queue"], offset))
                stored = [CheckPoint.parse(one.body) for one in self.log if one.properties["TAGS"] == CHECK_POINT_TAG]
                assert any(one.key.queue_id == part["queue"] and offset in one.offsets for one in stored)
        self.receipts += [ReceiptHandle.parse(one) for one in answer.get("handles", ()) if one]

    def turn(self, operations: list[tuple[str, int]]) -> None:
        for operation, choice in operations:
            header = {
                "id": 1,
                "group": "g",
                "topics": ["orders"],
                "max_messages": choice + 1,
                "invisible_ms": INVISIBLE_MS,
            }
            if operation == POP:
                self.handler.pop(b"c", header)
            elif self.receipts:
                first = choice % len(self.receipts)
                receipts = [["orders", str(one)] for one in self.receipts[first : first + 1 + choice % 3]]
                getattr(self.handler, operation)(b"c", {**header, "receipts": receipts})
        self.handler.turn.store(self.records, self, self, MagicMock())  # type: ignore[arg-type]

    def in_flight(self, points: CheckPoints) -> set[tuple[int, int]]:
        return {
            (point.check_point.key.queue_id, offset)
            for point in points.by_key.values()
            for offset in point.check_point.left()
        }


@settings(max_examples=60)
@given(st.lists(TURN, min_size=1, max_size=8))
def test_log_and_process_agree_whatever_is_refused(turns: list[Any]) -> None:
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler_module, "now_ms", lambda: world.now_ms)
        for operations, refuses, passed_ms in turns:
            world.refuses = list(refuses)
            world.turn(operations)
            world.now_ms += passed_ms
    assert len(world.shown) == len(set(world.shown)), "nothing came back: a message is shown once"
    points = CheckPoints(PopConfig())
    reading = Reading(points, lambda _: 0, world.now_ms)
    for number, record in enumerate(world.log):
        if record.properties["TAGS"] == CHECK_POINT_TAG:
            reading.check_point(CheckPoint.parse(record.body), 1, number)
        else:
            reading.ack(Ack.parse(record.body))
    assert world.in_flight(points) == world.in_flight(world.points)
    ends = {queue: reading.ends.get(("g", "orders", queue), 0) for queue in range(3)}
    assert ends == {queue: world.share.next["orders", queue] for queue in range(3)}
    stored = {(queue, offset) for queue, end in ends.items() for offset in range(end)}
    assert set(world.shown) <= stored
    acked = stored - world.in_flight(points)
    assert acked <= set(world.shown), "what nobody has seen is in flight, and comes back"


def test_what_is_stored_of_a_refused_receive_comes_back_later() -> None:
    world = World(refuses=[True, False])
    world.turn([(POP, 0)])
    (answer,) = world.answers
    assert (answer["ok"], answer["code"], answer["retry_after_ms"]) == (False, "SERVICE_NOT_AVAILABLE", 500)
    assert (world.shown, len(world.log)) == ([], 1)
    assert world.in_flight(world.points) == {(1, 0), (1, 1)}
    assert world.share.next == {("orders", 0): 0, ("orders", 1): 2, ("orders", 2): 0}


def test_an_extension_whose_ack_is_refused_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check point alone says it: a log that has it reads so."""
    world = World()
    monkeypatch.setattr(handler_module, "now_ms", lambda: world.now_ms)
    world.turn([(POP, 0)])
    world.refuses = [True, False]
    world.turn([(EXTEND, 0)])
    assert world.answers[-1]["handles"] == [str(world.receipts[-1])]
    assert world.in_flight(world.points) == {(1, 0), (1, 1), (2, 0), (2, 1)}
