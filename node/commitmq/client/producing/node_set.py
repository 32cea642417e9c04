"""The nodes of one producer, what it knows of each, and the choice among them (RocketMQ's TopicPublishInfo over brokers).

A message without a pin goes to the nodes in turn. The choice prefers, in this order and among the nodes that this message
has not tried: nodes that are available (:class:`NodeFaults`), not full and not resting; nodes that answer; any node.

The home of a pinned message is the first node of an order that depends on its name and on the addresses only (rendezvous
hashing): not on the order of the list. So programs with the same nodes send a sharding key to the same node, and with one
node more or less only the keys of that node move.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from commitmq.client.message import Message
from commitmq.client.producer_base import ProducerBase
from commitmq.client.producing.detector import Detector
from commitmq.client.producing.effort import Effort, Pin
from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.producing.node import Node
from commitmq.client.properties import both_keys
from commitmq.client.sending.node_watch import NodeWatch
from commitmq.errors import SendError
from commitmq.format.constants import Property


class NodeSet:
    """See the module. ``retries`` and ``may_store_twice`` are for the efforts. Any thread may choose."""

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        retries: int,
        may_store_twice: bool,
        strategy: FaultStrategy,
        is_idempotent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.strategy = strategy
        self.retries = 0 if is_idempotent else retries
        self.may_store_twice = may_store_twice and not is_idempotent
        self.nodes = [Node(address, strategy, clock) for address in addresses]
        self.detector = Detector(strategy)
        self._is_idempotent = is_idempotent
        self._clock = clock
        self._turn = int(time.time_ns() // 1000) % len(self.nodes)  # so that many short-lived producers use all nodes

    def attach(self, node: Node, producer: ProducerBase) -> None:
        """``producer`` is the one of ``node``: watch it."""
        node.producer = producer

        def away(error: SendError) -> None:
            self.failed(node, error, "")

        def made() -> NodeWatch:
            watch = NodeWatch(
                gives_back=self.retries > 0,
                connect_timeout_s=self.strategy.connect_timeout_s,
                most_silence_s=node.slow_s,
                silence_s=lambda: node.unanswered_s(self._clock()),
                latency=node.faults.answered,
                away=away,
                has_other=lambda: self.has_other(node),
                clock=self._clock,
            )
            node.watches.append(watch)
            return watch

        producer._lanes.watch(made)
        if self.retries:
            producer._lanes.routes.patience_s = self.strategy.connect_timeout_s
        producer._lanes.routes.away = away

    def effort(self, topic: str, pin: Pin, name: str, deadline: float) -> Effort:
        """The effort for one message or batch."""
        return Effort(self, topic, pin, name, deadline)

    def pin_of(self, topic: str, body: Any, fields: dict[str, Any]) -> tuple[Pin, str]:
        """What keeps a message at its node, and the name that its home is computed from. Raises InvalidMessageError."""
        queue = fields.get("queue")
        sharding_key = fields.get("sharding_key")
        if (key := fields.get("key")) is not None:
            _, sharding_key = both_keys(key, fields.get("keys"), sharding_key)
        if isinstance(body, Message) and not sharding_key:
            sharding_key = body.properties.get(Property.SHARDING_KEY)
        return self.pin(topic, queue, sharding_key)

    def pin(self, topic: str, queue: Any, sharding_key: Any) -> tuple[Pin, str]:
        """The same of a message whose queue and sharding key are known."""
        if queue is not None:
            return Pin.FIXED, f"{topic}\0{queue}"
        if sharding_key:
            return (Pin.KEY if self.retries else Pin.FIXED), str(sharding_key)
        return Pin.FREE, ""

    def choose(self, topic: str, pin: Pin, name: str, tried: set[Node]) -> Node:
        """The node for the next try of a message."""
        if pin is not Pin.FREE:
            return self.home(name, only_reachable=pin is Pin.KEY)
        nodes, now = self.nodes, self._clock()
        turn = self._turn = (self._turn + 1) % len(nodes)
        left = [one for one in nodes[turn:] + nodes[:turn] if one not in tried] or nodes
        for one in left:
            if one.is_good(now, topic):
                return one
        for one in left:
            if one.faults.is_reachable and not one.producer._lanes.writer.outbox.is_full:
                return one
        return next((one for one in left if one.faults.is_reachable), left[0])

    def has_other(self, node: Node) -> bool:
        """Whether another node than ``node`` is a first choice now."""
        now = self._clock()
        return any(one is not node and one.is_good(now, "") for one in self.nodes)

    def failed(self, node: Node, error: SendError, topic: str) -> None:
        """A try at ``node`` failed."""
        node.faults.failed(error, topic)
        if not node.faults.is_reachable:
            self.detector.add(node)

    def of_address(self, address: str | None) -> Node | None:
        """The node of that address; None for one that is not among these."""
        return next((one for one in self.nodes if one.address == address), None)

    def home(self, name: str, *, only_reachable: bool = False) -> Node:
        """The home of a name; with ``only_reachable`` the first one in its order that can be reached."""
        order = sorted(self.nodes, key=lambda one: rank(name, one.address), reverse=True)
        if only_reachable:
            return next((one for one in order if one.faults.is_reachable), order[0])
        return order[0]


def rank(name: str, address: str) -> bytes:
    """The rank of a node for a name: the highest one is the home."""
    text = f"{address}\0{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()
