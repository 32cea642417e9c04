"""A closed store with every kind of file that a node makes, and what is served of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from power_check import Recovered
from power_load import SETTINGS

from commitmq import Admin, Consumer, Message, Producer
from commitmq.client.receiving.part import parts_of_records
from commitmq.client.receiving.record_check import check_bytes, check_places
from commitmq.errors import CommitMQError, CorruptRecordError
from commitmq.format.record import decode_record
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.batch_consume_queue import BatchQueueReader
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.queues.record_filter import PullStatus
from nodes import start_node

Place = tuple[str, int, int]
Served = tuple[str, bytes, tuple[tuple[str, str], ...]]  # topic, body, properties

QUEUES = [("orders", 0), ("orders", 1), ("batches", 0), ("%LMQ%a", 0), ("%LMQ%b", 0)]
COUNTS = {("orders", 0): 540, ("orders", 1): 480, ("batches", 0): 180, ("%LMQ%a", 0): 60, ("%LMQ%b", 0): 60}
"""How many queue offsets each queue has given out."""


def make_store(folder: Path, **settings: object) -> Path:
    """The store of a node that was stopped; queues of :data:`QUEUES`, two of them plain, one of batches, two light ones."""
    wanted = [f"{name}={str(value).lower()}" for name, value in {**SETTINGS, **settings}.items()]
    with start_node(folder, *wanted) as node:
        with Admin(node.address) as admin:
            admin.topic_create("batches", 1, attributes={"queue.type": "BatchCQ"})
        with Producer(node.address) as producer:
            for number in range(4):
                some = [Message(b"%d-%d " % (number, at) * 30, tags="red", keys=f"k{at}") for at in range(120)]
                for queue in range(2):
                    producer.send_batch("orders", some, queue=queue)
            for number in range(60):
                producer.send_batch("batches", [b"b%d-%d" % (number, at) for at in range(3)], queue=0)
                producer.send("orders", b"l%d" % number, queue=0, multi_dispatch=["%LMQ%a", "%LMQ%b"])
        with Consumer(["orders", "batches"], group="readers", node=node.address) as consumer:
            while consumer.poll(0.5):
                consumer.commit()
        assert node.stop().returncode == 0
    shutil.rmtree(node.store / "run")  # nothing of it outlives a node
    return node.store


def read_all(store: Recovered) -> tuple[dict[Place, Served], set[tuple[str, int]]]:
    """What is served, by place; and the queues in which an error said that something is wrong."""
    config = store.config
    log = CommitLog(store.layout.commit_log, config.commit_log.segment_bytes)
    plain = QueueReader(
        log,
        store.layout.consume_queue,
        config.consume_queue.file_bytes,
        ext_file_bytes=config.consume_queue.ext_file_bytes,
    )
    batches = BatchQueueReader(store.layout.batch_consume_queue, config.consume_queue.batch_file_bytes)
    served: dict[Place, Served] = {}
    failed: set[tuple[str, int]] = set()
    for topic, queue_id in QUEUES:
        reader = batches if topic == "batches" else plain
        offset = 0
        while True:
            try:
                one = 1 if (topic, queue_id) in failed else 1_000
                result = reader.read(topic, queue_id, offset, bound=store.end, max_messages=one, max_bytes=1 << 20)
            except CommitMQError as error:
                assert str(store.layout.root) in str(error), f"the error names no file: {error}"
                failed.add((topic, queue_id))
                break
            if not result.count:
                if result.status is PullStatus.OFFSET_OVERFLOW_ONE:
                    break
                failed.add((topic, queue_id))  # a status that every consumer reports as a gap
                if result.next_offset <= offset:
                    break
                offset = result.next_offset
                continue
            try:
                frames = [memoryview(bytes(frame)) for frame in plain.frames(result.units)]
                parts = parts_of_records(topic, queue_id, frames)
                if sum(map(len, parts)) != result.count:
                    raise CorruptRecordError("another number of records")
                for part in parts:
                    check_places(part, offset, result.next_offset)
                    check_bytes(part)
            except CommitMQError:
                # As a consumer does: one by one, and then past the damaged one.
                if (topic, queue_id) in failed:
                    offset += 1
                failed.add((topic, queue_id))
                continue
            for part in parts:
                rows = zip(
                    part.heads["queue_offset"].tolist(),
                    part.positions.tolist(),
                    part.heads["size"].tolist(),
                    strict=True,
                )
                for at, (number, position, size) in enumerate(rows):
                    place = offset + at if topic.startswith("%LMQ%") else number
                    record = decode_record(memoryview(part.data)[position : position + size])
                    served[topic, queue_id, place] = (record.topic, record.body, tuple(record.properties.items()))
            offset = result.next_offset
    plain.close()
    batches.close()
    log.close()
    return served, failed
