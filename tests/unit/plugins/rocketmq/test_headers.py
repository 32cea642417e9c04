"""Goal: typed headers read and write exactly RocketMQ's fields, and name the field and the value that is wrong.

Method: names and requiredness of the fields beside a table from the page; conversions of each type; every header class
once from values to texts and back.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from commitmq_plugins.rocketmq.remoting import headers
from commitmq_plugins.rocketmq.remoting.frame import FieldError
from commitmq_plugins.rocketmq.remoting.headers import (
    Header,
    Int,
    Long,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    decode_send,
)

CLASSES: list[type[Header]] = sorted(
    {
        value
        for value in vars(headers).values()
        if isinstance(value, type) and issubclass(value, Header) and value is not Header
    },
    key=lambda one: one.__name__,
)


def sample(kind: type[Header]) -> Header:
    values: dict[str, Any] = {}
    for number, one in enumerate(fields(kind), 3):  # type: ignore[arg-type]
        kinds = str(one.type)
        values[one.name] = (
            (number % 2 == 0) if "bool" in kinds else number if ("Int" in kinds or "Long" in kinds) else f"v{number}"
        )
    return kind(**values)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda one: one.__name__)
def test_each_header_comes_back(kind: type[Header]) -> None:
    made = sample(kind)
    texts = made.encode()
    assert all(type(text) is str for text in texts.values())
    assert len(texts) == len(fields(kind)), "two fields of one name"  # type: ignore[arg-type]
    assert kind.decode(texts) == made
    assert kind.decode({**texts, "bname": texts.get("bname", "b"), "unknown": "?"}) == made


def test_all_classes_are_seen() -> None:
    assert len(CLASSES) > 50


def test_letters_of_the_page() -> None:
    letters = {
        "a": "pg",
        "b": "T",
        "c": "TBW102",
        "d": "4",
        "e": "2",
        "f": "0",
        "g": "1763800000000",
        "h": "0",
        "i": "K\x01V\x02",
        "j": "1",
        "k": "false",
        "l": "3",
        "m": "true",
        "n": "broker-a",
    }
    found = decode_send(letters)
    assert isinstance(found, SendMessageRequestHeaderV2)
    assert (found.producer_group, found.topic, found.default_topic, found.default_topic_queue_nums) == (
        "pg",
        "T",
        "TBW102",
        4,
    )
    assert (found.queue_id, found.sys_flag, found.born_timestamp, found.flag) == (2, 0, 1763800000000, 0)
    assert (found.properties, found.reconsume_times, found.unit_mode) == ("K\x01V\x02", 1, False)
    assert (found.max_reconsume_times, found.batch, found.broker_name) == (3, True, "broker-a")
    assert found.encode() == letters
    long_names = {
        "producerGroup": "pg",
        "topic": "T",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "2",
        "sysFlag": "0",
        "bornTimestamp": "1763800000000",
        "flag": "0",
        "properties": "K\x01V\x02",
        "reconsumeTimes": "1",
        "unitMode": "false",
        "maxReconsumeTimes": "3",
        "batch": "true",
        "bname": "broker-a",
    }
    same = decode_send(long_names)
    assert type(same) is SendMessageRequestHeader
    assert [getattr(same, one.name) for one in fields(same)] == [getattr(found, one.name) for one in fields(found)]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(FieldError, match="the custom field <queueId> is null") as raised:
        QueryConsumerOffsetRequestHeader.decode({"consumerGroup": "g", "topic": "T"})
    assert (raised.value.field, raised.value.value, raised.value.closes) == ("queueId", None, False)


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", str(1 << 31), "9" * 5000, "0x10"])
def test_a_wrong_number_is_named_with_its_value(text: str) -> None:
    with pytest.raises(FieldError, match="the custom field <queueId> has the wrong value") as raised:
        QueryConsumerOffsetRequestHeader.decode({"consumerGroup": "g", "topic": "T", "queueId": text})
    assert raised.value.value == text


def test_types_have_their_ranges() -> None:
    class Both(Header):
        small: Int
        great: Long

    assert Both.decode({"small": "-2147483648", "great": "-9223372036854775808"}) == Both(-(1 << 31), -(1 << 63))
    assert Both.decode({"small": "+5", "great": "7"}) == Both(5, 7)
    with pytest.raises(FieldError, match="great"):
        Both.decode({"small": "0", "great": str(1 << 63)})


def test_booleans_are_true_or_anything_else() -> None:
    needed = {"consumerGroup": "g", "topic": "T", "queueId": "0"}

    def read(text: str) -> bool | None:
        fields = {**needed, "setZeroIfNotFound": text}
        return QueryConsumerOffsetRequestHeader.decode(fields).set_zero_if_not_found

    assert read("true") is True
    assert read("TRUE") is True
    assert read("yes") is False
    assert read("") is False
    assert (
        QueryConsumerOffsetRequestHeader.decode(
            {"consumerGroup": "g", "topic": "T", "queueId": "0"}
        ).set_zero_if_not_found
        is None
    )


def test_a_boundary_is_upper_or_lower() -> None:
    assert SearchOffsetRequestHeader("T", 0, 1, "upper").is_upper
    assert not SearchOffsetRequestHeader("T", 0, 1, "LOWER").is_upper
    assert not SearchOffsetRequestHeader("T", 0, 1).is_upper


def test_a_pull_of_the_go_client() -> None:
    found = PullMessageRequestHeader.decode(
        {
            "consumerGroup": "g",
            "topic": "T",
            "queueId": "1",
            "queueOffset": "7",
            "maxMsgNums": "32",
            "sysFlag": "3",
            "commitOffset": "7",
            "suspendTimeoutMillis": "20000",
            "subscription": "*",
            "subVersion": "0",
            "expressionType": "TAG",
            "bname": "broker-a",
        }
    )
    assert (found.queue_id, found.queue_offset, found.sub_version, found.subscription) == (1, 7, 0, "*")
