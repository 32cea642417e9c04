"""CommitMQ's driver, what becomes of received messages: acks of shared ones, and another try after a failure."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from bench.drivers.commitmq_topic import Target
from bench.drivers.common import Job, Result, all_at_once, make_bodies, percentiles
from commitmq import Consumer, Message, Producer, ShareConsumer
from commitmq.errors import CommitMQError

_GROUP: Final = "bench-group"
_WARM_SHARE: Final = 10
_FILL_BATCH: Final = 1000
_NUMBER_BYTES: Final = 12
_WARM_RETRIES: Final = 20


def share(job: Job) -> Result:
    """Clients of one group receive ``batch`` messages and acknowledge them, and so on, until ``messages`` are done.

    They did so with a tenth of the messages before, in a topic of its own.
    """
    few = max(job.batch, job.messages // _WARM_SHARE)
    _share(replace(job, topic=f"{job.topic}-warm-up", messages=few))
    return _share(job)


def _share(job: Job) -> Result:
    from commitmq.bench.reads import checksum_of_bodies  # its kernels would cost every other work's clients, too

    bodies = [body for body, _ in zip(itertools.cycle(make_bodies(job)), range(_FILL_BATCH), strict=False)]
    with Target(job) as target:
        before = target.visible()
        checksum = 0
        with Producer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer:
            for sent in range(0, job.messages, _FILL_BATCH):
                part = bodies[: job.messages - sent]
                producer.send_batch(job.topic, part)
                checksum += checksum_of_bodies(part)
        target.wait_visible(before + job.messages)
        done = _Done(job.messages, checksum_of_bodies)

        def make_part(_number: int, _share: int) -> Callable[[], None]:
            consumer = ShareConsumer(job.topic, group=_GROUP, node=job.address, timeout_s=job.timeout_s)

            def receive_and_ack() -> None:
                with consumer:
                    while not done.is_all:
                        messages = consumer.receive(job.batch, 0.2)
                        if messages:
                            late = consumer.ack(messages)
                            done.add(messages, late)

            return receive_and_ack

        began, _ = all_at_once(job, make_part)
    return {
        "messages": done.count,
        "seconds": done.ended - began,
        "rate": done.count / (done.ended - began),
        "sent_checksum": checksum,
        "checksum": done.checksum,
        "receives": done.receives,
        "errors": done.late,
    }


class _Done:
    """What the clients have acknowledged together."""

    def __init__(self, wanted: int, checksum_of: Callable[[list[bytes]], int]) -> None:
        self._wanted, self._checksum_of = wanted, checksum_of
        self._lock = threading.Lock()
        self.count = self.late = self.checksum = self.receives = 0
        self.ended = 0.0
        self.is_all = False

    def add(self, messages: list[Message], late: list[Message]) -> None:
        total = self._checksum_of([message.body for message in messages])
        with self._lock:
            self.count += len(messages)
            self.late += len(late)
            self.checksum += total
            self.receives += 1
            if self.count >= self._wanted:
                self.ended = time.perf_counter()
                self.is_all = True


# ---------------------------------------------------------------- another try


class _Tries:
    """The times of the first failure and of the next try, by the message's number (ns)."""

    def __init__(self, job: Job) -> None:
        self._body_bytes = job.body_bytes
        self.failed: dict[int, int] = {}
        self.came: dict[int, int] = {}

    def handle(self, message: Message) -> bool:
        now = time.perf_counter_ns()
        number = int(message.body[:_NUMBER_BYTES])
        if message.reconsume_times:
            self.came.setdefault(number, now)
            return True
        self.failed.setdefault(number, time.perf_counter_ns())
        return False


def retry(job: Job) -> Result:
    """A handler fails on each message once. From the failure until it has the message again; ``delay_ms`` of it are asked
    for.
    """
    tries = _Tries(job)
    total = max(1, int(job.rate * job.seconds))
    tails = itertools.cycle(body[_NUMBER_BYTES:] for body in make_bodies(job))
    with (
        Target(job),
        _handling(job, tries),
        Producer(job.address, ack=job.ack, timeout_s=job.timeout_s) as producer,
    ):

        def send(number: int) -> None:
            producer.send(job.topic, b"%0*d" % (_NUMBER_BYTES, number) + next(tails))

        for number in range(total, total + _WARM_RETRIES):
            send(number)
        _wait_for(tries, _WARM_RETRIES, job)
        start = time.perf_counter()
        for number in range(total):
            time.sleep(max(0.0, start + number / job.rate - time.perf_counter()))
            send(number)
        _wait_for(tries, _WARM_RETRIES + total, job)
    samples = [tries.came[number] - tries.failed[number] for number in range(total) if number in tries.came]
    delay_us = job.delay_ms * 1000
    latency_us = percentiles(samples)
    return {
        "messages": len(samples),
        "latency_us": latency_us,
        "over_us": {name: value - delay_us for name, value in latency_us.items()},
        "earliest_us": min(samples, default=0) / 1000 - delay_us,
        "errors": total - len(samples),
    }


@contextmanager
def _handling(job: Job, tries: _Tries) -> Iterator[None]:
    consumer = Consumer(job.topic, group=f"{job.topic}-group", node=job.address, timeout_s=job.timeout_s)
    problems: list[BaseException] = []

    def run() -> None:
        try:
            consumer.run(tries.handle, backoff=job.delay_ms / 1000)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join(job.timeout_s)
    if problems:
        raise problems[0]


def _wait_for(tries: _Tries, count: int, job: Job) -> None:
    deadline = time.monotonic() + job.timeout_s
    while len(tries.came) < count:
        if time.monotonic() > deadline:
            raise CommitMQError(f"{len(tries.came)} of {count} messages came again")
        time.sleep(0.01)
