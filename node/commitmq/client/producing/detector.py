"""The detector: asks the nodes that a producer could not reach, until they answer (RocketMQ's LatencyFaultTolerance).

Its thread runs only while a node is unreachable. The question is the hello of the writer, on a connection of its own: a
node whose supervisor lives and whose writer stands still is not back yet.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final

from commitmq.errors import RequestError
from commitmq.protocol.directory import Directory

if TYPE_CHECKING:
    from commitmq.client.producing.fault_strategy import FaultStrategy
    from commitmq.client.producing.node import Node

_JOIN_S: Final = 1.0


class Detector:
    """See the module. Any thread may add a node."""

    def __init__(self, strategy: FaultStrategy) -> None:
        self._strategy = strategy
        self._lock = threading.Lock()
        self._wanted: set[Node] = set()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def add(self, node: Node) -> None:
        """Ask ``node`` until it answers. Never blocks for long."""
        if node in self._wanted or self._ended.is_set():
            return
        with self._lock:
            begins = not self._wanted
            self._wanted.add(node)
            if begins:
                self._thread = threading.Thread(target=self._run, name="commitmq-producer-detector", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._strategy.detect_timeout_s + _JOIN_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            for node in list(self._wanted):
                if node.faults.is_reachable or answers(node.address, self._strategy.detect_timeout_s):
                    node.faults.detected()
                    with self._lock:
                        self._wanted.discard(node)
            with self._lock:
                if not self._wanted:
                    return  # (a node that is added from now on starts a thread of its own)
            self._ended.wait(self._strategy.detect_interval_s)


def answers(address: str, timeout_s: float) -> bool:
    """Whether the node's writer says hello within ``timeout_s``."""
    directory = Directory(address)
    try:
        channel, _ = directory.connect("writer", time.monotonic() + timeout_s, hello=True)
        channel.close()
        return True
    except RequestError:
        return False
    finally:
        with contextlib.suppress(RequestError):
            directory.close()
