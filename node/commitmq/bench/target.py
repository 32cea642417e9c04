"""The target of a measurement, a node and a topic of its own; and what measurements share: percentiles, rates over several
runs, progress, and time limits.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from commitmq.client.admin import Admin
from commitmq.client.results import SendResult
from commitmq.errors import CommitMQError
from commitmq.protocol.directory import Directory, Metadata

ROUND_SAMPLES = 200
"""Calls of one kind in a row, where several kinds take turns."""
_POLL_S = 0.0005
# The first requests after a pause pay for cold caches and a sleeping core.
_WARM_CALLS = 20
# After the last ack a message becomes visible within milliseconds; this bounds the wait when a dispatcher is dead.
_VISIBLE_WITHIN_S = 30.0
# Called with the number of messages (or samples) done since the last call; never inside a timed step.
Progress = Callable[[int], None]


def no_progress(_done: int) -> None:
    """For callers that show no progress."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Durations in microseconds; ``count`` samples."""

    count: int
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float

    @classmethod
    def of(cls, samples_ns: Sequence[int]) -> Percentiles:
        """Nearest-rank percentiles of durations in nanoseconds. Raises ValueError without samples."""
        if not samples_ns:
            raise ValueError("percentiles need at least one sample")
        ordered = sorted(samples_ns)

        def at(share: float) -> float:
            return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1000, 2)

        return cls(len(ordered), at(0.5), at(0.9), at(0.99), at(0.999), round(ordered[-1] / 1000, 2))


@dataclass(frozen=True, slots=True)
class Spread:
    """The same figure from several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def time_calls(step: Callable[[], object], samples: int) -> list[int]:
    """Durations of ``samples`` calls in nanoseconds, after some warm-up calls that do not count."""
    now = time.perf_counter_ns
    for _ in range(_WARM_CALLS):
        step()
    durations = []
    for _ in range(samples):
        started = now()
        step()
        durations.append(now() - started)
    return durations


class Clock:
    """A time limit for one measurement: the measurement may stop early, and reports that."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def over(self) -> bool:
        return time.monotonic() >= self._end

    def left_s(self, least_s: float = 0.0) -> float:
        """Seconds left, at least ``least_s``."""
        return max(self._end - time.monotonic(), least_s)


def machine() -> dict[str, Any]:
    """The conditions of the figures besides CommitMQ: processor, cores, kernel, load and library versions."""
    import zmq

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyzmq": version("pyzmq"),
        "libzmq": zmq.zmq_version(),
    }


class BenchTopic:
    """A topic on ``node``: the named one, or a fresh one that is deleted at the end of the ``with`` block.

    ``topics`` fresh topics, with ``queues`` queues each, are for measurements of many queues; ``name`` is the first of
    them.

    The messages of a deleted topic stay in the log until their segments expire, like all others.
    """

    def __init__(
        self,
        node: str | None,
        name: str | None = None,
        *,
        queues: int = 4,
        topics: int = 1,
        attributes: dict[str, str] | None = None,
    ) -> None:
        """``attributes`` are the attributes of fresh topics."""
        self.node = node
        self.fresh = name is None
        self.name = name or f"bench-{secrets.token_hex(6)}"
        self.names = [self.name, *(f"{self.name}-{number}" for number in range(1, topics if self.fresh else 1))]
        self.queues = queues
        self._attributes = attributes
        self._admin = Admin(node)

    def __enter__(self) -> Self:
        try:
            if self.fresh:
                for name in self.names:
                    self._admin.topic_create(name, self.queues, attributes=self._attributes)
        except BaseException:
            self._admin.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.fresh:
                for name in self.names:
                    self._admin.topic_delete(name)
        except CommitMQError:
            # When the node ended during the measurement, show the measurement's own error.
            if error is None:
                raise
        finally:
            self._admin.close()

    def visible(self) -> int:
        """Messages that consumers could read so far, the sum of the queues' next offsets; 0 without the topic."""
        try:
            return sum(high for _, _, high, _ in self._admin.offsets(self.name))
        except CommitMQError as error:
            if getattr(error, "code", "") == "TOPIC_NOT_EXIST":
                return 0
            raise

    def readable(self) -> int:
        """Messages that consumers can read now, without expired ones."""
        return sum(high - low for _, low, high, _ in self._admin.offsets(self.name))

    def wait_visible(self, count: int) -> None:
        """Return when :meth:`visible` has reached ``count``. Raises CommitMQError when that takes too long."""
        clock = Clock(_VISIBLE_WITHIN_S)
        while (seen := self.visible()) < count:
            if clock.over():
                raise CommitMQError(
                    f"{count} messages of {self.name} were acknowledged, but consumers see only {seen} after"
                    f" {_VISIBLE_WITHIN_S:.0f} s"
                )
            time.sleep(_POLL_S)

    def wait_sent(self, last: SendResult) -> None:
        """Return when consumers could read ``last``, and so everything that was sent before it: dispatching follows the
        log's order. Raises CommitMQError when that takes too long.
        """
        clock = Clock(_VISIBLE_WITHIN_S)
        while self._admin.offsets(last.topic)[last.queue][2] <= last.queue_offset:
            if clock.over():
                raise CommitMQError(
                    f"{last.topic}: acknowledged messages are not visible after {_VISIBLE_WITHIN_S:.0f} s"
                )
            time.sleep(_POLL_S)

    def metadata(self) -> Metadata:
        """The node's metadata, and whether it is on this host."""
        directory = Directory(self.node)
        try:
            return directory.metadata(timeout_s=10.0)
        finally:
            directory.close()
