"""The fault strategy: for how long a producer with several nodes avoids one of them (RocketMQ's MQFaultStrategy).

    a send took at least   50   100   550   1800   3000   5000   15000 ms
    so avoid the node for   0     0  2000   5000   6000  10000   30000 ms

A refusal that speaks of the whole node, and a lost answer, count as a latency of ``isolation_ms``. A node that does not
answer at all is unreachable until the detector gets an answer from it. What it refused for one topic only (no such topic,
no permission) makes the producer avoid it for that topic.

A node that is silent now is avoided too: the oldest request without an answer counts with its present age. (RocketMQ's
producer learns of a slow broker when the send has ended.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from commitmq.errors import Code, Outcome, SendError

_MOST_MS: Final = 3_600_000
_MAX_TOPICS: Final = 10_000
_OF_ONE_TOPIC: Final = frozenset((Code.TOPIC_NOT_EXIST, Code.NO_PERMISSION, Code.LIMIT_EXCEEDED))
_OF_THE_CLIENT: Final = frozenset((Code.CLIENT_BUSY, Code.CLIENT_BUFFER_FULL, Code.CLIENT_CLOSED, Code.CLIENT_ERROR))


@dataclass(frozen=True)
class FaultStrategy:
    """How a :class:`Producer` with several nodes avoids one of them: ``Producer(nodes, fault_strategy=FaultStrategy(…))``.

    ``latency_max_ms`` and ``not_available_ms`` are RocketMQ's tables: a send that took ``latency_max_ms[i]`` or longer
    makes the producer avoid its node for ``not_available_ms[i]``. With ``send_latency_fault_enable=False`` latency has no
    effect; nodes that refuse or do not answer are still avoided. A failure of the whole node counts as ``isolation_ms``.

    ``connect_timeout_s`` bounds a try to connect where another node may follow. The producer asks unreachable nodes each
    ``detect_interval_s``, for ``detect_timeout_s`` each, whether they answer again. ``timeout_per_request_s`` bounds one
    try with ``retry_may_store_twice`` (RocketMQ: sendMsgMaxTimeoutPerRequest). Raises ValueError for values that make no
    sense.
    """

    latency_max_ms: tuple[int, ...] = (50, 100, 550, 1800, 3000, 5000, 15_000)
    not_available_ms: tuple[int, ...] = (0, 0, 2000, 5000, 6000, 10_000, 30_000)
    send_latency_fault_enable: bool = True
    isolation_ms: int = 10_000
    connect_timeout_s: float = 1.0
    detect_interval_s: float = 2.0
    detect_timeout_s: float = 0.5
    timeout_per_request_s: float = 3.0

    def __post_init__(self) -> None:
        latencies, pauses = tuple(self.latency_max_ms), tuple(self.not_available_ms)
        if not latencies or len(latencies) != len(pauses):
            raise ValueError("latency_max_ms and not_available_ms must have the same number of entries, at least one")
        if any(type(one) is not int or not 0 <= one <= _MOST_MS for one in (*latencies, *pauses, self.isolation_ms)):
            raise ValueError(f"times of a FaultStrategy are integers from 0 to {_MOST_MS} ms")
        if list(latencies) != sorted(set(latencies)):
            raise ValueError("latency_max_ms must grow")
        for name in ("connect_timeout_s", "detect_interval_s", "detect_timeout_s", "timeout_per_request_s"):
            if not 0 < getattr(self, name) <= _MOST_MS / 1000:
                raise ValueError(f"{name} must be more than 0 and at most {_MOST_MS // 1000} seconds")

    def not_available_for_ms(self, latency_ms: float) -> int:
        """For how long to avoid a node after a send that took ``latency_ms``."""
        found = 0
        for latency, pause in zip(self.latency_max_ms, self.not_available_ms, strict=True):
            if latency_ms < latency:
                break
            found = pause
        return found

    @property
    def slow_s(self) -> float:
        """From this latency on a node is avoided; infinite where latency has no effect."""
        if self.send_latency_fault_enable:
            for latency, pause in zip(self.latency_max_ms, self.not_available_ms, strict=True):
                if pause:
                    return latency / 1000
        return float("inf")


class NodeFaults:
    """What a producer knows of one node. Times are seconds of ``clock``.

    Any thread may call the methods. Each sets single attributes, so a race costs at most one choice of a worse node.
    """

    def __init__(self, strategy: FaultStrategy, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_reachable = True
        self.latency_s = 0.0
        """Of the last send that was answered."""
        self._strategy = strategy
        self._slow_s = strategy.slow_s
        self._clock = clock
        self._until = 0.0
        self._topics: dict[str, float] = {}

    def answered(self, latency_s: float) -> None:
        """The node answered a send."""
        self.latency_s = latency_s
        self.is_reachable = True
        if latency_s >= self._slow_s:
            self._avoid(self._strategy.not_available_for_ms(latency_s * 1000))

    def failed(self, error: SendError, topic: str) -> None:
        """A send to ``topic`` failed."""
        if error.code in _OF_THE_CLIENT:
            return
        if error.code == Code.NODE_UNAVAILABLE:
            self.is_reachable = False
            return
        if error.outcome is Outcome.NOT_STORED and error.code in _OF_ONE_TOPIC:
            if len(self._topics) >= _MAX_TOPICS:
                self._topics.clear()
            self._topics[topic] = self._clock() + self._isolation_s
            return
        if error.outcome is Outcome.NOT_STORED and error.retry_after_ms is not None:
            self._avoid(min(error.retry_after_ms, _MOST_MS))
            return
        if error.outcome is Outcome.UNKNOWN:
            self.is_reachable = False
        self._avoid(self._strategy.not_available_for_ms(self._strategy.isolation_ms))

    def detected(self) -> None:
        """The node answers again. It is still avoided for the time that a failure or its latency asked for."""
        self.is_reachable = True

    def is_available(self, now: float, topic: str, unanswered_s: float = 0.0) -> bool:
        """Whether the node is a first choice. ``unanswered_s``: the age of its oldest request without an answer."""
        if not self.is_reachable or now < self._until or unanswered_s >= self._slow_s:
            return False
        if self._topics:
            until = self._topics.get(topic)
            if until is not None:
                if now < until:
                    return False
                self._topics.pop(topic, None)
        return True

    @property
    def _isolation_s(self) -> float:
        return self._strategy.not_available_for_ms(self._strategy.isolation_ms) / 1000

    def _avoid(self, time_ms: float) -> None:
        self._until = max(self._until, self._clock() + time_ms / 1000)
