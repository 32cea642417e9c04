"""Building blocks of measurements: percentiles, rates over several runs, progress, and time limits."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

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


def to_json(value: Any) -> Any:
    """A dataclass of this package as plain values."""
    return asdict(value)
