"""A producer sends three messages, and a consumer of a group reads those that have the tag `food`.
Run `python examples/send_and_receive.py` beside a node; COMMITMQ_NODE is its address where that is not the default.
"""

from __future__ import annotations

from commitmq import Consumer, Producer

TOPIC = "example-orders"


def main() -> None:
    with Producer() as producer:
        # A send returns when the message is on the device.
        for tag, body in (("drink", b"one espresso"), ("food", b"two croissants"), ("food", b"one tiramisu")):
            sent = producer.send(TOPIC, body, tags=tag, queue=0)
            print(f"sent {body.decode()!r}: queue {sent.queue}, {sent.ack}")

    received = 0
    # The group's offset stays on the node, so a second run reads only the messages of the second run.
    with Consumer(TOPIC, group="example-kitchen", filter="food") as consumer:
        while received < 2:
            for message in consumer.poll(timeout_s=5):
                print(f"received {message.body.decode()!r} with the tag {message.tags}")
                received += 1


if __name__ == "__main__":
    main()
