"""Histories: the rate of the node and of a topic, the lag of a group, over an hour or a day; and their drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.values import value

_SPANS: Final = {"1h": 3_600, "24h": 86_400}
_CHOICES: Final = tuple(_SPANS)
_WIDTH, _HEIGHT = 720, 180


@dataclass(frozen=True, slots=True)
class NodeHistoryAsked:
    """How far back."""

    span: str = value("1h", "An hour, or a day.", choices=_CHOICES)


@dataclass(frozen=True, slots=True)
class TopicHistoryAsked:
    """Of which topic, how far back."""

    topic: str = value(doc="The topic's name.", longest=255)
    span: str = value("1h", "An hour, or a day.", choices=_CHOICES)


@dataclass(frozen=True, slots=True)
class GroupHistoryAsked:
    """Of which group, how far back."""

    group: str = value(doc="The group's name.", longest=255)
    span: str = value("1h", "An hour, or a day.", choices=_CHOICES)


@dataclass(frozen=True, slots=True)
class Point:
    """A sample: milliseconds since 1970, and the value; null where it is not known."""

    at_ms: int
    value: float | None


@dataclass(frozen=True, slots=True)
class History:
    """Samples every ``step_s``, the oldest first; 0 when histories are off. ``unit``: bytes/s, messages/s or messages.

    ``path``: the line of a drawing of 720 by 180, in SVG's words. They begin anew with the dashboard's process.
    """

    of: str
    unit: str
    span: str
    step_s: int
    points: list[Point]
    latest: float | None
    lowest: float | None
    highest: float | None
    path: str


def node_history(node: Node, asked: NodeHistoryAsked) -> History:
    """No request: bytes that were written, a second."""
    node.rights.check("admin", "status", {})
    return _history(node, "the node", "bytes/s", asked.span, node.history.rate_of_node(_SPANS[asked.span]))


def topic_history(node: Node, asked: TopicHistoryAsked) -> History:
    """One request: messages that were stored, a second. The topic is followed from now on."""
    node.rights.check("reader", "offsets", {"topic": asked.topic})
    node.admin.topic(asked.topic)
    node.history.follow(asked.topic)
    points = node.history.rate_of_topic(asked.topic, _SPANS[asked.span])
    return _history(node, f"topic {asked.topic}", "messages/s", asked.span, points)


def group_history(node: Node, asked: GroupHistoryAsked) -> History:
    """No request: messages that waited for the group."""
    node.rights.check("coordinator", "group.describe", {"group": asked.group})
    points = node.history.lag_of_group(asked.group, _SPANS[asked.span])
    return _history(node, f"group {asked.group}", "messages", asked.span, points)


def _history(node: Node, of: str, unit: str, span: str, points: list[tuple[int, float | None]]) -> History:
    known = [one for _, one in points if one is not None]
    return History(
        of,
        unit,
        span,
        node.settings.history_s,
        [Point(at, None if one is None else round(one, 3)) for at, one in points],
        None if not points or points[-1][1] is None else round(points[-1][1], 3),
        round(min(known), 3) if known else None,
        round(max(known), 3) if known else None,
        drawn(points, _SPANS[span]),
    )


def drawn(points: list[tuple[int, float | None]], span_s: int) -> str:
    """A line from left (``span_s`` before the newest sample) to right, 0 at the bottom. It ends before a gap."""
    if not points:
        return ""
    highest = max((one for _, one in points if one is not None), default=0.0) or 1.0
    end_ms = points[-1][0]
    parts, pen_is_down = [], False
    for at_ms, one in points:
        if one is None:
            pen_is_down = False
            continue
        x = _WIDTH - (end_ms - at_ms) / (span_s * 1000) * _WIDTH
        y = _HEIGHT - one / highest * _HEIGHT
        parts.append(f"{'L' if pen_is_down else 'M'}{x:.1f} {y:.1f}")
        if not pen_is_down:
            parts.append("h0.1")  # a lone sample is a dot
        pen_is_down = True
    return "".join(parts)
