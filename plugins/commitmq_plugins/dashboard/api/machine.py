"""Processes, plugins with their dispatchers, the store's files, and users.

Histories: the rate of the node and of a topic, the lag of a group, over an hour or a day; and their drawing.

What the first page shows: is the node well, how full is it, who is behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import psutil

from commitmq.errors import CommitMQError
from commitmq_plugins.dashboard.api.groups import GroupRow, group_rows
from commitmq_plugins.dashboard.api.node import VisitorNode, value

_SPANS: Final = {"1h": 3_600, "24h": 86_400}
_CHOICES: Final = tuple(_SPANS)
_WIDTH, _HEIGHT = 720, 180


@dataclass(frozen=True, slots=True)
class NodeHistoryQuery:
    """How far back."""

    span: str = value("1h", "An hour, or a day.", choices=_CHOICES)


@dataclass(frozen=True, slots=True)
class TopicHistoryQuery:
    """Of which topic, how far back."""

    topic: str = value(doc="The topic's name.", longest=255)
    span: str = value("1h", "An hour, or a day.", choices=_CHOICES)


@dataclass(frozen=True, slots=True)
class GroupHistoryQuery:
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
    ``path``: the line of a drawing of 720 by 180, in SVG's words. They start over with the dashboard's process.
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


def node_history(node: VisitorNode, asked: NodeHistoryQuery) -> History:
    """No request: bytes that were written, a second."""
    node.rights.check("admin", "status", {})
    return _history(node, "the node", "bytes/s", asked.span, node.history.rate_of_node(_SPANS[asked.span]))


def topic_history(node: VisitorNode, asked: TopicHistoryQuery) -> History:
    """One request: messages that were stored, a second. The topic is followed from now on."""
    node.rights.check("reader", "offsets", {"topic": asked.topic})
    node.admin.topic(asked.topic)
    node.history.follow(asked.topic)
    points = node.history.rate_of_topic(asked.topic, _SPANS[asked.span])
    return _history(node, f"topic {asked.topic}", "messages/s", asked.span, points)


def group_history(node: VisitorNode, asked: GroupHistoryQuery) -> History:
    """No request: messages that waited for the group."""
    node.rights.check("coordinator", "group.describe", {"group": asked.group})
    points = node.history.lag_of_group(asked.group, _SPANS[asked.span])
    return _history(node, f"group {asked.group}", "messages", asked.span, points)


def _history(node: VisitorNode, of: str, unit: str, span: str, points: list[tuple[int, float | None]]) -> History:
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


_RESTING: Final = ("done", "idle")  # it ended well, or nobody needed it yet
_MOST: Final = 500


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process of the node. Bytes; CPU in percent of one core."""

    role: str
    state: str
    is_well: bool
    pid: int | None
    restarts: int
    cpu_percent: float | None
    memory_bytes: int | None
    resident_bytes: int | None
    descriptors: int | None
    lag_bytes: int | None
    last_exit: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes, in the order of a start."""

    processes: list[ProcessRow]


@dataclass(frozen=True, slots=True)
class PluginRow:
    """A plugin: ``failure`` is the last line of why it was omitted."""

    name: str
    distribution: str
    version: str
    hooks: list[str]
    failed_in: str | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class DispatcherRow:
    """A dispatcher: where it is, in bytes of the log, and why it stands."""

    name: str
    plugin: str | None
    state: str
    position: int
    durable: int
    lag_bytes: int | None
    restarts: int
    parked: str | None
    last_error: str | None
    command: str | None


@dataclass(frozen=True, slots=True)
class Plugins:
    """Plugins and dispatchers."""

    plugins: list[PluginRow]
    dispatchers: list[DispatcherRow]


@dataclass(frozen=True, slots=True)
class Storage:
    """The store's files, in bytes. ``expiring``: what retention would delete now; ``kept``: why the next stays."""

    root: str
    log_begin: int
    log_end: int
    flushed: int
    dispatched: int
    allocated: int
    segment_bytes: int
    segments: int | None
    retention_hours: int
    expiring: list[str]
    expiring_bytes: int | None
    kept: str | None
    disk_total_bytes: int | None
    disk_used_bytes: int | None
    memory_used: dict[str, int]
    unknown: list[str]
    command: str


