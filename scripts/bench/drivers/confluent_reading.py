"""confluent-kafka's driver, reading stored messages: a whole topic, and one message after a restart."""

from __future__ import annotations

import time
from zlib import crc32

from confluent_kafka import Consumer, KafkaException, TopicPartition

from bench.drivers.common import Job, Result, make_bodies, until_ready
from bench.drivers.confluent_client import Target

_MOST_A_CALL = 5_000
_ROUND_TRIP_S = 2.0


def take(consumer: Consumer, *, wait_s: float) -> list[bytes]:
    """The bodies of the messages that have arrived, as ``bytes`` objects; waits for one message. Raises KafkaException."""
    # consume() waits until it has the number that it was asked for, so the call asks for one message.
    first = consumer.poll(wait_s)
    if first is None:
        return []
    bodies = []
    for message in (first, *consumer.consume(_MOST_A_CALL, 0)):
        if message.error() is not None:
            raise KafkaException(message.error())
        bodies.append(message.value())
    return bodies


def read(job: Job) -> Result:
    """A ``bytes`` object for every body: they are copied out. With the mode ``checksum`` each goes through a CRC-32."""
    touch = _sum_of_crcs if job.mode == "checksum" else _copied_out
    count = total = size = 0
    first_s = 0.0
    with Target(job).consumer(at_end=False) as (consumer, partitions):
        began = time.perf_counter()
        deadline = began + job.timeout_s
        consumer.assign(partitions)
        while count < job.messages:
            bodies = take(consumer, wait_s=1.0)
            if not bodies and time.perf_counter() > deadline:
                raise TimeoutError(f"{count} of {job.messages} messages arrived within {job.timeout_s} s")
            bodies = bodies[: job.messages - count]
            total += touch(bodies)
            size += sum(map(len, bodies))
            count += len(bodies)
            first_s = first_s or time.perf_counter() - began
        seconds = time.perf_counter() - began
    return {"messages": count, "seconds": seconds, "bytes": size, "checksum": total, "first_s": first_s}


def _copied_out(bodies: list[bytes]) -> int:
    return sum(body[0] for body in bodies)


def _sum_of_crcs(bodies: list[bytes]) -> int:
    return sum(map(crc32, bodies))


def ready(job: Job) -> Result:
    """One message there and back, with clients that look for the broker while it is gone."""
    body = make_bodies(job)[0]
    target = Target(job, create=False)
    producer = target.new_producer("single")

    def attempt() -> None:
        target.create()
        places: list[TopicPartition] = []

        def done(problem: object, message: object) -> None:
            if problem is None:
                places.append(TopicPartition(message.topic(), message.partition(), message.offset()))  # type: ignore[attr-defined]

        producer.produce(job.topic, body, on_delivery=done)
        producer.flush(_ROUND_TRIP_S)
        if not places:
            producer.purge()
            producer.poll(0)
            raise TimeoutError("the message was not acknowledged")
        with target.consumer(at_end=False) as (consumer, _):
            consumer.assign(places)
            if body not in take(consumer, wait_s=_ROUND_TRIP_S):
                raise TimeoutError("the message did not come back")

    return until_ready(job, attempt)
