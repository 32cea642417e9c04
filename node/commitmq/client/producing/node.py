"""One node of a producer with several: its address, its producer, and what is known of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from commitmq.client.producing.fault_strategy import FaultStrategy, NodeFaults
from commitmq.client.sending.node_watch import NodeWatch

_NEVER_S: Final = float("inf")


class Node:
    """See the module. Any thread may ask."""

    def __init__(self, address: str, strategy: FaultStrategy, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.faults = NodeFaults(strategy, clock)
        self.producer: Any = None
        """Its Producer. (That module imports this one.)"""
        self.watches: list[NodeWatch] = []
        self.calls: dict[object, float] = {}
        """Synchronous sends under way, and when each began."""
        self.slow_s = strategy.slow_s

    def unanswered_s(self, now: float) -> float:
        """The age of the oldest request that was handed over and not answered."""
        oldest = min([one.since for one in self.watches], default=_NEVER_S)
        if self.calls:
            oldest = min(oldest, min(self.calls.copy().values(), default=_NEVER_S))
        return now - oldest  # minus infinity without any

    def is_good(self, now: float, topic: str) -> bool:
        """Whether the node is a first choice for a message to ``topic``."""
        if not self.faults.is_available(now, topic, self.unanswered_s(now)):
            return False
        pump = self.producer._lanes.writer
        return not pump.outbox.is_full and pump.lane.delivery.busy.error is None
