"""Goal: records survive the way through their bytes, and no bytes are taken for a record that are none.

Method: round trips over generated records of every layout; damage to a good record at every byte; hand-made bytes for
the rules of spec 2.1, 2.2, 2.4, 2.9.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import CorruptRecordError, InvalidMessageError
from commitmq.format.constants import MAGIC_V1, MAGIC_V2, Host, SysFlag
from commitmq.format.record import (
    Record,
    body_crc,
    crc_digits,
    decode_record,
    encode_filler,
    encode_record,
    parse_crc_digits,
    peek,
    record_size,
)
from record_strategies import records

V4, V6 = Host("10.1.2.3", 10911), Host("2001:db8::7", 9)
SAMPLE = Record(
    "Orders",
    queue_id=3,
    queue_offset=41,
    physical_offset=4096,
    flag=-5,
    born_timestamp=1_700_000_000_000,
    store_timestamp=1_700_000_000_001,
    reconsume_times=2,
    prepared_transaction_offset=77,
    properties={"KEYS": "a b", "TAGS": "🚀x"},
    body=b"the body",
    born_host=V4,
    store_host=V4,
)


@given(records, st.booleans(), st.sampled_from([None, 16, 128]))
def test_decode_gives_back_what_was_encoded(record: Record, crc: bool, buckets: int | None) -> None:
    data = encode_record(record, properties_crc=crc, buckets=buckets)
    found = decode_record(b"xyz" + data + b"tail", 3)
    flags = record.sys_flag
    flags |= SysFlag.BORN_HOST_V6 if ":" in record.born_host.ip else 0
    flags |= SysFlag.STORE_HOST_V6 if ":" in record.store_host.ip else 0
    assert found == replace(record, sys_flag=flags, total_size=len(data), body_crc=body_crc(record.body))
    assert found.has_properties_crc == crc
    assert found.version == (2 if len(record.topic) > 127 else 1)
    assert peek(data) == (len(data), MAGIC_V2 if len(record.topic) > 127 else MAGIC_V1)
    assert encode_record(found, properties_crc=crc, buckets=buckets) == data


@given(records, st.data())
def test_a_record_with_a_crc_of_the_whole_shows_every_change(record: Record, data: st.DataObject) -> None:
    good = bytearray(encode_record(record, properties_crc=True))
    # The CRC covers all but its own 20 bytes; those must read as a CRC to be checked at all (spec 2.9).
    position = data.draw(st.integers(0, len(good) - 21))
    good[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptRecordError):
        decode_record(good)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_with_the_typed_error(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_record(data)


@given(records, st.data())
def test_a_damaged_record_is_refused_or_decodes(record: Record, data: st.DataObject) -> None:
    good = bytearray(encode_record(record))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_record(good)
    except CorruptRecordError as error:
        assert error.offset == 0
    else:
        assert found.total_size == len(good)


@pytest.mark.parametrize("cut", [1, 8, 40, 90, 100])
def test_a_cut_record_is_refused(cut: int) -> None:
    with pytest.raises(CorruptRecordError):
        decode_record(encode_record(SAMPLE)[:-cut])


def test_bytes_of_the_layout() -> None:
    """The fields one by one, at the offsets of spec 2.1."""
    data = encode_record(SAMPLE, buckets=None)
    properties = "KEYS\x01a b\x02TAGS\x01🚀x\x02".encode()
    assert data == (
        struct.pack(">iI", 91 + 8 + 6 + len(properties), 0xDAA320A7)
        + struct.pack(">iii", body_crc(b"the body"), 3, -5)
        + struct.pack(">qqi", 41, 4096, 0)
        + struct.pack(">q", 1_700_000_000_000)
        + bytes([10, 1, 2, 3])
        + struct.pack(">i", 10911)
        + struct.pack(">q", 1_700_000_000_001)
        + bytes([10, 1, 2, 3])
        + struct.pack(">i", 10911)
        + struct.pack(">iqi", 2, 77, 8)
        + b"the body"
        + b"\x06Orders"
        + struct.pack(">h", len(properties))
        + properties
    )


@pytest.mark.parametrize(
    ("topic", "born", "store", "overhead"),
    [
        ("T" * 127, V4, V4, 91),
        ("T" * 128, V4, V4, 92),
        ("T", V6, V4, 103),
        ("T", V4, V6, 103),
        ("T" * 128, V6, V6, 116),
    ],
)
def test_sizes_of_the_layouts(topic: str, born: Host, store: Host, overhead: int) -> None:
    record = replace(SAMPLE, topic=topic, born_host=born, store_host=store, properties={}, body=b"xx")
    v6 = (born is V6) + (store is V6)
    assert len(encode_record(record)) == overhead + 2 + len(topic)
    assert record_size(2, len(topic), 0, v2=len(topic) > 127, v6_hosts=v6) == overhead + 2 + len(topic)


def test_the_crc_of_the_whole_is_the_last_property() -> None:
    data = encode_record(replace(SAMPLE, properties={"A": "b", "__CRC32#": "forged"}), properties_crc=True)
    assert data[-26:] == b"\x00\x18A\x01b\x02__CRC32#\x01" + crc_digits(body_crc(data[:-20])) + b"\x02"
    assert decode_record(data).properties == {"A": "b"}


def test_a_crc_like_property_elsewhere_is_a_property() -> None:
    """A node without the feature stores a producer's own text of that name; it protects nothing."""
    record = replace(SAMPLE, properties={"__CRC32#": "1234567890", "Z": "z"})
    found = decode_record(encode_record(record, buckets=None))
    assert found.properties == record.properties
    assert not found.has_properties_crc


