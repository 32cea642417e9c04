"""CommitMQ's driver, producing while a consumer follows. The consumer is a process of its own.

In Python a consumer in the producer's process would take turns with it; a program that cares runs it as a process, so
this one does. Both read the same clock (CLOCK_MONOTONIC), which is one for the whole machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import deque
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from bench.drivers.commitmq_topic import Target
from bench.drivers.common import Job, Result, make_bodies, percentiles
from commitmq import Consumer, Producer, Reader, SendResult
from commitmq.errors import CommitMQError

_NUMBER_BYTES = 12
_START_AHEAD_S = 0.3
_LATE_S = 10.0
# An open loop sends all due messages and then waits; a shorter wait is not worth a system call.
_LEAST_SLEEP_S = 0.00002


def end_to_end(job: Job) -> Result:
    """Open loop: message ``n`` is due at ``start + n / rate``, and its latency counts from then, whenever it was sent."""
    total = int(job.rate * (job.warmup_s + job.seconds))
    tails = [body[_NUMBER_BYTES:] for body in make_bodies(job)]
    with Target(job), Follower(job, _latencies) as follower:
        with Producer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
            producer.send_async(job.topic, b"connects").result(job.timeout_s)
            start_ns = time.perf_counter_ns() + int(_START_AHEAD_S * 1e9)
            follower.tell((start_ns, total))
            behind_ns = _send_on_time(job, producer, tails, start_ns, total)
        samples, missing = follower.result()
    return {
        "messages": len(samples),
        "rate": job.rate,
        "latency_us": percentiles(samples),
        "errors": missing,
        "sender_behind_us": round(behind_ns / 1000),
    }


def _send_on_time(job: Job, producer: Producer, tails: list[bytes], start_ns: int, total: int) -> int:
    """Send ``total`` messages, each when it is due; returns by how many ns the last one was late."""
    interval_ns = 1e9 / job.rate
    supply = itertools.cycle(tails)
    pending: deque[Future[SendResult]] = deque()
    number = 0
    while number < total:
        due = min(total, int((time.perf_counter_ns() - start_ns) / interval_ns) + 1)
        while number < due:
            pending.append(producer.send_async(job.topic, b"%0*d" % (_NUMBER_BYTES, number) + next(supply)))
            number += 1
        while pending and pending[0].done():
            pending.popleft().result()
        pause_s = (start_ns + number * interval_ns - time.perf_counter_ns()) / 1e9
        if pause_s > _LEAST_SLEEP_S:
            time.sleep(pause_s)
    behind_ns = time.perf_counter_ns() - start_ns - int((total - 1) * interval_ns)
    producer.flush(job.timeout_s)
    for one in pending:
        one.result()
    return max(behind_ns, 0)


def _latencies(job: Job, consumer: Consumer, orders: Connection) -> tuple[list[int], int]:
    """Nanoseconds from the planned time of each message to its arrival, and how many did not arrive."""
    start_ns, total = orders.recv()
    interval_ns = 1e9 / job.rate
    counted_from = int(job.rate * job.warmup_s)
    end_ns = start_ns + total * interval_ns + _LATE_S * 1e9
    samples: list[int] = []
    got = 0
    while got < total and time.perf_counter_ns() < end_ns:
        batch = consumer.poll(0.5)
        arrived = time.perf_counter_ns() - start_ns
        for body in batch.bodies:
            if len(body) != job.body_bytes:
                continue
            got += 1
            number = int(bytes(body[:_NUMBER_BYTES]))
            if number >= counted_from:
                samples.append(int(arrived - number * interval_ns))
    return samples, total - got


def mixed(job: Job) -> Result:
    """Batches for ``seconds`` with a consumer behind; the clock stops when it has all."""
    bodies = [body for body, _ in zip(itertools.cycle(make_bodies(job)), range(job.batch), strict=False)]
    with Target(job), Follower(job, _follow) as follower:
        with Producer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
            sent = 0
            producer.send_batch(job.topic, bodies[:1])
            began = time.perf_counter()
            while time.perf_counter() - began < job.seconds:
                producer.send_batch(job.topic, bodies)
                sent += len(bodies)
            produced_s = time.perf_counter() - began
        follower.tell(sent + 1)
        got, total, ended = follower.result()
    return {
        "produced": sent,
        "consumed": got - 1,
        "produced_seconds": produced_s,
        "seconds": ended - began,
        "checksum": total,
        "errors": 0,
    }


def _follow(job: Job, consumer: Consumer, orders: Connection) -> tuple[int, int, float]:
    from commitmq.bench.reads import checksum_of_batch

    got = total = 0
    wanted = -1
    deadline = time.monotonic() + job.seconds + job.timeout_s
    while wanted < 0 or got < wanted:
        if time.monotonic() > deadline:
            raise CommitMQError(f"{got} of {wanted} messages arrived")
        batch = consumer.poll(0.05)
        if batch:
            total += checksum_of_batch(batch)
            got += len(batch)
        if wanted < 0 and orders.poll():
            wanted = orders.recv()
    return got, total, time.perf_counter()


class Follower:
    """A process with a consumer of the job's topic, positioned at its end before a ``with`` block begins."""

    def __init__(self, job: Job, follow: Any) -> None:
        method = multiprocessing.get_context("spawn")
        self._ours, theirs = method.Pipe()
        self._process = method.Process(target=_consume, args=(job, follow, theirs), daemon=True)
        self._timeout_s = job.timeout_s

    def __enter__(self) -> Follower:
        self._process.start()
        if self.result() != "ready":
            raise CommitMQError("the consumer did not become ready")
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.join(1.0)
        self._process.kill()
        self._process.join()

    def tell(self, order: Any) -> None:
        self._ours.send(order)

    def result(self) -> Any:
        """The next object from the consumer. Raises CommitMQError when nothing comes, and what the consumer raised."""
        if not self._ours.poll(self._timeout_s):
            raise CommitMQError("the consumer does not answer")
        answer = self._ours.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _consume(job: Job, follow: Any, pipe: Connection) -> None:
    try:
        with Reader(job.topic, node=job.address, start="latest", timeout_s=job.timeout_s) as consumer:
            consumer.poll(0.05)  # the first request, which sets its beginning
            pipe.send("ready")
            pipe.send(follow(job, consumer, pipe))
    except Exception as error:
        pipe.send(error)
