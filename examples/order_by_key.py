"""Messages with one sharding key keep their order, although a topic has several queues.
Run `python examples/order_by_key.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from commitmq import Admin, Consumer, Producer

TOPIC = "example-order-events"
ORDERS = ("order-1", "order-2", "order-3", "order-4")
STEPS = ("created", "paid", "packed", "sent")


def main() -> None:
    with Admin() as admin, Producer() as producer:
        admin.topic_create(TOPIC, 4)
        for step in STEPS:
            for order in ORDERS:
                # The hash of the sharding key picks the queue, as RocketMQ's selector does.
                producer.send(TOPIC, step.encode(), sharding_key=order)

    steps: dict[str, list[str]] = {order: [] for order in ORDERS}
    queues: dict[str, set[int]] = {order: set() for order in ORDERS}
    with Consumer(TOPIC, group="example-shipping") as consumer:
        while sum(map(len, steps.values())) < len(ORDERS) * len(STEPS):
            for message in consumer.poll(timeout_s=5):
                order = message.sharding_key or ""
                steps[order].append(message.body.decode())
                queues[order].add(message.queue_id)
    for order in ORDERS:
        print(f"{order} in queue {queues[order]}: {', '.join(steps[order])}")


if __name__ == "__main__":
    main()
