"""Goal: without ``__CRC32#`` a sector that never reached the disk ends the log, and a zero byte in a property does not.

Method: records as RocketMQ makes them by default, with zero bytes at any place of a property's value; then each sector of the
file is taken away in turn, with its neighbours or alone. No record that lost a byte may be taken for whole.
"""

from __future__ import annotations

import mmap
import os
import random

import numpy as np
import pytest

from commitmq.client.receiving.record_check import lacks_sector
from commitmq.format.constants import Host
from commitmq.format.message_id import pack_host
from commitmq.kernels import codes, compiled
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.log.run_check import MessageIllegalError

SEGMENT = 1 << 16


def log_of(chance: random.Random, count: int) -> tuple[bytes, list[int]]:
    """A segment of records without CRC, and where each ends."""
    segment = mmap.mmap(-1, SEGMENT)
    host = pack_host(Host("127.0.0.1", 1))
    appender = CommitLogAppender(
        0,
        segment_bytes=SEGMENT,
        open_segment=lambda _base: segment,
        close_segment=lambda _mapping: None,
        store_host=host,
        max_message_bytes=1 << 14,
        properties_crc=False,
        clock=lambda: 1_700_000_000_000,
    )
    ends = []
    for number in range(count):
        value = bytearray(chance.randbytes(chance.choice((1, 30, 700, 3000))).hex().encode())
        runs = chance.choice((0, 1, 1, 3))
        for _ in range(runs):
            # Together they stay below a sector: what cannot be told from a lost one is refused, see below.
            at, size = chance.randrange(len(value)), chance.choice((1, 2, 30, 400 if runs == 1 else 150))
            value[at : at + size] = bytes(len(value[at : at + size]))
        record = appender.encode(
            b"orders",
            0,
            chance.randbytes(chance.choice((0, 1, 300, 1500))),
            b"a\x01" + bytes(value) + b"\x02b\x01c\x02",
            sys_flag=0,
            flag=0,
            born_timestamp=1,
            born_host=host,
            checked=True,
        )
        ends.append(appender.append_record(record, number, 8).end)
    return segment[:], ends


def scan(data: bytes) -> int:
    """End of the last record that counts as whole."""
    out = np.zeros(5, np.int64)
    compiled.scan(np.frombuffer(data, np.uint8), 0, len(data), 0, False, out)
    return int(out[1])


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_lost_sector_ends_the_log_and_a_zero_byte_does_not(sector: int) -> None:
    number = int(os.environ.get("COMMITMQ_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"COMMITMQ_SEED={number}")  # noqa: T201 - pytest shows it with a failure
    chance = random.Random(number)
    for _ in range(30):
        data, ends = log_of(chance, chance.randint(3, 8))
        assert scan(data) == ends[-1], "nothing is lost"
        for at in range(0, ends[-1], sector):
            for stop in (at + sector, SEGMENT):  # one alone, or all from there on
                lost = data[:at] + bytes(stop - at) + data[stop:]
                differs = [index for index, (old, new) in enumerate(zip(data, lost, strict=True)) if old != new]
                whole = [end for end in ends if not differs or end <= differs[0]]
                assert scan(lost) == (whole[-1] if whole else 0), f"sector at {at}"


def test_a_client_sees_the_same_lost_sectors() -> None:
    chance = random.Random(11)
    for _ in range(2000):
        data = bytearray(chance.choice((0, 0, 0, 1)) for _ in range(chance.randint(1, 1600)))
        for _ in range(2):
            at = chance.randrange(len(data))
            data[at : at + 600] = bytes(len(data[at : at + 600]))
        offset = chance.randrange(5000)
        sectors: dict[int, bool] = {}
        for index, byte in enumerate(data, offset):
            sectors[index // 512] = sectors.get(index // 512, False) or byte != 0
        expected = not all(sectors.values())
        assert lacks_sector(bytes(data), offset) == expected
        assert compiled.lacks_a_sector(np.frombuffer(bytes(data), np.uint8), 0, len(data), offset) == expected


def test_what_cannot_be_told_from_a_lost_sector_is_refused() -> None:
    appender = CommitLogAppender(
        0,
        segment_bytes=SEGMENT,
        open_segment=lambda _base: None,
        store_host=bytes(8),
        max_message_bytes=1 << 14,
        properties_crc=False,
    )
    for zeros, refused in ((511, False), (512, True)):
        properties = b"a\x01b" + bytes(zeros) + b"c\x02"
        arguments = {"sys_flag": 0, "flag": 0, "born_timestamp": 1, "born_host": bytes(8)}
        if refused:
            with pytest.raises(MessageIllegalError, match="512 zero bytes"):
                appender.encode(b"orders", 0, b"", properties, **arguments)  # type: ignore[arg-type]
        else:
            assert appender.encode(b"orders", 0, b"", properties, **arguments)  # type: ignore[arg-type]
    assert codes.SECTOR_BYTES == 512
