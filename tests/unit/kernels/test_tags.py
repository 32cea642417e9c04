"""Goal: the kernel's verdict on a record equals what the plain decoder says of its TAGS property.

Method: records of every layout (v1/v2, IPv4/IPv6 hosts, odd property strings) are encoded side by side in one buffer
and judged both ways; then bytes are damaged and must never match, crash or be read past the end.
"""

from __future__ import annotations

import random
import struct
import sys

import numpy as np
import pytest

from commitmq.format.constants import Host
from commitmq.format.properties import decode_properties
from commitmq.format.record import Record, encode_record
from commitmq.kernels.codes import MATCH, NO_MATCH, NO_RECORD
from commitmq.kernels.compiled import match_tags
from commitmq.store.queues.tag_filter import TagFilter

V4 = Host("127.0.0.1", 10911)
V6 = Host("2001:db8::1", 10911)


def with_properties(record: bytes, properties: bytes) -> bytes:
    """``record`` (which has none) with raw property bytes at its end and its lengths put right."""
    body = record[:-2] + struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", len(body)) + body[4:]


def judge(records: list[bytes], tags: list[str], *, cut: int = 0) -> list[int]:
    """Verdicts for ``records`` laid end to end behind 13 odd bytes, the last ``cut`` bytes of the buffer missing."""
    prefix = b"\x02" * 13
    log = np.frombuffer(prefix + b"".join(records), np.uint8)
    log = log[: len(log) - cut]
    sizes = np.array([len(one) for one in records], np.int64)
    positions = len(prefix) + np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
    wanted = TagFilter(tags)
    verdicts = np.full(len(records), 99, np.uint8)
    matched = match_tags(log, positions, sizes, *wanted.texts, verdicts)
    assert matched == int((verdicts == MATCH).sum())
    result: list[int] = verdicts.tolist()
    return result


@pytest.mark.parametrize("born", [V4, V6])
@pytest.mark.parametrize("store", [V4, V6])
@pytest.mark.parametrize("topic", ["t", "%RETRY%" + "g" * 130])
@pytest.mark.parametrize("body", [b"", b"\x01TAGS\x01A\x02" * 9])
def test_layouts(born: Host, store: Host, topic: str, body: bytes) -> None:
    record = encode_record(
        Record(topic, body=body, properties={"KEYS": "TAGS", "TAGS": "A", "z": "A"}, born_host=born, store_host=store)
    )
    assert judge([record, record], ["A"]) == [MATCH, MATCH]
    assert judge([record], ["B", "AA", "a"]) == [NO_MATCH]


@pytest.mark.parametrize(
    ("properties", "tag"),
    [
        (b"TAGS\x01A\x02", "A"),
        (b"TAGS\x01A", "A"),  # no final separator, as up to 5.1
        (b"TAGS\x01A\x02TAGS\x01B\x02", "B"),  # the last one counts
        (b"TAGS\x01A\x02TAGS\x01\x02", "A"),  # an empty value is dropped
        (b"TAGS\x01A\x01B\x02", "A\x01B"),
        (b"XTAGS\x01A\x02", None),
        (b"TAGSX\x01A\x02", None),
        (b"\x01A\x02TAGS\x02\x02", None),
        (b"TAGS", None),
        (b"", None),
        (b"KEYS\x01TAGS\x02TAGS\x01A\x02__CRC32#\x010123456789\x02", "A"),
    ],
)
def test_property_strings(properties: bytes, tag: str | None) -> None:
    assert decode_properties(properties).get("TAGS") == tag  # the plain decoder agrees with the table
    record = with_properties(encode_record(Record("topic", body=b"b")), properties)
    assert judge([record], [tag or "A"]) == [MATCH if tag else NO_MATCH]
    assert judge([record], ["C"]) == [NO_MATCH]


def test_tags_of_equal_hash_are_told_apart() -> None:
    assert len(TagFilter(["Aa", "BB"]).codes) == 1
    records = [encode_record(Record("t", properties={"TAGS": tag})) for tag in ("Aa", "BB", "标签", "🚀x")]
    assert judge(records, ["BB"]) == [NO_MATCH, MATCH, NO_MATCH, NO_MATCH]
    assert judge(records, ["🚀x", "标签"]) == [NO_MATCH, NO_MATCH, MATCH, MATCH]


def test_against_the_plain_decoder() -> None:
    seed = random.randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    source = random.Random(seed)
    parts = [b"TAGS", b"A", b"BB", b"KEYS", b"\x01", b"\x02", "标签".encode(), b""]
    for _ in range(300):
        strings = [b"".join(source.choices(parts, k=source.randrange(14))) for _ in range(8)]
        bare = encode_record(Record("topic", body=b"body"))
        records = [with_properties(bare, one) for one in strings]
        wanted = source.sample(["A", "BB", "AA", "标签", "KEYS"], source.randrange(1, 4))
        expected = [MATCH if decode_properties(one).get("TAGS") in wanted else NO_MATCH for one in strings]
        assert judge(records, wanted) == expected, (seed, strings, wanted)


def test_what_is_no_record() -> None:
    record = encode_record(Record("t", body=b"b", properties={"TAGS": "A"}))
    assert judge([record, record], ["A"], cut=1) == [MATCH, NO_RECORD]
    assert judge([record, record], ["A"], cut=len(record)) == [MATCH, NO_RECORD]
    seed = random.randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    source = random.Random(seed)
    for _ in range(2_000):
        damaged = bytearray(record)
        damaged[source.randrange(len(damaged))] = source.randrange(256)
        (verdict,) = judge([bytes(damaged)], ["A"])
        assert verdict in (MATCH, NO_MATCH, NO_RECORD)
    for position in range(8):  # size and magic
        damaged = bytearray(record)
        damaged[position] ^= 0x5A
        assert judge([bytes(damaged)], ["A"]) == [NO_RECORD]
    outside = np.array([-1, 1 << 40], np.int64)
    verdicts = np.zeros(2, np.uint8)
    wanted = TagFilter(["A"])
    log = np.frombuffer(record, np.uint8)
    assert match_tags(log, outside, np.full(2, len(record), np.int64), *wanted.texts, verdicts) == 0
    assert verdicts.tolist() == [NO_RECORD, NO_RECORD]
