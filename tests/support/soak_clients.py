"""The clients of the soak test, each a program: ``groups`` reads one topic in several groups, ``producer`` sends to it.

A body begins with the time of its send, in nanoseconds of the machine's monotonic clock. Each program prints a line of JSON
about once in five seconds, with counts since its start.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from commitmq import Consumer, Producer

TELL_S = 5.0
BODY_BYTES = 200
BATCH_S = 0.02
_EVERY = 16  # so many messages give one sample of their age


def tell(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Group:
    """Reads the topic, in a thread of its own."""

    def __init__(self, node: str, topic: str, name: str) -> None:
        self.count = 0
        self.ages_ms: list[float] = []
        self._arguments = node, topic, name
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        node, topic, name = self._arguments
        with Consumer([topic], group=name, node=node) as consumer:
            while True:
                found = consumer.poll(timeout_s=1.0)
                now_ns = time.monotonic_ns()
                for message in found[::_EVERY]:
                    self.ages_ms.append((now_ns - int.from_bytes(message.body[:8], "big")) / 1e6)
                self.count += len(found)


def groups(node: str, topic: str, count: str) -> None:
    """Counts of each group, and the 99th percentile of ages since the last line."""
    all_groups = [Group(node, topic, f"soak-{number}") for number in range(int(count))]
    while True:
        time.sleep(TELL_S)
        ages = sorted(age for one in all_groups for age in one.ages_ms)
        for one in all_groups:
            one.ages_ms = []
        p99 = ages[int(len(ages) * 0.99)] if ages else None
        tell({"counts": [one.count for one in all_groups], "p99_ms": p99})


def producer(node: str, topic: str, rate: str) -> None:
    """``rate`` messages a second, 0: as many as possible."""
    size = max(1, int(float(rate) * BATCH_S)) if float(rate) else 500
    padding = bytes(BODY_BYTES - 8)
    with Producer(node=node) as sender:
        sent, due, told = 0, time.monotonic(), time.monotonic()
        while True:
            stamp = time.monotonic_ns().to_bytes(8, "big")
            sender.send_batch(topic, [stamp + padding] * size)
            sent += size
            now = time.monotonic()
            if now - told >= TELL_S:
                told = now
                tell({"sent": sent})
            if float(rate):
                due = max(due + size / float(rate), now - 1.0)  # what is late by more than a second is left out
                time.sleep(max(0.0, due - now))


if __name__ == "__main__":
    {"groups": groups, "producer": producer}[sys.argv[1]](*sys.argv[2:])
