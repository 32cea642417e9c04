"""confluent-kafka's driver, producing while a consumer follows. The consumer is a process of its own.

In the producer's process it would take turns with it, because Python objects are made by one thread at a time; both read
the same clock (CLOCK_MONOTONIC), which is one for the whole machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer

from bench.drivers.common import Job, Result, make_bodies, percentiles
from bench.drivers.confluent_client import Batches, Target
from bench.drivers.confluent_reading import take

_NUMBER_BYTES = 12
_START_AHEAD_S = 0.3
_LATE_S = 10.0
# An open loop sends all due messages and then waits; a shorter wait is not worth a system call.
_LEAST_SLEEP_S = 0.00002


def end_to_end(job: Job) -> Result:
    """Open loop: message ``n`` is due at ``start + n / rate``, and its latency counts from then, whenever it was sent."""
    total = int(job.rate * (job.warmup_s + job.seconds))
    tails = [body[_NUMBER_BYTES:] for body in make_bodies(job)]
    with _Follower(job, _latencies) as follower:
        producer = Target(job, create=False).producer("single")
        start_ns = time.perf_counter_ns() + int(_START_AHEAD_S * 1e9)
        follower.tell((start_ns, total))
        interval_ns = 1e9 / job.rate
        supply = itertools.cycle(tails)
        failed: list[object] = []

        def done(problem: object, _message: object) -> None:
            if problem is not None:
                failed.append(problem)

        number = 0
        while number < total:
            due = min(total, int((time.perf_counter_ns() - start_ns) / interval_ns) + 1)
            while number < due:
                producer.produce(job.topic, b"%0*d" % (_NUMBER_BYTES, number) + next(supply), on_delivery=done)
                number += 1
            producer.poll(0)
            pause_s = (start_ns + number * interval_ns - time.perf_counter_ns()) / 1e9
            if pause_s > _LEAST_SLEEP_S:
                time.sleep(pause_s)
        behind_ns = time.perf_counter_ns() - start_ns - int((total - 1) * interval_ns)
        producer.flush(job.timeout_s)
        samples, missing = follower.result()
    return {
        "messages": len(samples),
        "rate": job.rate,
        "latency_us": percentiles(samples),
        "errors": max(missing, len(failed)),
        "sender_behind_us": round(max(behind_ns, 0) / 1000),
    }


def _latencies(job: Job, consumer: Consumer, orders: Connection) -> tuple[list[int], int]:
    """Nanoseconds from the planned time of each message to its arrival, and how many did not arrive."""
    start_ns, total = orders.recv()
    interval_ns = 1e9 / job.rate
    counted_from = int(job.rate * job.warmup_s)
    end_ns = start_ns + total * interval_ns + _LATE_S * 1e9
    samples: list[int] = []
    got = 0
    while got < total and time.perf_counter_ns() < end_ns:
        bodies = take(consumer, wait_s=0.5)
        arrived = time.perf_counter_ns() - start_ns
        for body in bodies:
            number = int(body[:_NUMBER_BYTES])
            if number >= counted_from:
                samples.append(int(arrived - number * interval_ns))
        got += len(bodies)
    return samples, total - got


def mixed(job: Job) -> Result:
    """Batches for ``seconds`` with a consumer behind; the clock stops when it has all."""
    with _Follower(job, _follow) as follower:
        batches = Batches(Target(job, create=False))
        batches.warm_up()
        sent = 0
        began = time.perf_counter()
        while time.perf_counter() - began < job.seconds:
            batches.send(job.batch)
            sent += job.batch
        batches.finish()
        produced_s = time.perf_counter() - began
        follower.tell(sent - batches.errors)
        got, ended = follower.result()
    return {
        "produced": sent - batches.errors,
        "consumed": got,
        "produce_seconds": produced_s,
        "seconds": ended - began,
        "errors": batches.errors,
    }


def _follow(job: Job, consumer: Consumer, orders: Connection) -> tuple[int, float]:
    got = 0
    wanted = -1
    deadline = time.monotonic() + job.seconds + job.timeout_s
    while wanted < 0 or got < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{got} of {wanted} messages arrived")
        got += len(take(consumer, wait_s=0.05))
        if wanted < 0 and orders.poll():
            wanted = orders.recv()
    return got, time.perf_counter()


class _Follower:
    """A process with a consumer of the job's topic that stands at its end before a ``with`` block begins."""

    def __init__(self, job: Job, follow: Callable[[Job, Consumer, Connection], Any]) -> None:
        method = multiprocessing.get_context("spawn")
        self._ours, theirs = method.Pipe()
        self._process = method.Process(target=_consume, args=(job, follow, theirs), daemon=True)
        self._timeout_s = job.timeout_s

    def __enter__(self) -> Self:
        self._process.start()
        self.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.join(1.0)
        self._process.kill()
        self._process.join()

    def tell(self, order: object) -> None:
        """Give the consumer the object that it waits for."""
        self._ours.send(order)

    def result(self) -> Any:
        """The next object from the consumer. Raises the consumer's exception, and TimeoutError when nothing comes."""
        if not self._ours.poll(self._timeout_s):
            raise TimeoutError("the consumer does not answer")
        answer = self._ours.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _consume(job: Job, follow: Callable[[Job, Consumer, Connection], Any], pipe: Connection) -> None:
    try:
        with Target(job).consumer(at_end=True) as (consumer, partitions):
            consumer.assign(partitions)
            consumer.poll(0.5)  # its first fetch is on its way, or waits at the broker
            pipe.send("ready")
            pipe.send(follow(job, consumer, pipe))
    except Exception as error:
        # Errors of the client may hold objects that cannot be sent.
        pipe.send(RuntimeError(f"the consumer failed: {error!r}"))
