"""Processes, plugins with their dispatchers, the store's files, and users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import psutil

from commitmq.errors import CommitMQError
from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.values import value

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
    """A plugin: ``failure`` is the last line of why it was left out."""

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
    """The store's files. Bytes. ``expiring``: the segments that retention would delete now; ``kept``: why the next one
    stays.
    """

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
class UsersAsked:
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
    """The processes of a status."""
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


def processes(node: Node, _: object) -> Processes:
    """What all pages share."""
    return Processes(process_rows(node.status()))


def plugins(node: Node, _: object) -> Plugins:
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


def storage(node: Node, _: object) -> Storage:
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


def users(node: Node, asked: UsersAsked) -> Users:
    """No request: the file of users is read when it has changed."""
    table = node.access()
    names = sorted(name for name in table.users if name > asked.after)
    shown = names[:_MOST]
    rows = []
    for name in shown:
        user = table.users[name]
        rows.append(UserRow(name, user.shown()["type"], user.shown()["status"], len(user.keys)))
    return Users(rows, len(table.users), shown[-1] if len(names) > len(shown) else None)
