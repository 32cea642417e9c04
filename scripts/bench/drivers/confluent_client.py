"""The objects of confluent-kafka that its driver works with: topics, producers, consumers, batches."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from zlib import crc32

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from bench.drivers.common import Job, make_bodies

OFFSET_BEGINNING = 0
# Ten thousand partitions take minutes.
_CREATE_TIMEOUT_S = 600.0
_ASK_TIMEOUT_S = 10.0
_NO_LEADER = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART)
# The client's own limit is 100,000.
_QUEUED_MESSAGES = 90_000


class Target:
    """The job's topic on its broker. The settings of clients are ``argv[1]``, an object by kind of client."""

    def __init__(self, job: Job, *, create: bool = True) -> None:
        self.job = job
        self.warm_up_topic = f"{job.topic}-warm-up"
        self._settings: dict[str, dict[str, str | bool]] = json.loads(sys.argv[1])
        self._admin = AdminClient(self._config())
        if create:
            self.create()

    @property
    def partitions(self) -> list[TopicPartition]:
        """All partitions of the topic, from their beginning."""
        return [TopicPartition(self.job.topic, number, OFFSET_BEGINNING) for number in range(self.job.queues)]

    def new_producer(self, use: str) -> Producer:
        """A producer for ``single``, ``pipeline`` or ``batch``."""
        return Producer(self._config("producer", f"producer, {use}"))

    def producer(self, use: str) -> Producer:
        """A producer that is connected and knows the topic already."""
        made = self.new_producer(use)
        made.list_topics(self.job.topic, timeout=_ASK_TIMEOUT_S)
        return made

    @contextlib.contextmanager
    def consumer(self, *, at_end: bool) -> Iterator[tuple[Consumer, list[TopicPartition]]]:
        """A connected consumer, and the partitions for its assignment: it fetches from then on."""
        made = Consumer(self._config("consumer"))
        try:
            made.list_topics(self.job.topic, timeout=_ASK_TIMEOUT_S)
            found = self.partitions
            if at_end:
                for one, high in zip(found, self._watermarks(), strict=True):
                    one.offset = high
            yield made, found
        finally:
            made.close()

    def visible(self) -> int:
        """How many messages consumers can read: the sum of the high watermarks, which one request asks for."""
        return sum(self._watermarks())

    def wait_visible(self, messages: int) -> None:
        """Return when that many are visible. Raises TimeoutError."""
        deadline = time.monotonic() + self.job.timeout_s
        while self.visible() < messages:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{messages} messages did not become visible")

    def _watermarks(self) -> list[int]:
        """The watermarks of each partition; waits while a new partition has no leader."""
        deadline = time.monotonic() + _ASK_TIMEOUT_S
        wanted = {one: OffsetSpec.latest() for one in self.partitions}
        while True:
            try:
                found = self._admin.list_offsets(wanted, request_timeout=_ASK_TIMEOUT_S)
                return [one.result().offset for one in found.values()]
            except KafkaException as error:
                if error.args[0].code() not in _NO_LEADER or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def create(self) -> None:
        """Make the topic, and the one to warm up with, unless they are there. Raises KafkaException."""
        topics = [NewTopic(self.job.topic, self.job.queues, 1), NewTopic(self.warm_up_topic, 1, 1)]
        for made in self._admin.create_topics(topics, operation_timeout=_CREATE_TIMEOUT_S).values():
            try:
                made.result(_CREATE_TIMEOUT_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def _config(self, *sections: str) -> dict[str, str | bool]:
        found: dict[str, str | bool] = {"bootstrap.servers": self.job.address}
        for section in ("all", *sections):
            found |= self._settings[section]
        return found


class Batches:
    """Batches from one producer. Not for several threads."""

    def __init__(self, target: Target) -> None:
        self.errors = 0
        self.lengths: list[int] = []
        self._producer = target.producer("batch")
        self._job = target.job
        self._warm_up_topic = target.warm_up_topic
        bodies = itertools.cycle(make_bodies(target.job))
        self._messages = [{"value": body} for body in itertools.islice(bodies, target.job.batch)]

    def send(self, messages: int, topic: str = "") -> None:
        """Give the producer a batch, of at most so many messages, as soon as its queue has room."""
        batch = self._messages[:messages]
        while len(self._producer) + len(batch) > _QUEUED_MESSAGES:
            self._producer.poll(0.001)
        self._producer.poll(0)
        queued = self._producer.produce_batch(topic or self._job.topic, batch, on_delivery=self._failed)
        self.errors += len(batch) - queued
        self.lengths.append(len(batch))

    def checksum(self) -> int:
        """The sum of the CRC-32 of all bodies that were sent."""
        sums = list(itertools.accumulate((crc32(message["value"]) for message in self._messages), initial=0))
        return sum(sums[length] for length in self.lengths)

    def finish(self) -> None:
        """Return when everything is answered. Raises TimeoutError."""
        if left := self._producer.flush(self._job.timeout_s):
            raise TimeoutError(f"{left} messages were not acknowledged")

    def warm_up(self) -> None:
        """Send to another topic for the job's ``warmup_s``."""
        until = time.perf_counter() + self._job.warmup_s
        while time.perf_counter() < until:
            self.send(len(self._messages), self._warm_up_topic)
        self.finish()
        self.errors = 0
        self.lengths.clear()

    def _failed(self, problem: object, _message: object) -> None:
        self.errors += problem is not None
