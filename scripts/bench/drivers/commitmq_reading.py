"""CommitMQ's driver, reading stored messages: a whole topic, single messages by key, and one after a restart."""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING

from bench.drivers.commitmq_topic import Target, words
from bench.drivers.common import Job, Result, make_bodies, percentiles, until_ready
from commitmq import Producer, Reader
from commitmq.errors import CommitMQError

if TYPE_CHECKING:
    from commitmq import MessageBatch

_POLL_MESSAGES = 10_000


def read(job: Job) -> Result:
    """Columns: the CRC-32 of every body, over the arrays. Messages: an object with its own ``bytes`` body for each."""
    from commitmq.bench.reads import checksum_of_batch

    touch = _copy_out if "messages" in words(job) else checksum_of_batch
    count = total = size = 0
    first_s = 0.0
    mode = "bytes" if "tcp" in words(job) else "auto"
    with (
        Target(job) as target,
        Reader(target.topics, node=target.address, mode=mode, timeout_s=job.timeout_s) as consumer,
    ):
        began = time.perf_counter()
        deadline = began + job.timeout_s
        while count < job.messages:
            batch = consumer.poll(1.0, min(_POLL_MESSAGES, job.messages - count))
            if not batch:
                if time.perf_counter() > deadline:
                    raise CommitMQError(f"{count} of {job.messages} messages arrived within {job.timeout_s} s")
                continue
            total += touch(batch)
            size += int(batch.body_size.sum())
            count += len(batch)
            first_s = first_s or time.perf_counter() - began
        seconds = time.perf_counter() - began
    return {"messages": count, "seconds": seconds, "bytes": size, "checksum": total, "first_s": first_s}


def _copy_out(batch: MessageBatch) -> int:
    total = 0
    for message in batch:
        body = message.body
        total += len(body) + body[0]
    return total


def query(job: Job) -> Result:
    """Keys are looked up in random order, each in a request of its own; each must be found."""
    bodies = [body for body, _ in zip(itertools.cycle(make_bodies(job)), range(job.batch), strict=False)]
    samples: list[int] = []
    with Target(job) as target:
        with Producer(target.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
            for start in range(0, job.messages, job.batch):
                part = bodies[: job.messages - start]
                producer.send_batch(job.topic, part, keys=[f"key-{start + place}" for place in range(len(part))])
        target.wait_indexed()
        chosen = random.Random(job.seed).choices(range(job.messages), k=job.count)
        target.admin.query(job.topic, key="key-0")  # connects, and the first look opens the index
        now = time.perf_counter_ns
        for number in chosen:
            began = now()
            found = target.admin.query(job.topic, key=f"key-{number}")
            samples.append(now() - began)
            if len(found) != 1:
                raise CommitMQError(f"key-{number} found {len(found)} messages")
    return {"latency_us": percentiles(samples), "messages": job.messages, "errors": 0}


def ready(job: Job) -> Result:
    """Send one message with ack and read it back."""
    body = make_bodies(job)[0]
    return until_ready(job, lambda: there_and_back(job, body))


def there_and_back(job: Job, body: bytes) -> None:
    """Send a message and read it. Raises CommitMQError when either does not work now."""
    with Producer(job.address, ack=job.ack, timeout_s=2.0) as producer:
        sent = producer.send(job.topic, body)
    place = (job.topic, sent.queue)
    with Reader(job.topic, node=job.address, queues=[place], start=sent.queue_offset, timeout_s=2.0) as consumer:
        if not consumer.poll(2.0, 1):
            raise CommitMQError("the message that was just acknowledged does not arrive")
