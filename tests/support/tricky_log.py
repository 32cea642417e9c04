"""Logs whose bodies hold what an adversary may put there who knows where his message will lie."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record, encode_filler, encode_record
from commitmq.store.log.commit_log import CommitLog

SEGMENT_BYTES = 16_384
HEAD_BYTES = 88  # before a body, with two IPv4 hosts
HOST = Host("127.0.0.1", 10911)
TRICKS = ("noise", "header", "copied", "placed", "chain", "joined")


def record(position: int, body: bytes, number: int = 0) -> bytes:
    return encode_record(
        Record("T", queue_offset=number, physical_offset=position, body=body, properties={"TAGS": "a"},
               store_timestamp=1_000, born_host=HOST, store_host=HOST)
    )  # fmt: skip


def tail_bytes() -> int:
    """What follows a body."""
    return len(record(0, b"")) - HEAD_BYTES


def body_of(trick: str, position: int, chance: random.Random) -> bytes:
    """A body for the record at ``position``."""
    at = position + HEAD_BYTES
    before = chance.randbytes(chance.randrange(40))
    if trick == "header":
        return before + record(at + len(before), b"x" * 50)[:80] + bytes(120)
    if trick == "copied":
        return before + record(chance.randrange(1 << 20), chance.randbytes(30)) + b"."
    if trick == "placed":
        return before + record(at + len(before), chance.randbytes(chance.randrange(200))) + before
    if trick == "chain":
        body = b""
        for number in range(chance.randrange(1, 6)):
            body += record(at + len(body), chance.randbytes(chance.randrange(100)), number)
        return body
    if trick == "joined":
        first = record(at, b"first")
        inner = record(at + len(first), chance.randbytes(60))
        return first + inner[: -tail_bytes()]
    return chance.randbytes(chance.randrange(600))


def build(folder: Path, tricks: Sequence[str], seed: int) -> tuple[CommitLog, list[int]]:
    """A log with a record for each of ``tricks``; and where they begin."""
    folder.mkdir(exist_ok=True)
    chance = random.Random(seed)
    segments: dict[int, bytearray] = {0: bytearray(SEGMENT_BYTES)}
    offsets: list[int] = []
    end = 0
    for trick in tricks:
        data = record(end, body_of(trick, end, chance), len(offsets))
        left = SEGMENT_BYTES - end % SEGMENT_BYTES
        if len(data) + 8 > left:
            segments[end - end % SEGMENT_BYTES][-left:] = encode_filler(left).ljust(left, b"\0")
            end += left
            segments[end] = bytearray(SEGMENT_BYTES)
            data = record(end, body_of(trick, end, chance), len(offsets))
        base = end - end % SEGMENT_BYTES
        segments[base][end - base : end - base + len(data)] = data
        offsets.append(end)
        end += len(data)
    for path in folder.iterdir():
        path.unlink()
    for base, segment in segments.items():
        (folder / segment_name(base)).write_bytes(segment)
    return CommitLog(folder, SEGMENT_BYTES), offsets


def segment_of(log: CommitLog, base: int) -> NDArray[np.uint8]:
    return np.frombuffer(log.read(base, SEGMENT_BYTES), np.uint8)
