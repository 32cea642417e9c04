"""Topics: the list, one topic with its queues, and a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq_plugins.dashboard.api.node import BadValueError, VisitorNode, command, value

PAGE: Final = 50
_MOST_QUEUES: Final = 200
_MOST_GROUPS: Final = 100
_SORTS: Final = ("name", "-name", "queues", "-queues")


@dataclass(frozen=True, slots=True)
class TopicsQuery:
    """Which topics, in which order."""

    q: str = value("", "Only topics with this text in their name.", longest=255)
    all: bool = value(False, "Also the node's own topics, and those of retries and dead letters.")
    sort: str = value("name", "The order; - for the greatest first.", choices=_SORTS)
    page: int = value(1, "Pages of 50 begin at 1.", low=1, high=1_000_000)


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic. ``messages``: those that can be read now; null when not known."""

    name: str
    kind: str
    queues: int
    perm: str
    messages: int | None


@dataclass(frozen=True, slots=True)
class Topics:
    """A page of topics. ``total`` is the number of all that fit, ``hidden`` of those that only ``all`` shows."""

    topics: list[TopicRow]
    page: int
    pages: int
    total: int
    hidden: int


@dataclass(frozen=True, slots=True)
class TopicQuery:
    """One topic."""

    topic: str = value(doc="The topic's name.", longest=255)
    queues_from: int = value(0, "The first queue to show.")


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue: offset of its first message, and the one that its next message will get."""

    queue: int
    min: int
    end: int
    messages: int


@dataclass(frozen=True, slots=True)
class TopicGroup:
    """A group with offsets in the topic: how far it is behind there."""

    name: str
    lag_messages: int | None
    lag_s: float | None


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic, 200 of its queues at most, and the groups that read it. ``messages`` is null, and there are no queues, for a
    visitor who may not read it.
    """

    name: str
    kind: str
    read_queues: int
    write_queues: int
    perm: str
    attributes: dict[str, str]
    messages: int | None
    queues: list[QueueRow]
    queues_next: int | None
    groups: list[TopicGroup]
    groups_left_out: int


@dataclass(frozen=True, slots=True)
class TopicMade:
    """What a creation did. ``created`` is false when the topic was there with the same settings."""

    topic: str
    created: bool
    command: str


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create."""

    topic: str = value(doc="The topic's name.", longest=255)
    queues: int = value(4, "Its queues.", low=1, high=65_536)


def kind_of_topic(name: str, attributes: Mapping[str, str], system: bool) -> str:
    """One word: log, memory, BatchCQ, FIFO, DELAY, TRANSACTION; system, retry or dead letters."""
    if name.startswith(RETRY_PREFIX):
        return "retry"
    if name.startswith(DLQ_PREFIX):
        return "dead letters"
    if system:
        return "system"
    if attributes.get("storage.type") == "memory":
        return "memory"
    if attributes.get("queue.type") not in (None, "SimpleCQ"):
        return attributes["queue.type"]
    kind = attributes.get("message.type", "NORMAL")
    return "log" if kind in ("NORMAL", "UNSPECIFIED") else kind


def perm_text(perm: int) -> str:
    """``RW``, ``R-``: may be read, may be written."""
    return f"{'R' if perm & 4 else '-'}{'W' if perm & 2 else '-'}"


def topics(node: VisitorNode, asked: TopicsQuery) -> Topics:
    """No request while the topics stay. Messages are counted for one page only."""
    found = node.topics()
    text = asked.q.lower()
    fitting = [row for name, row in found.items() if text in name.lower()]
    shown = fitting if asked.all else [row for row in fitting if _is_plain(row)]
    by = (lambda row: (row["read_queues"], row["name"])) if "queues" in asked.sort else (lambda row: row["name"])
    shown.sort(key=by, reverse=asked.sort.startswith("-"))
    pages = max(1, -(-len(shown) // PAGE))
    first = (asked.page - 1) * PAGE
    rows = shown[first : first + PAGE]
    counts = _messages(node, rows)
    return Topics(
        [
            TopicRow(row["name"], _kind(row), int(row["read_queues"]), perm_text(row["perm"]), count)
            for row, count in zip(rows, counts, strict=True)
        ],
        asked.page,
        pages,
        len(shown),
        len(fitting) - len(shown),
    )


def _kind(row: Mapping[str, Any]) -> str:
    return kind_of_topic(row["name"], row["attributes"], bool(row.get("system")))


def _is_plain(row: Mapping[str, Any]) -> bool:
    return _kind(row) not in ("retry", "dead letters", "system")


def _messages(node: VisitorNode, rows: list[dict[str, Any]]) -> list[int | None]:
    """Of each topic; None for one with more than 200 queues, or one that cannot be read now."""
    counted = [int(row["read_queues"]) if int(row["read_queues"]) <= _MOST_QUEUES else 0 for row in rows]
    bounds = iter(
        node.bounds([(row["name"], one) for row, most in zip(rows, counted, strict=True) for one in range(most)])
    )
    sums: list[int | None] = []
    for most in counted:
        parts = [next(bounds) for _ in range(most)]
        known = [end - begin for begin, end in filter(None, parts)]
        sums.append(sum(known) if parts and len(known) == len(parts) else None)
    return sums


def topic(node: VisitorNode, asked: TopicQuery) -> Topic:
    """Two requests, and the shared figures."""
    described = node.admin.topic(asked.topic)
    is_readable = node.rights.reads_topic(asked.topic)
    bounds = node.admin.offsets(asked.topic) if is_readable else []
    rows = [QueueRow(one.queue, one.min, one.max, one.max - one.min) for one in bounds]
    shown = [row for row in rows if row.queue >= asked.queues_from][:_MOST_QUEUES]
    left = [row.queue for row in rows if shown and row.queue > shown[-1].queue]
    figures = node.figures()
    groups = []
    names = [name for name in described.groups if node.rights.sees_group(name)]
    for name in names[:_MOST_GROUPS]:
        lag = figures.group_lags.get((name, asked.topic))
        since = None if lag is None else lag.since_ms
        age = 0.0 if lag is not None and not lag.messages else None
        groups.append(
            TopicGroup(
                name,
                None if lag is None else lag.messages,
                age if since is None else round(max(0, figures.at_ms - since) / 1000, 1),
            )
        )
    return Topic(
        described.name,
        kind_of_topic(described.name, described.attributes, described.system),
        described.read_queues,
        described.write_queues,
        perm_text(described.perm),
        described.attributes,
        sum(row.messages for row in rows) if is_readable else None,
        shown,
        left[0] if left else None,
        groups,
        max(0, len(names) - _MOST_GROUPS),
    )


def create_topic(node: VisitorNode, asked: NewTopic) -> TopicMade:
    """One request. A topic with other settings is refused."""
    if not asked.topic:
        raise BadValueError("topic is missing")
    made = node.admin.topic_create(asked.topic, asked.queues)
    return TopicMade(asked.topic, made.created, command("topic", "create", asked.topic, "--queues", asked.queues))