@dataclass(frozen=True, slots=True)
class UsersQuery:
    """Which users."""

    after: str = value("", "The last name of the page before.")


@dataclass(frozen=True, slots=True)
class UserRow:
    """A user, without secrets: ``keys`` is a number."""

    name: str
    type: str
    status: str
    keys: int


@dataclass(frozen=True, slots=True)
class Users:
    """Users by name; ``next`` is the ``after`` of the next page."""

    users: list[UserRow]
    total: int
    next: str | None


def process_rows(status: Mapping[str, Any]) -> list[ProcessRow]:
    return [_process(row) for row in status["processes"]]


def _process(row: Mapping[str, Any]) -> ProcessRow:
    resident = descriptors = None
    pid = row["pid"] or None
    if pid:
        try:
            process = psutil.Process(int(pid))
            resident, descriptors = process.memory_info().rss, process.num_fds()
        except (psutil.Error, OSError):
            pass
    state = str(row["state"])
    error = row.get("last_error")
    return ProcessRow(
        role=str(row["role"]),
        state=state,
        is_well=state in ("ready", *_RESTING),
        pid=pid,
        restarts=int(row["restarts"] or 0),
        cpu_percent=row["cpu_percent"],
        memory_bytes=row["memory_bytes"],
        resident_bytes=resident,
        descriptors=descriptors,
        lag_bytes=row.get("lag_bytes"),
        last_exit=row.get("last_exit"),
        last_error=None if error is None else str(error)[:1_000],
    )


def processes(node: VisitorNode, _: NoParameters) -> Processes:
    """What all pages share."""
    return Processes(process_rows(node.status()))


def plugins(node: VisitorNode, _: NoParameters) -> Plugins:
    """What all pages share."""
    status = node.status()
    rows = [
        PluginRow(
            one["name"],
            one["distribution"],
            one["version"],
            list(one["hooks"]),
            one["failed_in"],
            None if one["failure"] is None else str(one["failure"]).strip().splitlines()[-1][:1_000],
        )
        for one in status["plugins"][:_MOST]
    ]
    return Plugins(rows, [_dispatcher(one) for one in status["dispatchers"][:_MOST]])


def _dispatcher(row: Mapping[str, Any]) -> DispatcherRow:
    parked = row["parked"]
    return DispatcherRow(
        name=row["name"],
        plugin=row["plugin"],
        state=row["state"],
        position=row["position"],
        durable=row["durable"],
        lag_bytes=row["lag_bytes"],
        restarts=row["restarts"],
        parked=None if parked is None else str(parked)[:1_000],
        last_error=None if row["last_error"] is None else str(row["last_error"])[:1_000],
        command=None if parked is None else f"commitmq dispatcher retry {row['name']}",
    )


def storage(node: VisitorNode, _: NoParameters) -> Storage:
    """Three requests at most."""
    node.rights.check("admin", "status", {})
    figures, config = node.figures(), node.context.config
    words, unknown = figures.words, []
    plan: dict[str, Any] = {}
    memory: dict[str, int] = {}
    try:
        plan = node.admin.expire(dry_run=True, timeout_s=node.deadline_s)
    except CommitMQError as error:
        unknown.append(f"cleanup did not say what it would delete: {error}")
    try:
        memory = {name: int(one) for name, one in node.admin.memory_use().items() if isinstance(one, int)}
    except CommitMQError as error:
        unknown.append(f"the memory of memory topics is not known: {error}")
    return Storage(
        root=str(node.context.layout.root),
        log_begin=words["min_offset"],
        log_end=words["written"],
        flushed=words["flushed"],
        dispatched=words["dispatched"],
        allocated=words["allocated"],
        segment_bytes=config.commit_log.segment_bytes,
        segments=figures.segments,
        retention_hours=config.retention.hours,
        expiring=[str(one) for one in plan.get("segments", [])][:_MOST],
        expiring_bytes=plan.get("disk_bytes"),
        kept=plan.get("kept"),
        disk_total_bytes=figures.disk_total,
        disk_used_bytes=figures.disk_used,
        memory_used=memory,
        unknown=unknown,
        command="commitmq store expire --dry-run",
    )


