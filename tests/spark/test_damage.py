"""Goal: a damaged store is told, not read: rows are those that were stored, or reading fails.

Method: one bit at a time is flipped in a store that a node wrote, in records and in the units of its queues, in random places
and in each field of one record's head. Every read either gives the rows of the sound store or raises. The seed is printed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from source_reading import read_table

from commitmq import Message, Producer
from commitmq.errors import CommitMQError
from nodes import start_node

FLIPS = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with start_node(tmp_path_factory.mktemp("damage"), "commit_log.segment_bytes=65536") as node:
        with Producer(node=node.address) as producer:
            for topic in ("one", "two"):
                for first in range(0, 40, 20):
                    messages: list[bytes | Message] = [
                        Message(f"body {number}".encode(), tags="t", keys=f"k{number}", properties={"n": str(number)})
                        for number in range(first, first + 20)
                    ]
                    producer.send_batch(topic, messages)
        node.stop()
        yield node.store


def rows(store: Path) -> pa.Table:
    table = read_table(store=store)
    return table.sort_by("physical_offset")


def flipped(store: Path, path: Path, bits: Iterator[int]) -> list[int]:
    """The bits whose flip gave other rows without an error."""
    sound = rows(store)
    assert sound.num_rows == 80
    silent = []
    for bit in bits:
        with path.open("r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ (1 << bit % 8)]))
        try:
            if not rows(store).equals(sound):
                silent.append(bit)
        except CommitMQError:
            pass
        finally:
            with path.open("r+b") as file:
                file.seek(bit // 8)
                file.write(bytes([byte]))
    return silent


def used(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0"))


def test_a_flipped_bit_of_the_log_is_told(store: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stderr.write(f"seed {seed}\n")
    path = min((store / "commitlog").iterdir())
    choose = random.Random(seed)
    assert flipped(store, path, (choose.randrange(used(path) * 8) for _ in range(FLIPS))) == []


def test_every_field_of_a_record_is_looked_at(store: Path) -> None:
    path = min((store / "commitlog").iterdir())
    # A bit of each byte of the first record's head: sizes, CRC, queue, flag, offsets, times, hosts, reconsume times.
    assert flipped(store, path, (8 * byte + byte % 8 for byte in range(88))) == []


def test_a_flipped_bit_of_a_queue_is_told(store: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stderr.write(f"seed {seed}\n")
    choose = random.Random(seed)
    path = choose.choice([one for one in sorted((store / "consumequeue").glob("*/*/0*")) if used(one)])
    # Places and sizes; a tag's hash code is compared with the record when a filter asks for the tag.
    whole = [8 * (20 * unit + byte) + bit for unit in range(used(path) // 20) for byte in range(12) for bit in range(8)]
    assert flipped(store, path, iter(choose.sample(whole, min(FLIPS, len(whole))))) == []
