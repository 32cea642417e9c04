"""A program of a user who installed CommitMQ without the extra ``node``: every client, and every way of sending and reading.

Run as ``python client_program.py ADDRESS``. It checks by itself what it reads, and prints which modules it did without.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from commitmq import (
    Admin,
    AsyncAdmin,
    AsyncProducer,
    AsyncReader,
    Consumer,
    ExactlyOnce,
    Message,
    MessageSelector,
    Producer,
    Reader,
    Tombstone,
)

NODE = sys.argv[1]
NOT_NEEDED = ("isal", "rich")
LONG = b"the same again " * 1000


def send(topic: str) -> Counter[bytes]:
    """Send in every way there is; returns the bodies."""
    sent: Counter[bytes] = Counter()
    with Producer(NODE, compress="zlib", compress_over_bytes=4096) as producer:
        bodies = [b"one", LONG]
        results = [producer.send(topic, body, key="order-7", tags="drink") for body in bodies]
        assert results[0].queue == results[1].queue, "one key, one queue"
        producer.send(topic, Tombstone("order-7"))
        sent.update([*bodies, b""])
        bodies = [b"later %d" % number for number in range(50)]
        for future in [producer.send_async(topic, body, tags="food", key="order-8") for body in bodies]:
            future.result(30)
        sent.update(bodies)
        bodies = [b"batch %d" % number for number in range(500)] + [LONG] * 3
        assert len(producer.send_batch(topic, bodies, key="order-9")) == len(bodies)
        sent.update(bodies)
        bodies = [b"message %d" % number for number in range(20)]
        producer.send_batch_async(topic, [Message(body, properties={"n": "1"}) for body in bodies]).result(30)
        sent.update(bodies)
    with Producer(NODE, delivery=ExactlyOnce()) as producer:
        producer.send(topic, b"once")
        producer.send_batch(topic, [b"and once more"] * 2)
        sent.update([b"once", *[b"and once more"] * 2])
    return sent


async def send_async(topic: str) -> Counter[bytes]:
    """The same with asyncio."""
    bodies = [b"async %d" % number for number in range(50)]
    async with AsyncProducer(NODE) as producer:
        await asyncio.gather(*(producer.send(topic, body, key="order-10") for body in bodies))
        await producer.send_batch(topic, [b"async batch"] * 5)
    return Counter([*bodies, *[b"async batch"] * 5])


def read(topic: str, count: int, **settings: object) -> Counter[bytes]:
    """The bodies of ``count`` messages."""
    found: Counter[bytes] = Counter()
    with Reader(topic, node=NODE, **settings) as consumer:  # type: ignore[arg-type]
        while found.total() < count:
            batch = consumer.poll(20)
            assert batch, f"{found.total()} of {count} messages"
            found.update(message.body for message in batch)
    return found


async def read_async(topic: str, count: int) -> Counter[bytes]:
    """The same with asyncio."""
    found: Counter[bytes] = Counter()
    async with AsyncAdmin(NODE) as admin, AsyncReader(topic, node=NODE) as consumer:
        assert topic in [one.name for one in await admin.topics()]
        async for batch in consumer:
            found.update(message.body for message in batch)
            if found.total() >= count:
                return found
    return found


def main() -> None:
    topic = "of-a-client"
    with Admin(NODE) as admin:
        admin.topic_create(topic, 4)
        admin.topic_create("of-batches", 1, attributes={"queue.type": "BatchCQ"})
    sent = send(topic) + asyncio.run(send_async(topic))
    count = sent.total()
    # As bytes over tcp; from the mapped log; and whichever the client chooses.
    assert read(topic, count, mode="bytes") == sent
    assert read(topic, count, mode="ranges") == sent
    assert read(topic, count) == sent
    assert read(topic, 50, mode="bytes", filter="food") == Counter(b"later %d" % number for number in range(50))
    assert read(topic, 20, filter=MessageSelector("SQL92", "n = 1")) == Counter(b"message %d" % n for n in range(20))
    assert asyncio.run(read_async(topic, count)) == sent

    found: Counter[bytes] = Counter()
    with Consumer(topic, group="a-group", node=NODE) as consumer:
        for batch in consumer:
            assert len(batch.body_size) == len(batch)
            found.update(message.body for message in batch)
            consumer.commit()
            if found.total() >= count:
                break
    assert found == sent

    with Producer(NODE) as producer:
        producer.send_batch("of-batches", [Message(b"x%d" % number, keys="k") for number in range(10)])
    assert read("of-batches", 10, mode="bytes") == Counter(b"x%d" % number for number in range(10))

    with Admin(NODE) as admin:
        assert sum(row.lag for row in admin.group_lag("a-group")) == 0
        result = admin.query(topic, key="order-7")
        assert [message.body for message in result] == [b"one", LONG, b""]
        first = next(iter(result))
        assert first.msg_id is not None
        assert admin.message(first.msg_id).body == b"one"
        assert admin.status()["node"]["state"] == "ready"
        admin.topic_update(topic, perm=4)
        admin.topic_delete("of-batches")
    sys.stdout.write(" ".join(name for name in NOT_NEEDED if sys.modules.get(name) is None))


if __name__ == "__main__":
    main()
