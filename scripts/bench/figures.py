"""The figures of each work: names, units, and the better direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal


@dataclass(frozen=True)
class Figure:
    """``of`` takes the figure from a driver's result. Without it ``of`` raises KeyError, and the figure is left out."""

    name: str
    title: str
    unit: str
    better: Literal["more", "less"]
    of: Callable[[dict[str, Any]], float]


_SHARES: Final = ("p50", "p90", "p99", "p99.9", "p99.99")


def _latency(share: str, of: str = "latency_us", prefix: str = "", title: str = "") -> Figure:
    return Figure(prefix + share, title + share, "µs", "less", lambda result: float(result[of][share]))


def _rate(seconds: str, messages: str = "messages") -> Callable[[dict[str, Any]], float]:
    return lambda result: float(result[messages] / result[seconds])


_TO_VISIBLE: Final = (
    Figure("rate", "until visible", "messages/s", "more", _rate("visible_seconds")),
    Figure("acked_rate", "until acked", "messages/s", "more", _rate("seconds")),
    # Beside it, because the clock above does not wait for the index.
    Figure(
        "index_lag_s",
        "index behind by",
        "s",
        "less",
        lambda result: float(result["indexed_seconds"] - result["visible_seconds"]),
    ),
)

FIGURES: Final[dict[str, tuple[Figure, ...]]] = {
    "send": (
        Figure("rate", "rate", "messages/s", "more", lambda result: float(result["rate"])),
        *(_latency(share) for share in _SHARES),
    ),
    "pipeline": _TO_VISIBLE[:2],
    "batch": _TO_VISIBLE,
    "read": (
        Figure("rate", "rate", "messages/s", "more", _rate("seconds")),
        Figure("mb_rate", "bodies", "MB/s", "more", lambda result: float(result["bytes"] / result["seconds"] / 1e6)),
        Figure("first_s", "first after", "s", "less", lambda result: float(result["first_s"])),
    ),
    "end_to_end": tuple(_latency(share) for share in _SHARES),
    "push": tuple(_latency(share) for share in _SHARES),
    "connections": (
        Figure("memory_mb", "memory in all", "MB", "less", lambda result: float(result["memory_bytes"] / 1e6)),
        Figure("cost_mb", "memory for them", "MB", "less", lambda result: float(result["cost_bytes"] / 1e6)),
        Figure("cpu_percent", "processor", "% of a core", "less", lambda result: float(result["cpu_percent"])),
    ),
    "mixed": (Figure("rate", "produced and consumed", "messages/s", "more", _rate("seconds", "consumed")),),
    "query": tuple(_latency(share) for share in ("p50", "p99")),
    "floor": (
        Figure("echo_p50", "echo p50", "µs", "less", lambda result: float(result["echo"]["p50_us"])),
        Figure("send_memory_p50", "send, ack memory, p50", "µs", "less", lambda result: float(result["memory"])),
        Figure("send_flushed_p50", "send, ack flushed, p50", "µs", "less", lambda result: float(result["flushed"])),
        Figure("fdatasync_p50", "fdatasync p50", "µs", "less", lambda result: float(result["device"]["p50_us"])),
    ),
    "delayed": (
        *(_latency(share) for share in ("p50", "p90", "p99")),
        _latency("max"),
        Figure("earliest", "earliest", "µs", "more", lambda result: float(result["earliest_us"])),
        Figure("early", "early ones", "messages", "less", lambda result: float(result["early"])),
    ),
    "transactions": (
        Figure("rate", "committed", "messages/s", "more", lambda result: float(result["rate"])),
        *(_latency(share) for share in ("p50", "p90", "p99")),
    ),
    "share": (
        Figure("rate", "received and acknowledged", "messages/s", "more", lambda result: float(result["rate"])),
        Figure(
            "batch",
            "messages in a receive",
            "messages",
            "more",
            lambda result: float(result["messages"] / result["receives"]),
        ),
    ),
    "retry": (
        _latency("p50"),
        _latency("p99"),
        _latency("p50", "over_us", "over_", "beyond the delay, "),
        _latency("p99", "over_us", "over_", "beyond the delay, "),
    ),
    "timers": (
        Figure("cost_mb", "memory for them", "MB", "less", lambda result: float(result["cost_bytes"] / 1e6)),
        Figure("memory_mb", "memory in all", "MB", "less", lambda result: float(result["memory_bytes"] / 1e6)),
        Figure("seconds", "until a message went through", "s", "less", lambda result: float(result["seconds"])),
        Figure("fill_rate", "sent and in the timer", "messages/s", "more", _rate("fill_seconds")),
    ),
    "idle": (
        Figure("memory_mib", "memory", "MiB", "less", lambda result: float(result["memory_bytes"] / (1 << 20))),
        Figure("cpu_percent", "processor", "% of a core", "less", lambda result: float(result["cpu_percent"])),
    ),
    "restart": (
        Figure("seconds", "until a message went through", "s", "less", lambda result: float(result["seconds"])),
    ),
    "cpu": (
        Figure("cpu_s", "all", "CPU s per million", "less", lambda result: float(result["cpu_s_per_million"])),
        Figure("produce_s", "produce", "CPU s per million", "less", lambda result: float(result["produce"])),
        Figure("consume_s", "consume", "CPU s per million", "less", lambda result: float(result["consume"])),
    ),
}


def figures_of(work: str, result: dict[str, Any]) -> dict[str, float]:
    """Each figure of ``work`` that ``result`` has."""
    found = {}
    for figure in FIGURES[work]:
        try:
            found[figure.name] = figure.of(result)
        except (KeyError, TypeError, ZeroDivisionError):
            continue
    return found


def figure(work: str, name: str) -> Figure:
    """Raises KeyError for an unknown name."""
    return {one.name: one for one in FIGURES[work]}[name]
