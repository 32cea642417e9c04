"""The effort for one send: which nodes it tries, in which order, and when it gives up.

The model of failures. A try at a node ends in one of four ways:

    stored, with the ack         done
    certainly not stored         refused, or no connection, or never handed over: another node may take the message
    stored without the ack       the message is in the log: nothing more may be done
    unknown                      handed over, and no answer: the message may be in the log

Only the second kind goes to another node by itself, so a message is stored once. ``retry_may_store_twice`` adds the last
two; then a message may be stored on two nodes. A refusal of the message itself (too large, illegal, out of order) is no
fault of the node, and is raised at once.

``retries`` counts refusals. A node without a connection, one that is busy and names a time, and one that does not take the
message from the producer, are not counted: such a message waits, and ``timeout_s`` bounds it, as with one node. After a
round over all nodes the effort pauses.

A *pin* keeps a message at its node: a queue or an idempotent producer for good, a sharding key while the producer can reach
the node.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.producing.node import Node
from commitmq.client.routes import not_stored
from commitmq.client.sending.busy import MAX_REST_S
from commitmq.errors import Code, Outcome, SendError

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


class Verdict(Enum):
    """What becomes of a message after a try that failed."""

    RAISE = "raise"
    COUNTED = "another node, as one of the retries"
    UNCOUNTED = "another node, or the same one later"


def verdict(error: SendError, *, may_store_twice: bool) -> Verdict:
    """The rule of the module for one failed try."""
    if error.outcome is not Outcome.NOT_STORED:
        return Verdict.COUNTED if may_store_twice else Verdict.RAISE
    if error.code in _UNCOUNTED or (error.code == Code.SYSTEM_BUSY and error.retry_after_ms is not None):
        return Verdict.UNCOUNTED
    return Verdict.COUNTED if error.code in _COUNTED else Verdict.RAISE


class Pin(Enum):
    """What keeps a message at its node."""

    FREE = "nothing"
    KEY = "its sharding key"
    FIXED = "its queue, or its numbers"


class Nodes(Protocol):
    """The nodes of a producer (:class:`commitmq.client.producing.node_set.NodeSet`)."""

    nodes: list[Node]
    retries: int
    may_store_twice: bool
    strategy: FaultStrategy

    def choose(self, topic: str, pin: Pin, name: str, tried: set[Node]) -> Node:
        """The node for the next try of a message."""

    def failed(self, node: Node, error: SendError, topic: str) -> None:
        """A try at ``node`` failed."""


class Effort:
    """See the module. ``name`` is what the home of a pinned message is computed from."""

    __slots__ = ("_nodes", "_retries", "_round", "_rounds", "deadline", "name", "node", "pin", "problems", "topic")

    def __init__(self, nodes: Nodes, topic: str, pin: Pin, name: str, deadline: float) -> None:
        self.topic = topic
        self.pin = pin
        self.name = name
        self.deadline = deadline
        """In monotonic seconds."""
        self.node: Node | None = None
        """The node of the present try."""
        self.problems: list[str] = []
        self._nodes = nodes
        self._retries = nodes.retries
        self._round: set[Node] = set()  # nodes that were tried since the last pause
        self._rounds = 0

    def next(self) -> Node:
        """The node of the next try."""
        node = self.node = self._nodes.choose(self.topic, self.pin, self.name, self._round)
        return node

    def time_s(self, now: float) -> float:
        """The time of the present try."""
        left_s = max(self.deadline - now, 0.001)
        if self._nodes.may_store_twice and self._retries > 0 and self.pin is Pin.FREE:
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
        if self.pin is not Pin.FREE:
            is_last = decided is not Verdict.UNCOUNTED
        elif decided is Verdict.COUNTED:
            is_last = self._retries < 1
            self._retries -= 1
        else:
            is_last = decided is Verdict.RAISE or not nodes.retries
        if is_last:
            raise self._noted(error)
        pause_s = self._pause_s(node, error)
        if now + pause_s >= self.deadline:
            raise self._noted(error)
        return pause_s

    def _pause_s(self, node: Node, error: SendError) -> float:
        """The pause after a try at ``node``: none while the message has another node to go to."""
        nodes = self._nodes.nodes
        self._round.add(node)
        if self.pin is Pin.FREE:
            has_other = len(self._round) < len(nodes)
        else:
            has_other = (
                self.pin is Pin.KEY and not node.faults.is_reachable and any(one.faults.is_reachable for one in nodes)
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
