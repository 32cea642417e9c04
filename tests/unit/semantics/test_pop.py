"""Goal: receipt handles, the strings of a pop's answer and batch acks have RocketMQ's text.

Method: the examples of the remoting protocol; round trips over generated values; damaged texts are refused.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.semantics.pop import (
    NORMAL,
    ORDERED_REVIVE_QUEUE,
    RETRY_V1,
    RETRY_V2,
    Delivered,
    ReceiptHandle,
    decode_bits,
    encode_bits,
    handles,
    message_offset_info,
    order_count_info,
    parse_info,
    retry_flag,
    start_offset_info,
    topic_of_flag,
)

EXAMPLE = "40 1763800001000 60000 3 0 broker-a 2 41"
HANDLE = ReceiptHandle(40, 1_763_800_001_000, 60_000, 3, NORMAL, "broker-a", 2, 41)


def test_the_handles_text_is_rocketmqs() -> None:
    assert str(HANDLE) == EXAMPLE
    assert ReceiptHandle.parse(EXAMPLE) == HANDLE
    assert HANDLE.expires_ms == 1_763_800_061_000


def test_a_handle_of_seven_parts_names_no_message() -> None:
    handle = ReceiptHandle.parse("40 1763800001000 60000 3 1 broker-a 2")
    assert handle.queue_offset is None
    assert str(handle) == "40 1763800001000 60000 3 1 broker-a 2"


def test_revive_queue_999_is_an_ordered_pop() -> None:
    assert not HANDLE.is_ordered
    assert HANDLE._replace(revive_queue=ORDERED_REVIVE_QUEUE).is_ordered


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 2 3 4 0 b",
        EXAMPLE + " 9",
        "x 2 3 4 0 b 5",
        "1 2 3 4 7 b 5",
        "1 2 3 4 0  5",
        "1 2 3 4 0 b ٣",
        "1 2  4 0 b 5",
    ],
)
def test_another_text_is_no_handle(text: str) -> None:
    with pytest.raises(InvalidMessageError):
        ReceiptHandle.parse(text)


number = st.integers(0, 2**62)
name = st.text(st.sampled_from("abc-_0"), min_size=1, max_size=9)


@given(
    st.builds(
        ReceiptHandle, number, number, number, number, st.sampled_from([0, 1, 2]), name, number, st.none() | number
    )
)
def test_a_handle_comes_back_from_its_text(handle: ReceiptHandle) -> None:
    assert ReceiptHandle.parse(str(handle)) == handle


def test_the_retry_flag_tells_the_topic() -> None:
    topics = ["orders", "%RETRY%g_orders", "%RETRY%g+orders"]
    assert [retry_flag(topic) for topic in topics] == [NORMAL, RETRY_V1, RETRY_V2]
    assert [topic_of_flag("orders", "g", flag) for flag in (0, 1, 2)] == topics
    assert HANDLE._replace(flag=RETRY_V1).topic("orders", "g") == "%RETRY%g_orders"


def test_a_change_makes_a_check_point_of_its_own() -> None:
    assert str(HANDLE.changed(1_763_800_005_000, 10_000)) == "41 1763800005000 10000 3 0 broker-a 2 41"


# ---------------------------------------------------------------- the strings of an answer


def test_the_strings_of_an_answer_are_rocketmqs() -> None:
    queues = [Delivered(0, 2, 40, (40, 41)), Delivered(1, 0, 5, (5,))]
    assert start_offset_info(queues) == "0 2 40;1 0 5"
    assert message_offset_info(queues) == "0 2 40,41;1 0 5"
    assert [str(one) for one in handles(queues, 1_763_800_001_000, 60_000, 3, "broker-a")] == [
        "40 1763800001000 60000 3 0 broker-a 2 40",
        "40 1763800001000 60000 3 0 broker-a 2 41",
        "5 1763800001000 60000 3 1 broker-a 0 5",
    ]


def test_the_order_count_has_each_repeated_message_and_then_the_queue() -> None:
    assert order_count_info(0, 2, [(40, 1)], 2) == "0 qo2%40 1;0 2 0"
    assert order_count_info(0, 2, [(40, 3), (41, 2)], 2) == "0 qo2%40 3;0 qo2%41 2;0 2 2"
    assert order_count_info(0, 3, [], 1) == "0 3 0"


def test_the_strings_come_back_as_entries() -> None:
    assert parse_info("") == {}
    assert parse_info("0 2 40,41;1 0 5") == {"0@2": "40,41", "1@0": "5"}
    assert parse_info("0 qo2%40 1;0 2 0") == {"0@qo2%40": "1", "0@2": "0"}


@pytest.mark.parametrize("text", ["0 2", "0 2 40;", "0 2 40;0 2 41", "0 2 40 1"])
def test_a_broken_string_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessageError, match="no valid entry"):
        parse_info(text)


# ---------------------------------------------------------------- batch acks


def test_bits_are_little_endian() -> None:
    assert encode_bits([40, 41], 40) == "Aw=="
    assert encode_bits([48], 40) == "AAE="
    assert decode_bits("AAE=", 40) == [48]
    assert encode_bits([], 40) == ""


@given(st.sets(st.integers(0, 200)), st.integers(0, 2**40))
def test_a_bit_set_comes_back_from_its_text(deltas: set[int], start: int) -> None:
    offsets = sorted(start + delta for delta in deltas)
    assert decode_bits(encode_bits(offsets, start), start) == offsets


def test_a_broken_bit_set_is_refused() -> None:
    with pytest.raises(InvalidMessageError):
        decode_bits("no base64", 0)
    with pytest.raises(InvalidMessageError, match="before the batch's first"):
        encode_bits([3], 4)
