"""What the first page shows: is the node well, how full is it, who is behind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from commitmq.errors import CommitMQError
from commitmq_plugins.dashboard.api.groups import GroupRow, group_rows
from commitmq_plugins.dashboard.api.machine import ProcessRow, process_rows
from commitmq_plugins.dashboard.api.node import Node

_WORST: Final = 10


@dataclass(frozen=True, slots=True)
class Nothing:
    """A request without values."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The node in one answer. Bytes, seconds and milliseconds since 1970; what is not known is null.

    ``problems``: a sentence each; none when the node takes and gives messages. ``unknown``: what could not be asked, and
    why.
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


def overview(node: Node, _: Nothing) -> Overview:
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
