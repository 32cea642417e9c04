"""Goal: what a reader answers to a pull has RocketMQ's code at the client, with the place where the client goes on (spec 9.4).

Method: the real handler of pulls over a line that the test answers; the topic, the group and the settings are objects of the
test's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from commitmq.config import NodeConfig
from commitmq_plugins.rocketmq.broker.node import LineLostError
from commitmq_plugins.rocketmq.broker.pulling import PullMessageProcessor
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request

FIELDS = {"consumerGroup": "g", "topic": "T", "queueId": "0", "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0",
          "suspendTimeoutMillis": "0", "subVersion": "0", "subscription": "*"}  # fmt: skip


def answer_to(offset: int, found: Any) -> Command:
    """The answer to a pull at ``offset`` when a reader answers with ``found``."""
    line, connection = MagicMock(), MagicMock(is_closed=False, user="")
    node = MagicMock(config=NodeConfig(), reader_of=lambda topic, queue: line)
    topics = SimpleNamespace(get=lambda name: SimpleNamespace(perm=6, read_queues=1))
    reads = MagicMock()
    reads.may_be_missing.return_value = False
    offsets = MagicMock(take_reset=lambda *queue: None)
    settings = SimpleNamespace(long_polling=True, short_polling_ms=1_000)
    returning = MagicMock(of_pull=lambda *queue: None, is_again=lambda *queue: False)
    pulls = PullMessageProcessor(
        node, topics, MagicMock(), offsets, returning, MagicMock(), reads, settings, 10,  # type: ignore[arg-type]
    )  # fmt: skip
    command = request(RequestCode.PULL_MESSAGE, {**FIELDS, "queueOffset": str(offset)})
    assert pulls.handle(connection, command) is None
    line.call.call_args.args[2](found)
    sent: Command = connection.send.call_args.args[0]
    return sent


@pytest.mark.parametrize(
    ("status", "offset", "code", "following"),
    [
        ("NO_MATCHED_MESSAGE", 5, ResponseCode.PULL_RETRY_IMMEDIATELY, 9),
        ("MESSAGE_WAS_REMOVING", 5, ResponseCode.PULL_RETRY_IMMEDIATELY, 9),
        ("NO_MATCHED_LOGIC_QUEUE", 0, ResponseCode.PULL_NOT_FOUND, 0),
        ("NO_MATCHED_LOGIC_QUEUE", 5, ResponseCode.PULL_OFFSET_MOVED, 9),
        ("NO_MESSAGE_IN_QUEUE", 0, ResponseCode.PULL_NOT_FOUND, 0),
        ("NO_MESSAGE_IN_QUEUE", 5, ResponseCode.PULL_OFFSET_MOVED, 9),
        ("OFFSET_OVERFLOW_ONE", 5, ResponseCode.PULL_NOT_FOUND, 5),
        ("OFFSET_OVERFLOW_BADLY", 5, ResponseCode.PULL_OFFSET_MOVED, 9),
        ("OFFSET_TOO_SMALL", 5, ResponseCode.PULL_OFFSET_MOVED, 9),
    ],
)
def test_each_status_of_a_read_has_rocketmqs_code(status: str, offset: int, code: int, following: int) -> None:
    found = {"ok": True, "status": status, "next_offset": 9, "min_offset": 3, "max_offset": 12}
    answer = answer_to(offset, (found, []))
    assert (answer.code, answer.remark) == (code, status)
    assert answer.ext_fields == {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(following),
        "minOffset": "3",
        "maxOffset": "12",
        "topicSysFlag": "0",
        "groupSysFlag": "0",
    }


@pytest.mark.parametrize(
    ("name", "sentence", "code"),
    [
        ("INVALID_PARAMETER", "the SQL92 filter is wrong at character 3: …", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ("INVALID_PARAMETER", "the tag expression '||' names no tag", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ("INVALID_PARAMETER", "a filter may have 65536 characters at most", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ("INVALID_PARAMETER", "this node has no filter type 'SQL92'; it has TAG", ResponseCode.SYSTEM_ERROR),
        ("INVALID_PARAMETER", "topic 'the filter' has no queue 7", ResponseCode.INVALID_PARAMETER),
        ("FILTER_FAILED", "the filter X of plugin y failed", ResponseCode.SYSTEM_ERROR),
        ("SYSTEM_BUSY", "too many pulls wait for messages already", ResponseCode.FLOW_CONTROL),
        ("TOPIC_NOT_EXIST", "there is no topic 'T'", ResponseCode.TOPIC_NOT_EXIST),
    ],
)
def test_each_refusal_of_a_reader_has_rocketmqs_code_and_leaves_the_client_where_it_is(
    name: str, sentence: str, code: int
) -> None:
    answer = answer_to(5, ({"ok": False, "code": name, "error": sentence}, []))
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (code, "5")


def test_a_reader_that_does_not_answer_is_a_system_error_and_leaves_the_client_where_it_is() -> None:
    answer = answer_to(5, LineLostError("gone", sent=True))
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (ResponseCode.SYSTEM_ERROR, "5")
