"""Kafka's client for Python, confluent-kafka, as a Python program would use it.

Its calls release the interpreter while they wait, and librdkafka works in threads of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import cycle, islice, takewhile
from threading import Event, Thread
from typing import Any
from zlib import crc32

from confluent_kafka import KafkaException, Producer

from bench.drivers import confluent_following as following
from bench.drivers import confluent_reading as reading
from bench.drivers.common import Job, Result, all_at_once, closed_loop, make_bodies, run
from bench.drivers.confluent_client import Batches, Target


def send(job: Job) -> Result:
    """All clients share a producer. A single client waits for its answer itself; for several a thread distributes the
    answers.
    """
    producer = Target(job).producer("single")
    if job.clients > 1:
        Thread(target=_hand_out, args=(producer,), daemon=True).start()

    def make_send(_number: int) -> Callable[[bytes], None]:
        answered = Event()
        problems: list[Any] = []

        def done(problem: Any, _message: object) -> None:
            if problem is not None:
                problems.append(problem)
            answered.set()

        def send_one(body: bytes) -> None:
            answered.clear()
            producer.produce(job.topic, body, on_delivery=done)
            while not answered.is_set():
                if job.clients > 1:
                    answered.wait()
                else:
                    producer.poll(1.0)
            if problems:
                raise KafkaException(problems.pop())

        return send_one

    return closed_loop(job, make_send)


def _hand_out(producer: Producer) -> None:
    while True:
        producer.poll(1.0)


def pipeline(job: Job) -> Result:
    """``produce`` with at most ``window`` unanswered; every answer is looked at."""
    target = Target(job)
    producer = target.producer("pipeline")
    bodies = make_bodies(job)
    unanswered = errors = 0

    def done(problem: Any, _message: object) -> None:
        nonlocal unanswered, errors
        unanswered -= 1
        errors += problem is not None

    def send_all(topic: str, supply: Iterable[bytes]) -> None:
        nonlocal unanswered
        for body in supply:
            unanswered += 1
            producer.produce(topic, body, on_delivery=done)
            producer.poll(0)
            while unanswered >= job.window:
                producer.poll(1.0)
        while unanswered:
            producer.poll(1.0)

    warm_until = time.perf_counter() + job.warmup_s
    send_all(target.warm_up_topic, takewhile(lambda _: time.perf_counter() < warm_until, cycle(bodies)))
    errors = 0
    before = target.visible()
    began = time.perf_counter()
    send_all(job.topic, islice(cycle(bodies), job.messages))
    ended = time.perf_counter()
    target.wait_visible(before + job.messages - errors)
    return _sent(job, began, time.perf_counter(), ended, errors, sum(map(crc32, islice(cycle(bodies), job.messages))))


def batch(job: Job) -> Result:
    """``produce_batch``; each client has a producer of its own, and the producer's queue holds the messages under way."""
    target = Target(job)
    clients: list[Batches] = []

    def make_part(_number: int, messages: int) -> Callable[[], None]:
        batches = Batches(target)
        clients.append(batches)
        batches.warm_up()

        def send_all() -> None:
            for sent in range(0, messages, job.batch):
                batches.send(messages - sent)
            batches.finish()

        return send_all

    before = target.visible()
    began, ended = all_at_once(job, make_part)
    errors = sum(batches.errors for batches in clients)
    target.wait_visible(before + job.messages - errors)
    return _sent(job, began, time.perf_counter(), ended, errors, sum(batches.checksum() for batches in clients))


def _sent(job: Job, began: float, visible: float, ended: float, errors: int, checksum: int) -> Result:
    """The result of a work that only sends; times by ``perf_counter``."""
    return {
        "messages": job.messages - errors,
        "seconds": ended - began,
        "visible_seconds": visible - began,
        "checksum": checksum,
        "errors": errors,
    }


if __name__ == "__main__":
    run(
        {
            "send": send,
            "pipeline": pipeline,
            "batch": batch,
            "read": reading.read,
            "ready": reading.ready,
            "end_to_end": following.end_to_end,
            "mixed": following.mixed,
        }
    )
