"""An asyncio producer and an asyncio consumer work side by side in one event loop.
Run `python examples/asyncio_clients.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

import asyncio

from commitmq import AsyncAdmin, AsyncConsumer, AsyncProducer

TOPIC = "example-chat"
SENDERS = ("ann", "ben", "cleo")
MESSAGES = 20


async def talk(producer: AsyncProducer, name: str) -> None:
    """Sends of several tasks at the same time share runs, and none of them holds up the loop."""
    for number in range(MESSAGES):
        await producer.send(TOPIC, f"{name} says {number}".encode(), key=name)


async def listen(consumer: AsyncConsumer) -> dict[str, int]:
    heard: dict[str, int] = dict.fromkeys(SENDERS, 0)
    while sum(heard.values()) < len(SENDERS) * MESSAGES:
        for message in await consumer.poll(timeout_s=5):
            heard[message.keys[0]] += 1
    return heard


async def main() -> None:
    async with AsyncAdmin() as admin:
        await admin.topic_create(TOPIC)
    async with (
        AsyncProducer() as producer,
        AsyncConsumer(TOPIC, group="example-listeners") as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        listening = tasks.create_task(listen(consumer))
        for name in SENDERS:
            tasks.create_task(talk(producer, name))
    print(", ".join(f"{name}: {count}" for name, count in listening.result().items()))


if __name__ == "__main__":
    asyncio.run(main())
