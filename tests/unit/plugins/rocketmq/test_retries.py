"""Goal: what consumers of RocketMQ do with failed messages has its limits: send-backs, and plain sends to retry topics.

Method: the real handler over a node, topics and locks that the test plays; its requests to the writer are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.errors import ProtocolError
from commitmq.format.record import Record, encode_record
from commitmq.log import get_log
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq_plugins.rocketmq.broker.assignment import QueueLocks
from commitmq_plugins.rocketmq.broker.process import Dispatch
from commitmq_plugins.rocketmq.broker.sending import Retries
from commitmq_plugins.rocketmq.remoting.codes import V3_4_9, RequestCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from commitmq_plugins.rocketmq.remoting.headers import SendMessageRequestHeader

PLACE = 4_096


class Stage:
    """A node whose group has ``most`` as retryMaxTimes; the message at PLACE was tried ``times`` times."""

    def __init__(self, *, most: int = 16, times: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.made: list[tuple[str, bool]] = []
        self.locks = QueueLocks()
        self.refusal: ProtocolError | None = None
        self.retry_queues = 1
        self.has_record = True
        self._record = Record("orders", 3, 7, PLACE, reconsume_times=times, body=b"x")
        self._most = most
        node = SimpleNamespace(line=lambda role: role, exchange=self._exchange, ask=self._ask)
        topics = SimpleNamespace(retry_topics=self._retry_topics, must_get=lambda name: TopicConfig(name, 1, 1))
        clients = SimpleNamespace(charge=lambda *_: None)
        counting = SimpleNamespace(sent_back=lambda *_: None)
        access = SimpleNamespace(lacks=lambda *_: None, refusal=lambda *_: None)
        self.retries = Retries(node, topics, clients, self.locks, counting, access)  # type: ignore[arg-type]
        self._dispatch = Dispatch([self.retries], access, get_log("test"))  # type: ignore[arg-type]

    async def _ask(self, role: str, op: str, **fields: Any) -> dict[str, Any]:
        assert (role, op, fields) == ("coordinator", "group.config", {"group": "g"})
        return {"ok": True, "config": {"retryMaxTimes": self._most, "retryQueueNums": self.retry_queues}}

    async def _retry_topics(self, group: str, *, dead: bool = False, user: str = "") -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.made.append((group, dead))
        return True

    async def _exchange(self, line: str, op: str, fields: dict[str, Any], payload: Sequence[bytes] = ()) -> Any:
        if line == "reader-0":
            assert (op, fields) == ("view", {"physical_offset": PLACE})
            if not self.has_record:
                raise ProtocolError("INVALID_PARAMETER", "there is no message")
            return {"ok": True}, [encode_record(self._record)]
        assert (line, op) == ("writer", "send_back")
        self.asked.append(fields)
        return {"ok": True}, []

    def answer(self, version: int = V3_4_9, **fields: str) -> Command:
        """The answer to a consumer that sends the message back."""
        named = {"offset": str(PLACE), "group": "g", "delayLevel": "0", "originTopic": "orders", **fields}
        command = request(RequestCode.CONSUMER_SEND_MSG_BACK, named)
        command.version = version
        return asyncio.run(self._dispatched(command))

    async def _dispatched(self, command: Command) -> Command:
        answer = self._dispatch.handle(SimpleNamespace(user=""), command)  # type: ignore[arg-type]
        assert answer is not None
        assert not isinstance(answer, Command)
        return await answer  # type: ignore[return-value]

    def send_back(self, version: int = V3_4_9, **fields: str) -> dict[str, Any]:
        """What the writer is asked for then."""
        answer = self.answer(version, **fields)
        assert answer.code == 0, answer.remark
        return self.asked[-1]

    def send(self, times: int | None, most: int | None = None, version: int = V3_4_9) -> SendMessageRequestHeader:
        """The header of a plain send to the retry topic, as it is stored."""
        header = SendMessageRequestHeader(
            "pg", "%RETRY%g", "TBW102", 4, 2, 0, 5, 0, "KEYS\x01k\x02DELAY\x015\x02", times, max_reconsume_times=most
        )
        asyncio.run(self.retries.place(SimpleNamespace(user=""), header, version))  # type: ignore[arg-type]
        return header


# ---------------------------------------------------------------- send-back


@pytest.mark.parametrize(
    ("level", "sent"), [("0", 0), ("5", 5), ("18", 18), ("19", 18), ("2000000000", 18), ("-1", -1), ("-7", -1)]
)
def test_a_level_above_the_last_is_the_last_and_one_below_nothing_ends_the_tries(level: str, sent: int) -> None:
    stage = Stage()
    asked = stage.send_back(delayLevel=level)
    assert asked["delay_level"] == sent
    assert (asked["topic"], asked["queue"], asked["queue_offset"], asked["physical_offset"]) == ("orders", 3, 7, PLACE)
    assert stage.made == [("g", False), *([("g", True)] if sent < 0 else [])]


@pytest.mark.parametrize(
    ("limit", "version", "most"),
    [
        (None, V3_4_9, 5),
        ("9", V3_4_9, 9),
        ("9", V3_4_9 - 1, 5),  # clients before 3.4.9 send none, or rubbish
        ("2147483647", V3_4_9, 1 << 30),
        ("-1", V3_4_9, 0),
    ],
)
def test_the_limit_is_the_requests_for_clients_from_3_4_9_on_else_the_groups(
    limit: str | None, version: int, most: int
) -> None:
    stage = Stage(most=5)
    asked = stage.send_back(version, **({} if limit is None else {"maxReconsumeTimes": limit}))
    assert asked["max_retries"] == most
    assert (("g", True) in stage.made) == (most == 0)


@pytest.mark.parametrize(("times", "dead"), [(15, False), (16, True), (17, True)])
def test_the_dead_letter_topic_is_made_at_the_last_try(times: int, dead: bool) -> None:
    stage = Stage(times=times)
    stage.send_back()
    assert (("g", True) in stage.made) == dead


@pytest.mark.parametrize(
    ("code", "queues", "number"),
    [("GROUP_NOT_EXIST", 1, 26), ("NO_PERMISSION", 1, 16), ("NO_PERMISSION", 0, 0), ("NO_PERMISSION", -1, 0)],
)
def test_a_group_that_is_not_there_or_keeps_no_failed_messages(code: str, queues: int, number: int) -> None:
    """Without retry queues a send-back succeeds and does nothing."""
    stage = Stage()
    stage.refusal, stage.retry_queues = ProtocolError(code, "because"), queues
    assert stage.answer().code == number
    assert stage.asked == []


def test_a_place_without_a_message_is_a_system_error() -> None:
    stage = Stage()
    stage.has_record = False
    answer = stage.answer()
    assert (answer.code, answer.remark) == (1, f"look message by offset failed, {PLACE}")


# ---------------------------------------------------------------- plain sends to the retry topic


@pytest.mark.parametrize(
    ("times", "most", "version", "dead"),
    [
        (None, None, V3_4_9, False),
        (3, None, V3_4_9, False),  # a send-back would be at its end here
        (4, None, V3_4_9, True),
        (4, 4, V3_4_9, False),
        (5, 4, V3_4_9, True),
        (4, 9, V3_4_9 - 1, True),
    ],
)
def test_a_plain_send_above_the_limit_is_redirected_to_the_dead_letters(
    times: int | None, most: int | None, version: int, dead: bool
) -> None:
    header = Stage(most=3).send(times, most, version)
    assert (header.topic, header.queue_id) == (("%DLQ%g", 0) if dead else ("%RETRY%g", 2))
    assert (header.properties or "").endswith("\x02DELAY\x01-1\x02") == dead


def test_a_plain_send_of_a_group_that_holds_a_lock_is_redirected_at_once() -> None:
    """Its consumers receive in order; a lock that is over does not count."""
    stage = Stage()
    now_ms = time.monotonic_ns() // 1_000_000
    stage.locks.lock("g", ("", "client"), [("orders", 0)], now_ms - 61_000)
    assert stage.send(0).topic == "%RETRY%g"
    stage.locks.lock("g", ("", "client"), [("orders", 0)], now_ms)
    assert stage.send(0).topic == "%DLQ%g"
