"""One stage of ``test_upgrade``, by the clients of whichever version is first on the path:

    python upgrade_program.py ADDRESS STAGE EXPECTED

Sends the messages of the stage, reads all EXPECTED ones of the topic, and goes on as the consumer group and as the share
group, which leave half of what is there to the next stage. STAGE "last" sends nothing and takes all that is left. Prints JSON.
"""

import json
import sys
import time

from commitmq import Consumer, Message, Producer, Reader, ShareConsumer

MESSAGES = 40
JOBS = 6
PATIENCE_S = 60.0


def main(node: str, stage: str, expected: int) -> None:
    last = stage == "last"
    if not last:
        send(node, stage)
    found = {"read": read(node, expected), "polled": poll(node, last), "received": receive(node, last)}
    json.dump(found, sys.stdout)


def send(node: str, stage: str) -> None:
    with Producer(node, group="till") as producer:
        batch = [
            Message(f"{stage} {number}".encode(), tags=stage, keys=f"{stage}-{number}")
            for number in range(MESSAGES - 2)
        ]
        producer.send_batch("orders", batch)
        with producer.transaction("orders", f"{stage} in a transaction".encode()):
            pass
        producer.send("orders", f"{stage} later".encode(), delay=5)
        for number in range(JOBS):
            producer.send("jobs", f"{stage} job {number}".encode())


def read(node: str, expected: int) -> list[str]:
    found: list[str] = []
    ends = time.monotonic() + PATIENCE_S
    with Reader("orders", node=node) as reader:
        while len(found) < expected and time.monotonic() < ends:
            found += [message.body.decode() for message in reader.poll(timeout_s=1)]
    return sorted(found)


def poll(node: str, last: bool) -> list[str]:
    found: list[str] = []
    quiet_since = time.monotonic()
    with Consumer("orders", group="kitchen", node=node, start="earliest", auto_commit=False) as consumer:
        while (last or len(found) < MESSAGES // 2) and time.monotonic() < quiet_since + (3 if last else PATIENCE_S):
            if polled := consumer.poll(timeout_s=1):
                found += [message.body.decode() for message in polled]
                quiet_since = time.monotonic()
                consumer.commit()
    return found


def receive(node: str, last: bool) -> list[str]:
    found: list[str] = []
    quiet_since = time.monotonic()
    with ShareConsumer("jobs", group="mailers", node=node, start="earliest") as consumer:
        while (last or len(found) < JOBS // 2) and time.monotonic() < quiet_since + (3 if last else PATIENCE_S):
            for message in consumer.receive(max_messages=1, wait_s=1):
                assert message.ack()
                found.append(message.body.decode())
                quiet_since = time.monotonic()
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
