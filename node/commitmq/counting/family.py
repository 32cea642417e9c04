"""The description of a metric that a worker counts: its name, kind, labels, and the bounds of a histogram."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``labels`` are names; each row of a table has a value for each.

    Rows hold whole numbers; what is shown is the number times ``scale``, so a histogram of seconds that counts nanoseconds
    has the scale 1e-9. ``bounds`` are the upper ends of a histogram's buckets, in the unit that is shown, ascending, without
    the last one (+Inf). A counter's name ends with ``_total``.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.kind is Kind.HISTOGRAM) != bool(self.bounds) or list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has bounds, in ascending order")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters, and nothing else, end with _total")


def doubling(first: float, count: int) -> tuple[float, ...]:
    """``count`` bounds from ``first`` on, each twice the one before."""
    return tuple(first * (1 << step) for step in range(count))
