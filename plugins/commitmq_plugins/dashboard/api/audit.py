"""The audit log: who changed what, and who was refused, the newest first, a page of a bounded look.

The place of a look is a text, ``writer:1:4711,users:1:80``: for each process a file and a byte of it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.security.audit import ENDING, process_of, roles
from commitmq.security.audit_trail import Backwards, TrailPosition
from commitmq_plugins.dashboard.api.node import BadValueError, VisitorNode, command, moment, value

MOST_ROWS: Final = 200
_MOST_TEXT: Final = 1_000
_PLACE: Final = re.compile(r"([A-Za-z0-9_.-]{1,100}):(\d{1,18}):(\d{1,18})").fullmatch


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which lines."""

    user: str | None = value(None, "Only of this user; uid 1000 is an account of the machine.", longest=300)
    op: str | None = value(None, "Only this operation, or all that begin so, as in topic.", longest=300)
    resource: str | None = value(None, "Only this resource, as in Topic:orders.", longest=500)
    refused: bool = value(False, "Only refused requests.")
    since: str | None = value(None, "Only of this time and later.", longest=64)
    until: str | None = value(None, "Only of before this time.", longest=64)
    limit: int = value(50, "Rows.", low=1, high=MOST_ROWS)
    go_on: str | None = value(None, "next of the page before.", longest=32_768)


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A line. ``role``: the process that wrote it. ``before`` and ``after``: of a change, as JSON."""

    time: str
    role: str
    user: str | None
    protocol: str | None
    address: str | None
    operation: str
    resource: str | None
    decision: str
    reason: str | None
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class AuditLines:
    """A page, the newest first. ``ended_by``: rows, lines, time, or end (nothing older fits). ``next``: as of messages."""

    lines: list[AuditRow]
    looked_at: int
    until: str | None
    ended_by: str
    next: str | None
    command: str


def audit(node: VisitorNode, asked: AuditQuery) -> AuditLines:
    """No request: the files are read from their ends, within the bounds of a look at messages."""
    node.check_super()
    wanted = _AuditFilter(asked)
    folder = node.context.layout.audit
    with contextlib.ExitStack() as stack:
        try:
            looks = _looks(folder, asked.go_on, stack)
            merged = heapq.merge(*(_dated(*one) for one in looks.items()), key=_time_of, reverse=True)
            page = _page(node, merged, wanted, asked.limit)
        except OSError as error:
            raise StoreError(f"cannot read the audit log: {error.strerror}", path=folder) from error
    rows, taken, looked_at, ended_by, until = page
    # A look reads one line of each process ahead: the place is that of the last line that was taken.
    starts = _places(asked.go_on) if asked.go_on else {}
    places = {**{role: look.begin for role, look in looks.items()}, **starts, **taken}
    following = None if ended_by == "end" else ",".join(f"{role}:{at.first}:{at.end}" for role, at in places.items())
    root = str(node.context.layout.root)
    words = [part for name, one in (("--user", asked.user), ("--op", asked.op)) if one for part in (name, one)]
    line = command("audit", "--store", root, *words, *(["--refused"] if asked.refused else []))
    return AuditLines(rows, looked_at, until, ended_by, following, line)


@dataclass(slots=True)
class _AuditScan:
    lines: Backwards
    begin: TrailPosition


def _looks(folder: Path, go_on: str | None, stack: contextlib.ExitStack) -> dict[str, _AuditScan]:
    """One for each process; when a look continues, only for those that it had."""
    before = None if go_on is None else _places(go_on)
    found = {}
    for role in roles(folder):
        if before is not None and role not in before:
            continue
        place = None if before is None else before[role]
        lines = stack.enter_context(contextlib.closing(Backwards(folder / f"{role}{ENDING}", place)))
        found[role] = _AuditScan(lines, lines.place)
    return found


def _places(text: str) -> dict[str, TrailPosition]:
    found = {}
    for part in text.split(","):
        match = _PLACE(part)
        if match is None:
            raise BadValueError(f"go_on is next of the page before, not {text!r:.100}")
        found[match[1]] = TrailPosition(int(match[2]), int(match[3]))
    return found


_Dated = tuple[str, str, dict[str, Any], TrailPosition]


def _dated(role: str, look: _AuditScan) -> Iterator[_Dated]:
    for line in look.lines:
        yield str(line["time"]), role, line, look.lines.place


def _time_of(one: _Dated) -> str:
    return one[0]


def _page(
    node: VisitorNode, merged: Iterator[_Dated], wanted: _AuditFilter, limit: int
) -> tuple[list[AuditRow], dict[str, TrailPosition], int, str, str | None]:
    """Rows, the place of each process's last line, how many lines were looked at, what ended it, and the last time."""
    settings = node.settings
    ends_s = time.monotonic() + settings.scan_ms / 1000
    rows: list[AuditRow] = []
    places: dict[str, TrailPosition] = {}
    looked_at = 0
    when: str | None = None
    for when, role, line, place in merged:
        if wanted.since and when < wanted.since:
            return rows, places, looked_at, "end", when
        places[role] = place
        looked_at += 1
        if wanted.fits(line):
            rows.append(_row(role, line))
            if len(rows) == limit:
                return rows, places, looked_at, "rows", when
        if looked_at >= settings.scan_messages:
            return rows, places, looked_at, "lines", when
        if time.monotonic() >= ends_s:
            return rows, places, looked_at, "time", when
    return rows, places, looked_at, "end", when


class _AuditFilter:
    """The filter. Raises BadValueError."""

    def __init__(self, asked: AuditQuery) -> None:
        self._exact = {"user": asked.user, "resource": asked.resource, "decision": "refused" if asked.refused else None}
        self._operation = asked.op
        self.since = _as_in_a_line("since", asked.since)
        self._until = _as_in_a_line("until", asked.until)

    def fits(self, line: Mapping[str, Any]) -> bool:
        if self._until and str(line["time"]) >= self._until:
            return False
        op = str(line.get("op", ""))
        if self._operation and op != self._operation and not op.startswith(f"{self._operation.rstrip('.')}."):
            return False
        return all(one is None or line.get(name) == one for name, one in self._exact.items())


def _as_in_a_line(name: str, text: str | None) -> str:
    return "" if text is None else moment(name, text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _row(role: str, line: Mapping[str, Any]) -> AuditRow:
    def text(name: str) -> str | None:
        found = line.get(name)
        return None if found is None else str(found)[:_MOST_TEXT]

    def shown(name: str) -> str | None:
        found = line.get(name)
        return None if found is None else json.dumps(found, ensure_ascii=False)[:_MOST_TEXT]

    return AuditRow(
        str(line["time"])[:40],
        process_of(role),
        text("user"),
        text("protocol"),
        text("address"),
        text("op") or "",
        text("resource"),
        text("decision") or "",
        text("reason"),
        shown("before"),
        shown("after"),
    )
