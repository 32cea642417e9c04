"""Goal: what cannot be stored is refused before it is sent, with a reason; what can, keeps its meaning.

Method: messages are made with values on both sides of each limit; no node is there.
"""

from __future__ import annotations

import pytest

from commitmq import InvalidMessageError, Message
from commitmq.client.message import check_flag, check_topic
from commitmq.client.properties import build_properties, sendable
from commitmq.client.receiving.part import received
from commitmq.format.properties import encode_properties


def test_a_message_to_be_sent() -> None:
    message = Message(bytearray(b"body"), tags="T", keys=["a", "b"], properties={"p": "q"}, sharding_key="s", flag=-1)  # type: ignore[arg-type]
    assert message.body == b"body"
    assert (message.tags, message.keys, message.sharding_key, message.flag) == ("T", ["a", "b"], "s", -1)
    assert message.properties == {"p": "q", "TAGS": "T", "KEYS": "a b", "__SHARDINGKEY": "s"}
    assert message.msg_id is None
    assert message.unique_id is None
    assert "4 bytes" in repr(message)


@pytest.mark.parametrize("body", [b"", "text", None, 5, bytearray()])
def test_bodies_that_are_none(body: object) -> None:
    with pytest.raises(InvalidMessageError, match="body"):
        Message(body)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tags": "a\x01b"}, "tags contains"),
        ({"keys": "a\x02"}, "keys contains"),
        ({"keys": ["a b"]}, "has no space"),
        ({"keys": ["a", ""]}, "not empty"),
        ({"keys": [5]}, "must be a string"),
        ({"tags": 5}, "must be a string"),
        ({"properties": {"": "x"}}, "is empty"),
        ({"properties": {"x": ""}}, "is empty"),
        ({"properties": {"x": 1}}, "must be a string"),
        ({"properties": {"a\x00": "x"}}, "contains the character"),
        ({"properties": {"TAGS": "x"}}, "give it as tags="),
        ({"properties": {"KEYS": "x"}}, "give it as keys="),
        ({"properties": {"UNIQ_KEY": "x"}}, "the client makes it"),
        ({"properties": {"__CRC32#": "x"}}, "the node makes it"),
        ({"properties": {"DELAY": "3"}}, "a plain send must not set it"),
        ({"properties": {"TRAN_MSG": "true"}}, "a plain send must not set it"),
        ({"sharding_key": "\ud800"}, "no valid Unicode"),
        ({"properties": {"x": "y" * 32_768}}, "the properties take"),
    ],
)
def test_properties_that_cannot_be_stored(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidMessageError, match=reason):
        Message(b"x", **fields)  # type: ignore[arg-type]


def test_the_largest_properties_fit_and_one_byte_more_does_not() -> None:
    # 32,767 less the unique id (8 + 1 + 32 + 1) and the CRC slot (20), less name and two separators.
    longest = 32_767 - 42 - 20 - len("x") - 2
    assert build_properties(None, None, {"x": "y" * longest}, None)
    with pytest.raises(InvalidMessageError, match="the properties take 32706 bytes"):
        build_properties(None, None, {"x": "y" * (longest + 1)}, None)


def test_the_size_of_properties_is_counted_in_bytes() -> None:
    with pytest.raises(InvalidMessageError, match="the properties take"):
        build_properties("🚀" * 8_200, None, None, None)


@pytest.mark.parametrize(
    "topic", ["", "a b", "ä", "x" * 128, "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "a/b", 5]
)
def test_topics_that_take_no_messages(topic: object) -> None:
    with pytest.raises(InvalidMessageError):
        check_topic(topic)


@pytest.mark.parametrize("topic", ["x" * 127, "%RETRY%" + "g" * 200, "A-b_c|1%"])
def test_topics_that_do(topic: str) -> None:
    assert check_topic(topic) == topic


@pytest.mark.parametrize("flag", [1 << 31, -(1 << 31) - 1, "1", 1.0, True])
def test_a_flag_is_a_signed_32_bit_number(flag: object) -> None:
    with pytest.raises(InvalidMessageError):
        check_flag(flag)  # type: ignore[arg-type]


def test_a_received_message() -> None:
    raw = encode_properties({"TAGS": "🚀x", "KEYS": "a b", "UNIQ_KEY": "ID", "__CRC32#": "1234567890"}, buckets=None)
    message = received("T", 1, 2, 1758, 5, 4, 0, 7, 3, bytes.fromhex("7f00000100002a9f"), raw, b"body")
    assert message.msg_id == "7F00000100002A9F00000000000006DE"
    assert (message.tags, message.keys, message.unique_id) == ("🚀x", ["a", "b"], "ID")
    assert "__CRC32#" not in message.properties
    assert message.to_json()["body"] == "body"
    assert sendable(message.properties) == {"TAGS": "🚀x", "KEYS": "a b"}


def test_a_body_that_is_no_text_becomes_base64_in_json() -> None:
    message = received("T", 1, 2, 3, 5, 4, 0, 7, 3, bytes(8), b"", b"\xff")
    assert message.to_json()["body_base64"] == "/w=="
    assert "body" not in message.to_json()
