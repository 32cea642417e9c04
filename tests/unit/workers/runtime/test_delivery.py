"""Goal: what the node refuses for good becomes a dead letter, and no refusal stops a mover for ever.

Method: a way to the writer and a line to the coordinator that answer as the test says; real runs of records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commitmq.errors import ProtocolError
from commitmq.format.constants import Host
from commitmq.format.record import Record, decode_record, encode_record
from commitmq.semantics.retry import UNDELIVERED_TOPIC
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.runtime.run_making import Delivery
from commitmq.workers.runtime.run_mover import MovedRun, PutMessageResult

HOST = Host("127.0.0.1", 10_911)
Judge = Callable[[MovedRun], PutMessageResult]


class Way(Delivery):
    """``judge`` answers for the writer, ``coordinator`` for the coordinator."""

    def __init__(self, judge: Judge, coordinator: dict[str, Any] | None = None) -> None:
        self.told: dict[str, int] = {}
        self.errors: list[str] = []
        self.aside: list[tuple[int, str]] = []
        self.appended: list[MovedRun] = []
        self._coordinator = {"ok": True} if coordinator is None else coordinator
        config = SimpleNamespace(
            commit_log=SimpleNamespace(append_properties_crc=False), network=SimpleNamespace(store_host="127.0.0.1")
        )
        log = SimpleNamespace(error=lambda sentence, **_: self.errors.append(sentence))
        context: Any = SimpleNamespace(config=config, log=log, tell=self.told.update)
        super().__init__(context, "test", lambda why, place: self.aside.append((place, why)))
        self.mover = SimpleNamespace(put=self._put)  # type: ignore[assignment]
        self._line = SimpleNamespace(ask=self._ask)  # type: ignore[assignment]
        self._judge = judge

    def _put(self, runs: Sequence[MovedRun]) -> list[PutMessageResult]:
        puts = [self._judge(one) for one in runs]
        self.appended += [one for one, put in zip(runs, puts, strict=True) if not put.code]
        return puts

    def _ask(self, _requests: object) -> list[dict[str, Any]]:
        if "raises" in self._coordinator:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", "away", retry_after_ms=500)
        return [self._coordinator]

    def bodies(self, topic: str) -> list[bytes]:
        return [one.body for run in self.appended if run.topic == topic for one in records(run)]


def run(*bodies: bytes) -> MovedRun:
    data = [
        encode_record(
            Record("orders", body=body, properties={"UNIQ_KEY": body.decode()}, born_host=HOST, store_host=HOST)
        )
        for body in bodies
    ]
    ends = np.cumsum([len(one) for one in data], dtype=np.int64)
    return MovedRun(
        "orders",
        3,
        CheckedRun(np.frombuffer(b"".join(data), np.uint8), ends, len(data)),
        False,
        range(1_000, 1_000 + len(data)),
    )


def records(one: MovedRun) -> list[Record]:
    starts = [0, *one.run.ends[:-1].tolist()]
    return [decode_record(one.run.data.data, start) for start in starts]


def refusing(code: str, *, also: str = "", retry: bool = False) -> Judge:
    """Refuses what is for the topic "orders"; and for the dead letters with the code ``also``."""

    def judge(one: MovedRun) -> PutMessageResult:
        wrong = code if one.topic == "orders" else also
        return PutMessageResult(wrong, "because", retry) if wrong else PutMessageResult()

    return judge


def test_a_queue_that_is_gone_turns_a_run_into_dead_letters() -> None:
    way = Way(refusing("TOPIC_NOT_EXIST"))
    left = way.append([run(b"a", b"b")])
    assert [(one.topic, one.queue_id, one.run.count) for one in left] == [(UNDELIVERED_TOPIC, 0, 2)]
    assert not way.may_try_again
    assert way.append(left) == []
    assert way.bodies(UNDELIVERED_TOPIC) == [b"a", b"b"]
    assert records(way.appended[0])[0].properties == {"UNIQ_KEY": "a"}
    assert (way.told, way.delivered) == ({"dead_letters": 2}, 0)


def test_only_the_message_that_is_wrong_is_a_dead_letter() -> None:
    def judge(one: MovedRun) -> PutMessageResult:
        wrong = one.topic == "orders" and b"bad" in [each.body for each in records(one)]
        return PutMessageResult("MESSAGE_ILLEGAL", "too large") if wrong else PutMessageResult()

    way = Way(judge)
    left = [run(b"a", b"bad", b"b")]
    for _ in range(3):
        left = way.append(left)
    assert left == []
    assert (way.bodies("orders"), way.bodies(UNDELIVERED_TOPIC)) == ([b"a", b"b"], [b"bad"])
    assert (way.delivered, way.dead_letters, way.aside) == (2, 1, [])


def test_what_may_be_taken_later_waits() -> None:
    way = Way(refusing("SYSTEM_BUSY", retry=True))
    one = run(b"a")
    assert way.append([one]) == [one]
    away = Way(refusing("TOPIC_NOT_EXIST"), {"raises": True})
    assert away.append([one]) == [one], "nobody can make the topic of dead letters now"
    assert (away.aside, away.dead_letters) == ([], 0)


@pytest.mark.parametrize(
    ("also", "coordinator"),
    [("NO_PERMISSION", {"ok": True}), ("TOPIC_NOT_EXIST", {"ok": False, "code": "LIMIT_EXCEEDED", "error": "many"})],
)
def test_without_a_dead_letter_a_message_is_set_aside(also: str, coordinator: dict[str, Any]) -> None:
    way = Way(refusing("TOPIC_NOT_EXIST", also=also), coordinator)
    assert way.append(way.append([run(b"a", b"b")])) == []
    assert [place for place, _ in way.aside] == [1_000, 1_001], "where they lie in the log"


def test_a_topic_of_dead_letters_that_was_deleted_is_made_again() -> None:
    way = Way(refusing("TOPIC_NOT_EXIST", also="TOPIC_NOT_EXIST"))
    left = way.append(way.append([run(b"a")]))
    assert [one.topic for one in left] == [UNDELIVERED_TOPIC]
    assert way.aside == []
