"""Measures how many existing messages a second one consumer reads, as columns or as Message objects.

Every byte of every body is touched, as a real reader would: the sum of their CRC-32s. A sum does not depend on the order
in which queues are read, so it can be computed beforehand and compared.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commitmq.bench.sends import make_bodies
from commitmq.bench.target import BenchTopic, Clock, Progress, no_progress
from commitmq.client.consumer import Reader
from commitmq.client.producer import Producer
from commitmq.client.receiving.batch import MessageBatch
from commitmq.errors import CommitMQError
from commitmq.kernels.compiled import sum_of_crcs

FORMS = ("columns", "messages")
_FILL_BATCH = 1000
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class FilledTopic:
    """The messages written by :func:`fill`, as a reader must find them: the sums over all messages in either form."""

    messages: int
    columns_sum: int
    messages_sum: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """One run over ``messages`` with ``body_bytes`` in all their bodies; ``checked``: it equals what was sent."""

    form: str
    mode: str
    messages: int
    body_bytes: int
    polls: int
    seconds: float
    messages_per_s: float
    mib_per_s: float
    checked: bool
    cut_short: bool


def fill(
    topic: BenchTopic,
    *,
    messages: int,
    body_bytes: int = 1024,
    limit_s: float = 60.0,
    progress: Progress = no_progress,
) -> FilledTopic:
    """Write messages to be read and wait until they are visible. Fewer than ``messages`` when ``limit_s`` is over."""
    bodies = make_bodies(body_bytes, _FILL_BATCH)
    clock = Clock(limit_s)
    before = topic.visible()
    written = columns_sum = messages_sum = 0
    with Producer(topic.node, ack="memory", timeout_s=max(limit_s, 10.0)) as producer:
        while written < messages and not (written and clock.over()):
            part = bodies[: messages - written]
            producer.send_batch(topic.name, part)
            written += len(part)
            columns_sum += checksum_of_bodies(part)
            messages_sum += sum(map(_touch, part))
            progress(len(part))
    topic.wait_visible(before + written)
    return FilledTopic(written, columns_sum, messages_sum)


def measure_consume(
    topic: BenchTopic,
    *,
    form: str = "columns",
    mode: str = "auto",
    messages: int | None = None,
    expected: FilledTopic | None = None,
    poll_messages: int = 10_000,
    limit_s: float = 60.0,
    progress: Progress = no_progress,
) -> ReadResult:
    """Read a topic from its beginning without a group: ``messages`` messages, by default all.

    ``form`` columns: each batch as arrays, and the CRC-32 of every body. ``messages``: a Message object with a bytes
    body for each, its length and first byte. ``mode`` is the Consumer's. The clock runs from the first poll. Raises
    CommitMQError when fewer messages arrive than exist, or other content than ``expected``.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
    there = topic.readable()
    wanted = there if messages is None else min(messages, there)
    if not wanted:
        raise CommitMQError(f"topic {topic.name} has no messages to read")
    read = checksum_of_batch if form == "columns" else _read_messages
    got = total = body_bytes = polls = 0
    with Reader(topic.name, node=topic.node, mode=mode) as consumer:
        clock = Clock(limit_s)
        started = time.perf_counter()
        while got < wanted and not (got and clock.over()):
            batch = consumer.poll(_POLL_S, min(poll_messages, wanted - got))
            if not batch:
                if clock.over():
                    break
                continue
            total += read(batch)
            body_bytes += int(batch.body_size.sum())
            got += len(batch)
            polls += 1
            progress(len(batch))
        seconds = time.perf_counter() - started
    if not got:
        raise CommitMQError(f"nothing of the {wanted} messages of {topic.name} arrived within {limit_s:g} s")
    checked = expected is not None and got == expected.messages
    if checked and expected is not None:
        promised = expected.columns_sum if form == "columns" else expected.messages_sum
        if total != promised:
            raise CommitMQError(f"the messages read from {topic.name} are not those that were written to it")
    return ReadResult(
        form=form,
        mode=mode,
        messages=got,
        body_bytes=body_bytes,
        polls=polls,
        seconds=round(seconds, 6),
        messages_per_s=round(got / seconds, 1),
        mib_per_s=round(body_bytes / seconds / (1 << 20), 1),
        checked=checked,
        cut_short=got < wanted,
    )


def checksum_of_batch(batch: MessageBatch) -> int:
    """Sum of the CRC-32 of each body (as stored) of ``batch``."""
    total = 0
    for data, offsets, sizes in batch.buffers:
        buffer = np.frombuffer(data, np.uint8)
        total += sum_of_crcs(buffer, np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(sizes, np.int32))
    return total


def checksum_of_bodies(bodies: Sequence[bytes]) -> int:
    """The same sum for a batch of these bodies."""
    return sum(zlib.crc32(body) for body in bodies)


def _touch(body: bytes) -> int:
    return len(body) + body[0]


def _read_messages(batch: MessageBatch) -> int:
    total = 0
    for message in batch:
        body = message.body
        total += len(body) + body[0]
    return total
