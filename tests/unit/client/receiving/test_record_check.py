"""Goal: no damaged record, and no record of another place, gets past the consumer's last look; whole ones always do.

Method: records of RocketMQ's own and of ours; then any byte of one of them is changed, or it is put where it does not belong.
"""

from __future__ import annotations

import random

import pytest

from commitmq.client.receiving.part import RecordBatch, parts_of_records
from commitmq.client.receiving.record_check import check_bytes, check_places
from commitmq.errors import CorruptRecordError
from commitmq.format.constants import Host
from commitmq.format.record import Record, encode_record
from commitmq.store.log.commit_log import CommitLog
from golden_stores import GoldenStore

V4, V6 = Host("127.0.0.1", 1), Host("::1", 2)


def one(number: int = 0, *, crc: bool = True, topic: str = "T", **fields: object) -> bytes:
    values = {
        "queue_id": 3,
        "queue_offset": number,
        "body": b"body %d" % number * 9,
        "properties": {"k": "v"},
        **fields,
    }
    return encode_record(Record(topic, physical_offset=1_000 * number, **values), properties_crc=crc)  # type: ignore[arg-type]


def parts(*records: bytes, topic: str = "T") -> list[RecordBatch]:
    return parts_of_records(topic, 3, [memoryview(b"".join(records))])


def check(*records: bytes, asked: int = 0, following: int = 1 << 40, topic: str = "T") -> None:
    for part in parts(*records, topic=topic):
        check_places(part, asked, following)
        check_bytes(part)


def test_whole_records_pass(golden: GoldenStore) -> None:
    log = CommitLog(golden.layout.commit_log, 131_072)
    for record in log.iter_records():
        raw = bytes(log.read(record.physical_offset, record.total_size))
        for part in parts_of_records(record.topic, record.queue_id, [memoryview(raw)]):
            check_places(part, record.queue_offset, record.queue_offset + 1)
            check_bytes(part)
    log.close()
    long_topic = "x" * 200
    for born in (V4, V6):
        for store in (V4, V6):
            check(
                *(
                    one(n, crc=n % 2 == 0, born_host=born, store_host=store, body=b"" if n == 3 else b"b")
                    for n in range(6)
                )
            )
    check(one(0, topic=long_topic), one(1, topic=long_topic), topic=long_topic)
    check(one(0, crc=False, properties={}), one(1, body=b"__CRC32#\x011234567890\x02", crc=False, properties={}))


@pytest.mark.parametrize("crc", [True, False], ids=["record", "body"])
def test_any_changed_byte_is_found(crc: bool) -> None:
    whole = one(1, crc=crc)
    body = whole.index(b"body")
    # The last ten digits before the end are the CRC: each of their bits counts, also one that makes a letter of a digit.
    for at in range(len(whole)) if crc else range(body, body + 54):
        for bit in range(8) if at > len(whole) - 12 else (random.randrange(8),):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            with pytest.raises(CorruptRecordError):
                check(one(0, crc=crc), bytes(data), one(2, crc=crc), asked=0, following=3)


def test_the_damaged_one_is_named() -> None:
    bad = bytearray(one(1))
    bad[bad.index(b"body")] ^= 1
    with pytest.raises(CorruptRecordError, match=r"__CRC32#, at physical offset 1000, queue offset 1 ") as found:
        check(one(0), bytes(bad), one(2))
    assert found.value.offset == 1_000


@pytest.mark.parametrize(
    "records",
    [
        (one(5), one(6, topic="U"), one(7)),
        (one(5), one(6, topic="TT"), one(7)),
        (one(5), one(5), one(6)),
        (one(5), one(7), one(6)),
        (one(4), one(5), one(6)),
        (one(5), one(6), one(8)),
    ],
    ids=["other topic", "longer topic", "twice", "other order", "before", "behind"],
)
def test_a_record_of_another_place_is_found(records: tuple[bytes, ...]) -> None:
    with pytest.raises(CorruptRecordError, match="another place"):
        check(*records, asked=5, following=8)
