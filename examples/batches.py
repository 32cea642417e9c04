"""A producer sends batches, one of plain bodies and one of messages with keys and properties of their own.
Run `python examples/batches.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from commitmq import BatchSendError, Message, Producer, Reader

TOPIC = "example-readings"


def main() -> None:
    bodies = [b"reading %d" % number for number in range(500)]
    alarms = [
        Message(b"too hot", tags="alarm", keys="sensor-7", properties={"celsius": "91"}),
        Message(b"too cold", tags="alarm", keys="sensor-3", properties={"celsius": "-40"}),
    ]
    with Producer() as producer:
        try:
            first = producer.send_batch(TOPIC, bodies, tags="reading", queue=0)
            second = producer.send_batch(TOPIC, alarms, queue=0)
        except BatchSendError as error:
            # Of a batch that failed, the producer knows how much is stored.
            print(f"{error.stored} of {error.total} messages are stored")
            raise
    # Each message of a batch has its own place.
    print(f"readings: offsets {first[0].queue_offset} to {first[-1].queue_offset}")
    print(f"alarms: offsets {second[0].queue_offset} to {second[-1].queue_offset}")

    # A consumer without a group reads all queues, or those in `queues`, and commits nothing.
    with Reader(queues=[(TOPIC, 0)], filter="alarm") as consumer:
        consumer.seek(TOPIC, 0, second[0].queue_offset)
        found: list[Message] = []
        while len(found) < len(alarms):
            found += consumer.poll(timeout_s=5)
    for message in found:
        print(message.keys[0], message.user_properties["celsius"], message.body.decode())


if __name__ == "__main__":
    main()
