"""Goal: properties come back as they went in; RocketMQ's order and its lenient decoding are kept (spec 2.5).

Method: round trips of random properties, and examples whose bytes RocketMQ wrote.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import CorruptRecordError, InvalidMessageError
from commitmq.format.client_batch import BatchElement, decode_client_batch, encode_client_batch
from commitmq.format.java import hash_map_order, java_string_hash, utf16_units
from commitmq.format.properties import decode_properties, encode_properties
from record_strategies import properties


@given(properties, st.sampled_from([None, 16, 128]))
def test_round_trip(values: dict[str, str], buckets: int | None) -> None:
    assert decode_properties(encode_properties(values, buckets=buckets)) == values


@given(st.binary(max_size=200))
def test_decoding_never_fails(data: bytes) -> None:
    assert all(name and value for name, value in decode_properties(data).items())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", {}),
        (b"a\x01b\x02c\x01d", {"a": "b", "c": "d"}),
        (b"a\x01b\x02c\x01d\x02", {"a": "b", "c": "d"}),
        (b"a\x01\x02c\x01d\x02", {"c": "d"}),
        (b"\x01b\x02c\x01d\x02", {"c": "d"}),
        (b"ab\x02\x02c\x01d\x02", {"c": "d"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_decoding_rules(data: bytes, expected: dict[str, str]) -> None:
    assert decode_properties(data) == expected


def test_order_of_a_java_hash_map() -> None:
    """The order that golden records show, of names that a plain sort would order otherwise."""
    names = ["WAIT", "UNIQ_KEY", "TRACE_ON", "TAGS", "MSG_REGION", "KEYS", "CLUSTER"]
    assert hash_map_order(names, 128) == ["MSG_REGION", "UNIQ_KEY", "CLUSTER", "TAGS", "KEYS", "WAIT", "TRACE_ON"]
    assert hash_map_order(["b", "a"], 16) == ["a", "b"]
    # "Aa" and "BB" have one hash: they share a bucket, where what came first stays first.
    assert hash_map_order(["BB", "Aa"], 16) == ["BB", "Aa"]
    assert hash_map_order(["Aa", "BB"], 16) == ["Aa", "BB"]


def test_a_full_map_doubles() -> None:
    """0 .. 12 as characters: with 12 names 16 buckets stay, the 13th makes them 32 and "Q" (81) moves behind."""
    names = [chr(65 + number) for number in range(11)] + ["Q"]
    assert hash_map_order(names, 16).index("Q") == 1  # 81 & 15 == 1 == 65 & 15, behind "A"
    assert hash_map_order([*names, "L"], 16)[-1] == "Q"  # 81 & 31 == 17


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("TagA", 2598919),
        ("Aa", 2112),
        ("BB", 2112),
        ("\U0001f600", 1772899),
        ("标签", 857175),
        ("A-much-longer-tag-name-to-hash", 1047070881),
        ("🚀x", 54963957),
    ],
)
def test_java_string_hash(text: str, value: int) -> None:
    assert java_string_hash(text) == value


def test_java_string_hash_is_signed() -> None:
    assert java_string_hash("polygenelubricants") == -(2**31)


def test_utf16_units() -> None:
    assert [utf16_units(text) for text in ("", "abc", "ü", "🚀x")] == [0, 3, 1, 3]


elements = st.builds(
    BatchElement,
    body=st.binary(max_size=50),
    properties=properties.map(lambda values: encode_properties(values, buckets=16)),
    flag=st.integers(-(2**31), 2**31 - 1),
)


@given(st.lists(elements, max_size=8))
def test_client_batch_round_trip(batch: list[BatchElement]) -> None:
    data = encode_client_batch(batch)
    assert decode_client_batch(data) == batch
    assert len(data) == sum(22 + len(one.body) + len(one.properties) for one in batch)


@given(st.lists(elements, min_size=1, max_size=4), st.data())
def test_a_damaged_client_batch_is_refused_or_decodes(batch: list[BatchElement], data: st.DataObject) -> None:
    body = bytearray(encode_client_batch(batch))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode_client_batch(bytes(body)[: data.draw(st.integers(0, len(body)))])
    except CorruptRecordError as error:
        assert error.offset is not None


def test_client_batch_bytes() -> None:
    data = encode_client_batch([BatchElement(b"xyz", b"a\x01b\x02", 7)])
    assert data == bytes.fromhex("0000001d 00000000 00000000 00000007 00000003") + b"xyz\x00\x04a\x01b\x02"
    with pytest.raises(CorruptRecordError, match="byte 0"):
        decode_client_batch(data[:-1])
    with pytest.raises(InvalidMessageError):
        encode_client_batch([BatchElement(b"", bytes(32_768))])