def users(node: VisitorNode, asked: UsersQuery) -> Users:
    """No request: the file of users is read when it has changed."""
    table = node.access()
    names = sorted(name for name in table.users if name > asked.after)
    shown = names[:_MOST]
    rows = []
    for name in shown:
        user = table.users[name]
        rows.append(UserRow(name, user.shown()["type"], user.shown()["status"], len(user.keys)))
    return Users(rows, len(table.users), shown[-1] if len(names) > len(shown) else None)


_WORST: Final = 10


@dataclass(frozen=True, slots=True)
class NoParameters:
    """A request without values."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The node in one answer. Bytes, seconds and milliseconds since 1970; what is not known is null. ``problems``: a
    sentence each; none when the node takes and gives messages. ``unknown``: what could not be asked, and why.
    """

    ready: bool
    problems: list[str]
    warnings: list[str]
    unknown: list[str]
    age_s: float
    store: str
    flush_mode: str
    topics: int | None
    groups: int | None
    log_begin: int
    log_end: int
    bytes_in_per_s: float | None
    last_message_ms: int | None
    oldest_message_ms: int | None
    flush_lag_bytes: int
    dispatch_lag_bytes: int
    disk_total_bytes: int | None
    disk_used_bytes: int | None
    segments: int | None
    worst_lags: list[GroupRow]
    not_well: list[ProcessRow]


def overview(node: VisitorNode, _: NoParameters) -> Overview:
    """Nothing but what all pages share."""
    node.rights.check("admin", "status", {})
    figures = node.figures()
    words, config = figures.words, node.context.config
    unknown = []
    if figures.topics is None or figures.groups is None:
        unknown.append("the coordinator did not say which topics and groups there are")
    rows: list[ProcessRow] = []
    warnings: list[str] = node.health.notes()
    try:
        status = node.status()
        rows = [row for row in process_rows(status) if not row.is_well]
        warnings += [*status["disk_warnings"], *status["node"]["insecure"]]
        if status["node"].get("refuses_sends"):
            warnings.append("the node is drained, and refuses all sends: `commitmq drain off` ends that")
    except CommitMQError as error:
        unknown.append(f"the supervisor did not say how the processes are: {error}")
    behind = [row for row in group_rows(figures) if row.lag_messages]
    behind.sort(key=lambda row: -(row.lag_messages or 0))
    problems = node.health.reasons()
    return Overview(
        ready=not problems,
        problems=problems,
        warnings=warnings,
        unknown=unknown,
        age_s=round(max(0.0, time.time() - figures.at_ms / 1000), 3),
        store=str(node.context.layout.root),
        flush_mode=config.commit_log.flush_mode,
        topics=None if figures.topics is None else len(figures.topics),
        groups=None if figures.groups is None else len(figures.groups),
        log_begin=words["min_offset"],
        log_end=words["written"],
        bytes_in_per_s=node.bytes_in_per_s(),
        last_message_ms=words["written_timestamp"] or None,
        oldest_message_ms=figures.oldest_ms,
        flush_lag_bytes=max(0, words["written"] - words["flushed"]),
        dispatch_lag_bytes=max(0, words["written"] - words["dispatched"]),
        disk_total_bytes=figures.disk_total,
        disk_used_bytes=figures.disk_used,
        segments=figures.segments,
        worst_lags=behind[:_WORST],
        not_well=rows,
    )