def test_a_crc_whose_value_is_no_number_is_damage() -> None:
    data = bytearray(encode_record(SAMPLE, properties_crc=True))
    data[-5] ^= 0x10  # a digit becomes a sign
    with pytest.raises(CorruptRecordError, match="is not ten digits"):
        decode_record(data)
    assert decode_record(data, check_crc=False).properties == SAMPLE.properties


@pytest.mark.parametrize(("value", "digits"), [(1234, b"4321000000"), (0, b"0000000000"), (1274296614, b"4166924721")])
def test_crc_digits(value: int, digits: bytes) -> None:
    assert crc_digits(value) == digits
    assert parse_crc_digits(digits) == value


def test_body_crc_vectors() -> None:
    assert body_crc(b"123456789") == 0x4BF43926
    assert body_crc(b"") == 0


def test_a_false_body_crc_is_seen_only_when_asked_for() -> None:
    data = bytearray(encode_record(SAMPLE))
    data[11] ^= 1
    with pytest.raises(CorruptRecordError, match="CRC"):
        decode_record(data)
    assert decode_record(data, check_crc=False).body == SAMPLE.body


def test_a_record_in_another_place_is_refused() -> None:
    data = encode_record(SAMPLE)
    assert decode_record(data, expected_physical_offset=4096).physical_offset == 4096
    with pytest.raises(CorruptRecordError, match="says it lies at 4096, it was found at 8192"):
        decode_record(data, expected_physical_offset=8192)


def test_a_filler_and_zeros_are_named() -> None:
    with pytest.raises(CorruptRecordError, match="filler"):
        decode_record(encode_filler(200) + bytes(200))
    with pytest.raises(CorruptRecordError, match="0x00000000"):
        decode_record(bytes(200))


def test_a_v1_topic_length_is_signed() -> None:
    """200 is −56 to Java: such a record would end RocketMQ's recovery, so it must not pass here."""
    record = replace(SAMPLE, topic="T" * 200, version=2, properties={}, body=b"")
    v2 = encode_record(record)
    v1 = bytearray(v2[:88] + v2[89:])
    struct.pack_into(">ii", v1, 0, len(v1), MAGIC_V1)
    with pytest.raises(CorruptRecordError, match="topic"):
        decode_record(v1)


@pytest.mark.parametrize(
    "bad",
    [
        {"topic": "ü" * 100},
        {"topic": "\ud800"},
        {"born_host": Host("nowhere", 1)},
        {"properties": {"a": "x" * 32_767}},
        {"properties": {"a": ""}},
        {"properties": {"": "a"}},
        {"properties": {"a\x01": "b"}},
        {"properties": {"a": "b\x02"}},
        {"properties": {"a": "\ud800"}},
    ],
)
def test_what_the_format_cannot_hold_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidMessageError):
        encode_record(replace(SAMPLE, **bad))  # type: ignore[arg-type]


def test_the_properties_limit_counts_the_crc() -> None:
    record = replace(SAMPLE, properties={"a": "x" * (32_767 - 3)})
    assert decode_record(encode_record(record)).properties == record.properties
    with pytest.raises(InvalidMessageError, match="32787 bytes, 32767 are allowed"):
        encode_record(record, properties_crc=True)
