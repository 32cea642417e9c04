"""A program of a user: it is never run, a type checker reads it (tests/unit/test_user_types.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import commitmq
from commitmq import (
    Admin,
    AsyncConsumer,
    AsyncProducer,
    BatchSendError,
    Code,
    Consumer,
    ConsumeResult,
    ExactlyOnce,
    FaultStrategy,
    Message,
    Outcome,
    Producer,
    Reader,
    RequestError,
    RetryLater,
    SendError,
    SendResult,
    Sql,
)


def delivered(error: BaseException | None, result: SendResult | None) -> None:
    if result is not None:
        print(result.queue_offset + 1)


def produce() -> int:
    with Producer(delivery=ExactlyOnce("import-7", epoch=2), compress="zstd") as producer:
        sent = producer.send("orders", b"tea", tags="drink", keys=["a", "b"], properties={"price": "3"})
        offset: int = sent.physical_offset
        future = producer.send_async("orders", Message(b"x", tags="t"), on_delivery=delivered)
        print(future.result(10).msg_id.upper())
        try:
            batch = producer.send_batch("orders", [b"one", b"two"], sharding_keys=["a", None])
        except BatchSendError as error:
            return error.stored
        for one in batch:
            offset = max(offset, one.physical_offset)
        producer.flush(5)
    with Producer(["one:7310", "two:7310"], retries=1, fault_strategy=FaultStrategy(isolation_ms=5_000)) as several:
        node: str | None = several.send("orders", b"tea").node
        print(node)
    return offset + len(batch)


def consume(consumer: Consumer | Reader) -> list[bytes]:
    bodies: list[bytes] = []
    for batch in consumer:
        for message in batch:
            bodies.append(message.body)
            tags: str | None = message.tags
            print(tags, message.keys, message.user_properties.get("price"))
        if len(bodies) > 10:
            break
    print(consumer.positions, consumer.assignment, list(consumer.gaps))
    return bodies


def groups() -> None:
    with commitmq.connect("tcp://127.0.0.1:7310", timeout_s=5) as connection:
        with connection.consumer(["orders"], group="kitchen", filter=Sql("price > 10"), auto_commit=False) as consumer:
            consume(consumer)
            done = consumer.commit()
            print({queue: offset for (_, queue), offset in done.items()})
        consume(connection.reader(queues=[("orders", 0)], start=datetime.now(UTC)))
        with connection.admin() as admin:
            look(admin)


def look(admin: Admin) -> None:
    for queue, low, high, _ in admin.offsets("orders"):
        print(queue + 1, high - low)
    found = admin.query("orders", key="a")
    for message in found:
        print(message.body.decode())
    try:
        admin.topic_delete("orders")
    except RequestError as error:
        if error.code == Code.TOPIC_NOT_EXIST or error.retryable:
            print(error.message, error.retry_after_ms)


def handle(message: Message) -> ConsumeResult | None:
    if message.reconsume_times > 3:
        return ConsumeResult.DEAD
    if not message.body:
        message.retry_later(60)
    if message.stored_topic != message.topic:
        raise RetryLater(0.5)
    return None


def around(message: Message, next: Callable[[Message], ConsumeResult | bool | None]) -> ConsumeResult | bool | None:
    return next(message)


def failed(message: Message | None, error: BaseException) -> None:
    print(error if message is None else message.topic)


def handlers(consumer: Consumer) -> int:
    consumer.run(handle, workers=3, ordered=True, backoff=[1, 2], middleware=[around], on_error=failed)
    consumer.run(lambda message: print(message.body), backoff=lambda times: 2.0**times, max_retries=None)
    return consumer.handler_counts.handled + consumer.handler_counts.dead


async def handle_async(message: Message) -> ConsumeResult | None:
    await asyncio.sleep(0)
    return handle(message)


async def twin_handlers(consumer: AsyncConsumer) -> None:
    await consumer.run(handle_async, workers=3, on_error=failed, stop_timeout_s=1)


async def twin() -> int:
    async with commitmq.connect_async() as connection:
        producer: AsyncProducer = connection.producer(ack="memory", linger_ms=1.0)
        sent = await producer.send("orders", b"tea", tags="drink", timeout_s=2.0)
        later = producer.send_async("orders", b"tea", key="k")
        both = await producer.send_batch("orders", [b"1"], tags=["a"])
        print((await later).queue, both.end_offset)
        async with connection.consumer("orders", group="kitchen", member="m") as consumer:
            batch = await consumer.poll(1.0)
            for message in batch:
                print(message.body)
            await consumer.commit()
            async for other in consumer:
                print(len(other))
                break
        admin = connection.admin()
        topics = await admin.topics()
        print(len(topics), (await admin.offsets("orders"))[0][2] + 1)
        try:
            await producer.send("orders", b"")
        except SendError as error:
            return 1 if error.outcome is Outcome.NOT_STORED and error.retryable else 0
        return sent.queue


if __name__ == "__main__":
    produce()
    groups()
    asyncio.run(twin())
