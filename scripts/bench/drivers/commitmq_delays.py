"""CommitMQ's driver, messages that are delivered later: how late they come, and many of them that wait.

The time of delivery is of the wall clock, which sender and consumer share.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Final

from bench.drivers.commitmq_following import Follower
from bench.drivers.commitmq_reading import there_and_back
from bench.drivers.commitmq_topic import Target
from bench.drivers.common import Job, Result, make_bodies, percentiles, until_ready
from commitmq import Admin, Consumer, Producer, SendResult
from commitmq.errors import CommitMQError

_NUMBER_BYTES: Final = 12
_LATE_S: Final = 10.0
_WARM_SHARE: Final = 20
_WARM_AHEAD_S: Final = 2.0
_PAUSE_S: Final = 0.001
_LOOK_S: Final = 0.05
_SPAN_S: Final = 3600


def delayed(job: Job) -> Result:
    """Message ``n`` is due at ``start + n / rate`` and is sent ``ahead_s`` earlier; its lateness counts from when it is due.

    A small part of that goes through a topic of its own before.
    """
    warm = replace(job, topic=f"{job.topic}-warm-up", ahead_s=_WARM_AHEAD_S, seconds=job.seconds / _WARM_SHARE)
    _delayed(warm)
    return _delayed(job)


def _delayed(job: Job) -> Result:
    total = max(1, int(job.rate * job.seconds))
    with Target(job), Follower(job, _lateness) as follower:
        with Producer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
            producer.send_async(job.topic, b"connects").result(job.timeout_s)
            start_ms = time.time_ns() // 1_000_000 + int(job.ahead_s * 1000)
            follower.tell((start_ms, total))
            stored_ahead_ms = _send_ahead(job, producer, start_ms, total)
        samples, missing, again = follower.result()
    if stored_ahead_ms < 0:
        raise CommitMQError(f"a message was stored {-stored_ahead_ms} ms after it was due")
    early = sum(one < 0 for one in samples)
    return {
        "messages": len(samples),
        "latency_us": percentiles(samples),
        "earliest_us": min(samples, default=0) / 1000,
        "stored_ahead_s": stored_ahead_ms / 1000,
        "early": early,
        "again": again,
        "errors": missing + early + again,
    }


def due_ms(job: Job, start_ms: int, number: int) -> int:
    """When the message with this number is due."""
    return start_ms + int(number * 1000 / job.rate)


def _send_ahead(job: Job, producer: Producer, start_ms: int, total: int) -> int:
    """Send ``total`` messages; returns how long before its time each was stored at least (ms)."""
    supply = itertools.cycle(body[_NUMBER_BYTES:] for body in make_bodies(job))
    pending: deque[tuple[int, Future[SendResult]]] = deque()
    least_ms = int(job.ahead_s * 1000)
    number = 0
    ahead_ms = int(job.ahead_s * 1000)
    while number < total:
        until_ms = time.time_ns() // 1_000_000 + ahead_ms
        while number < total and (due := due_ms(job, start_ms, number)) <= until_ms:
            body = b"%0*d" % (_NUMBER_BYTES, number) + next(supply)
            pending.append((due, producer.send_async(job.topic, body, deliver_at=due)))
            number += 1
        while pending and pending[0][1].done():
            due, sent = pending.popleft()
            least_ms = min(least_ms, due - sent.result().store_timestamp)
        time.sleep(_PAUSE_S)
    producer.flush(job.timeout_s)
    return min(least_ms, *(due - sent.result().store_timestamp for due, sent in pending), least_ms)


def _lateness(job: Job, consumer: Consumer, orders: Connection) -> tuple[list[int], int, int]:
    """Nanoseconds from when each message was due to its arrival; how many did not arrive, and how many did twice."""
    start_ms, total = orders.recv()
    end_ns = due_ms(job, start_ms, total) * 1_000_000 + int(_LATE_S * 1e9)
    seen = bytearray(total)
    samples: list[int] = []
    again = 0
    while len(samples) < total and time.time_ns() < end_ns:
        batch = consumer.poll(0.5)
        arrived_ns = time.time_ns()
        for body in batch.bodies:
            if len(body) != job.body_bytes:
                continue
            number = int(bytes(body[:_NUMBER_BYTES]))
            if seen[number]:
                again += 1
                continue
            seen[number] = 1
            samples.append(arrived_ns - due_ms(job, start_ms, number) * 1_000_000)
    return samples, total - len(samples), again


# ---------------------------------------------------------------- many that wait


def timers(job: Job) -> Result:
    """Send ``messages`` that are due within an hour, ``ahead_s`` from now; returns when all of them wait in the timer."""
    bodies = [body for body, _ in zip(itertools.cycle(make_bodies(job)), range(job.batch), strict=False)]
    with Target(job) as target:
        began = time.perf_counter()
        before = waiting(target.admin)
        with Producer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
            first_ms = time.time_ns() // 1_000_000 + int(job.ahead_s * 1000)
            for sent in range(0, job.messages, job.batch):
                part = bodies[: job.messages - sent]
                due = first_ms + sent * _SPAN_S * 1000 // job.messages
                producer.send_batch(job.topic, part, deliver_at=due)
        deadline = time.monotonic() + job.timeout_s
        while waiting(target.admin) < before + job.messages:
            if time.monotonic() > deadline:
                raise CommitMQError(f"{waiting(target.admin)} of {before + job.messages} messages wait in the timer")
            time.sleep(_LOOK_S)
    return {"messages": job.messages, "seconds": time.perf_counter() - began, "errors": 0}


def timers_ready(job: Job) -> Result:
    """Send one message and read it back, and see ``messages`` wait in the timer."""
    body = make_bodies(job)[0]

    def attempt() -> None:
        there_and_back(job, body)
        with Admin(job.address, timeout_s=2.0) as admin:
            if (found := waiting(admin)) < job.messages:
                raise CommitMQError(f"{found} of {job.messages} messages wait in the timer")

    return until_ready(job, attempt)


def waiting(admin: Admin) -> int:
    """How many messages the timer holds by its last report."""
    told = [one["info"] or {} for one in admin.status()["processes"] if one["role"] == "timer"]
    return sum(int(one.get("waiting", 0)) for one in told)
