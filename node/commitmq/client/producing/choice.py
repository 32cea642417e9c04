"""Which of several nodes takes a message."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final, Protocol

from commitmq.client.message import Message
from commitmq.client.producing.fault_strategy import FaultStrategy, NodeFaults
from commitmq.client.properties import both_keys
from commitmq.client.routes import not_stored
from commitmq.client.sending.delivery import MAX_REST_S
from commitmq.client.sending.lane import NodeWatch
from commitmq.errors import Code, Outcome, RequestError, SendError
from commitmq.format.constants import Property
from commitmq.protocol.directory import Directory

_NEVER_S: Final = float("inf")


class ProducerNode:
    """One node of a producer with several: its address, its producer, and what is known of it.

    Any thread may ask.
    """

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
        """The age of the oldest request that was passed on and not answered."""
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


_JOIN_S: Final = 1.0


class Detector:
    """The detector: asks the nodes that a producer could not reach, until they answer (RocketMQ's LatencyFaultTolerance).

    Its thread runs only while a node is unreachable. The question is the hello of the writer, on a connection of its own: a
    node whose supervisor lives and whose writer stands still is not back yet.

    Any thread may add a node.
    """

    def __init__(self, strategy: FaultStrategy) -> None:
        self._strategy = strategy
        self._lock = threading.Lock()
        self._wanted: set[ProducerNode] = set()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def add(self, node: ProducerNode) -> None:
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


PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 0.5
_MOST_PROBLEMS: Final = 8
_UNCOUNTED: Final = frozenset((Code.NODE_UNAVAILABLE, Code.CLIENT_BUSY))
_COUNTED: Final = frozenset(
    (
        Code.SERVICE_NOT_AVAILABLE,
        Code.CREATE_MAPPED_FILE_FAILED,
        Code.SYSTEM_BUSY,
        Code.SYSTEM_ERROR,
        Code.TOPIC_NOT_EXIST,
        Code.NO_PERMISSION,
        Code.LIMIT_EXCEEDED,
        Code.WHEEL_TIMER_FLOW_CONTROL,
        Code.CLIENT_BUFFER_FULL,
        Code.TIMEOUT,
    )
)


class RetryDecision(Enum):
    """What becomes of a message after a try that failed."""

    RAISE = "raise"
    COUNTED = "another node, as one of the retries"
    UNCOUNTED = "another node, or the same one later"


def verdict(error: SendError, *, may_store_twice: bool) -> RetryDecision:
    """The rule of the module for one failed try."""
    if error.outcome is not Outcome.NOT_STORED:
        return RetryDecision.COUNTED if may_store_twice else RetryDecision.RAISE
    if error.code in _UNCOUNTED or (error.code == Code.SYSTEM_BUSY and error.retry_after_ms is not None):
        return RetryDecision.UNCOUNTED
    return RetryDecision.COUNTED if error.code in _COUNTED else RetryDecision.RAISE


class Affinity(Enum):
    """What keeps a message at its node."""

    FREE = "nothing"
    KEY = "its sharding key"
    FIXED = "its queue, or its numbers"


class Nodes(Protocol):
    """The nodes of a producer (:class:`commitmq.client.producing.choice.NodeSet`)."""

    nodes: list[ProducerNode]
    retries: int
    may_store_twice: bool
    strategy: FaultStrategy

    def choose(self, topic: str, affinity: Affinity, name: str, tried: set[ProducerNode]) -> ProducerNode:
        """The node for the next try of a message."""

    def failed(self, node: ProducerNode, error: SendError, topic: str) -> None:
        """A try at ``node`` failed."""


class SendAttempts:
    """The attempts of one send: which nodes get them, in which order, and when the send has failed.

    The model of failures. A try at a node ends in one of four ways:

        stored, with the ack         done
        not stored         refused, or no connection, or never passed on: another node may take the message
        stored without the ack       the message is in the log: nothing more may be done
        unknown                      passed on, and no answer: the message may be in the log

    Only the second kind goes to another node by itself, so a message is stored once. ``retry_may_store_twice`` adds the
    last two; then a message may be stored on two nodes. A refusal of the message itself (too large, illegal, out of
    order) is no fault of the node, and is raised at once.

    ``retries`` counts refusals. A node without a connection, one that is busy and names a time, and one that does not
    take the message from the producer, are not counted: such a message waits, and ``timeout_s`` bounds it, as with one
    node. After a round over all nodes there is a pause.

    An *affinity* keeps a message at its node: a queue or an idempotent producer permanently, a sharding key while the
    producer can reach the node.

    ``name`` is what the home of a message with an affinity is computed from.
    """

    __slots__ = ("_nodes", "_retries", "_round", "_rounds", "affinity", "deadline", "name", "node", "problems", "topic")

    def __init__(self, nodes: Nodes, topic: str, affinity: Affinity, name: str, deadline: float) -> None:
        self.topic = topic
        self.affinity = affinity
        self.name = name
        self.deadline = deadline
        """In monotonic seconds."""
        self.node: ProducerNode | None = None
        """The node of the present try."""
        self.problems: list[str] = []
        self._nodes = nodes
        self._retries = nodes.retries
        self._round: set[ProducerNode] = set()  # nodes that were tried since the last pause
        self._rounds = 0

    def next(self) -> ProducerNode:
        """The node of the next try."""
        node = self.node = self._nodes.choose(self.topic, self.affinity, self.name, self._round)
        return node

    def time_s(self, now: float) -> float:
        """The time of the present try."""
        left_s = max(self.deadline - now, 0.001)
        if self._nodes.may_store_twice and self._retries > 0 and self.affinity is Affinity.FREE:
            return min(left_s, self._nodes.strategy.timeout_per_request_s)
        return left_s

    def failed(self, error: SendError, now: float) -> float:
        """The present try failed: returns the pause before the next one, in seconds. Raises ``error`` when it was the last."""
        node, nodes = self.node, self._nodes
        assert node is not None
        nodes.failed(node, error, self.topic)
        self.problems.append(f"{node.address}: {error.code}")
        del self.problems[:-_MOST_PROBLEMS]
        decided = verdict(error, may_store_twice=nodes.may_store_twice)
        if self.affinity is not Affinity.FREE:
            is_last = decided is not RetryDecision.UNCOUNTED
        elif decided is RetryDecision.COUNTED:
            is_last = self._retries < 1
            self._retries -= 1
        else:
            is_last = decided is RetryDecision.RAISE or not nodes.retries
        if is_last:
            raise self._noted(error)
        pause_s = self._pause_s(node, error)
        if now + pause_s >= self.deadline:
            raise self._noted(error)
        return pause_s

    def _pause_s(self, node: ProducerNode, error: SendError) -> float:
        """The pause after a try at ``node``: none while the message has another node to go to."""
        nodes = self._nodes.nodes
        self._round.add(node)
        if self.affinity is Affinity.FREE:
            has_other = len(self._round) < len(nodes)
        else:
            has_other = (
                self.affinity is Affinity.KEY
                and not node.faults.is_reachable
                and any(one.faults.is_reachable for one in nodes)
            )
        if has_other:
            return 0.0
        self._round.clear()
        pause_s = min(PAUSE_S * (1 << min(self._rounds, 10)), MAX_PAUSE_S)
        self._rounds += 1
        asked_s = 0.0 if error.retry_after_ms is None else min(error.retry_after_ms / 1000, MAX_REST_S)
        return max(pause_s, asked_s)

    def out_of_time(self) -> SendError:
        """The error of a message whose time was over between two tries."""
        return self._noted(not_stored("TIMEOUT", "not sent in time"))

    def _noted(self, error: SendError) -> SendError:
        if len(self.problems) > 1:
            error.add_note(f"tried {', '.join(self.problems)}")
        return error


class NodeSet:
    """The nodes of one producer, what it knows of each, and the choice among them (RocketMQ's TopicPublishInfo over brokers).

    A message without an affinity goes to the nodes in turn. The choice prefers, in this order and among the nodes that this
    message has not tried: nodes that are available (:class:`NodeFaults`), not full and not resting; nodes that answer; any
    node.

    The home of a message with an affinity is the first node of an order that depends on its name and on the addresses only
    (rendezvous hashing): not on the order of the list. So programs with the same nodes send a sharding key to the same node,
    and with one node more or less only the keys of that node move.

    ``retries`` and ``may_store_twice`` are for the attempts. Any thread may choose.
    """

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
        self.nodes = [ProducerNode(address, strategy, clock) for address in addresses]
        self.detector = Detector(strategy)
        self._clock = clock
        self._turn = int(time.time_ns() // 1000) % len(self.nodes)  # so that many short-lived producers use all nodes

    def attach(self, node: ProducerNode, producer: Any) -> None:
        """``producer`` is the one of ``node``, a :class:`commitmq.Producer`: watch it."""
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

    def attempts(self, topic: str, affinity: Affinity, name: str, deadline: float) -> SendAttempts:
        """The attempts of one message or batch."""
        return SendAttempts(self, topic, affinity, name, deadline)

    def affinity_of(self, topic: str, body: Any, fields: dict[str, Any]) -> tuple[Affinity, str]:
        """What keeps a message at its node, and the name that its home is computed from. Raises InvalidMessageError."""
        queue = fields.get("queue")
        sharding_key = fields.get("sharding_key")
        if (key := fields.get("key")) is not None:
            _, sharding_key = both_keys(key, fields.get("keys"), sharding_key)
        if isinstance(body, Message) and not sharding_key:
            sharding_key = body.properties.get(Property.SHARDING_KEY)
        return self.affinity(topic, queue, sharding_key)

    def affinity(self, topic: str, queue: Any, sharding_key: Any) -> tuple[Affinity, str]:
        """The same of a message whose queue and sharding key are known."""
        if queue is not None:
            return Affinity.FIXED, f"{topic}\0{queue}"
        if sharding_key:
            return (Affinity.KEY if self.retries else Affinity.FIXED), str(sharding_key)
        return Affinity.FREE, ""

    def choose(self, topic: str, affinity: Affinity, name: str, tried: set[ProducerNode]) -> ProducerNode:
        """The node for the next try of a message."""
        if affinity is not Affinity.FREE:
            return self.home(name, only_reachable=affinity is Affinity.KEY)
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

    def has_other(self, node: ProducerNode) -> bool:
        """Whether another node than ``node`` is a first choice now."""
        now = self._clock()
        return any(one is not node and one.is_good(now, "") for one in self.nodes)

    def failed(self, node: ProducerNode, error: SendError, topic: str) -> None:
        """A try at ``node`` failed."""
        node.faults.failed(error, topic)
        if not node.faults.is_reachable:
            self.detector.add(node)

    def of_address(self, address: str | None) -> ProducerNode | None:
        """The node of that address; None for one that is not among these."""
        return next((one for one in self.nodes if one.address == address), None)

    def home(self, name: str, *, only_reachable: bool = False) -> ProducerNode:
        """The home of a name; with ``only_reachable`` the first one in its order that can be reached."""
        order = sorted(self.nodes, key=lambda one: rank(name, one.address), reverse=True)
        if only_reachable:
            return next((one for one in order if one.faults.is_reachable), order[0])
        return order[0]


def rank(name: str, address: str) -> bytes:
    """The rank of a node for a name: the highest one is the home."""
    text = f"{address}\0{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()
