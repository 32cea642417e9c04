"""What a topic holds, read back from a real node, and sends that meet the deaths of its writer."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

from commitmq import Admin, Message, Reader
from nodes import Node, eventually


def read_all(node: Node, topic: str) -> list[Message]:
    """Every message of ``topic`` that is in the log now, also what was acknowledged from memory a moment ago."""
    with Admin(node.address) as admin:
        written = admin.status()["positions"]["written"]
        eventually(lambda: admin.status()["positions"]["dispatched"] >= written, "everything is visible")
        ends = {queue: end for queue, _, end, _ in admin.offsets(topic)}
    messages: list[Message] = []
    with Reader(topic, node=node.address) as consumer:
        deadline = time.monotonic() + 30
        while len(messages) < sum(ends.values()):
            assert time.monotonic() < deadline, f"{len(messages)} of {ends}"
            messages += consumer.poll(0.5)
    return messages


def while_the_writer_dies(node: Node, times: int = 3) -> Iterator[int]:
    """Numbers, as fast as they are taken, during each of ``times`` deaths of the writer; between them it is waited for."""
    numbers = itertools.count()
    for _ in range(times):
        pid = node.pids()["writer"]
        killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
        killer.start()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            yield next(numbers)
        killer.join()
        eventually(partial(node.healed, "writer", pid), "the writer is back")
