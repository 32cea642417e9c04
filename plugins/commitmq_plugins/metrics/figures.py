"""Everything that one answer is made of, gathered at one time."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from commitmq.control import DispatcherWord, Word
from commitmq.errors import CommitMQError, NodeUnavailableError
from commitmq.plugin import WorkerContext
from commitmq_plugins.metrics.counted import Counted, CountFiles
from commitmq_plugins.metrics.lags import Lags, Position, QueueLag
from commitmq_plugins.metrics.node_line import DEADLINE_S, NodeLine
from commitmq_plugins.metrics.processes import Processes, ProcessFigures

_STATUS_EVERY_S: Final = 15.0
_STATUS_LEAST_S: Final = 1.0
_MOST_NAMES: Final = 100_000
_LISTED: Final = 10
"""Times ``metrics.max_positions``: the positions that are looked at to find those that lag most."""

_Found = TypeVar("_Found")
Row = dict[str, Any]


@dataclass(slots=True)
class GroupLag:
    """A group in a topic: the sum of its queues, and when the oldest message that waits was stored."""

    messages: int = 0
    since_ms: int | None = None
    offset: int = 0

    def add(self, one: QueueLag) -> None:
        self.messages += one.messages
        self.offset += one.offset
        if one.since_ms is not None and (self.since_ms is None or one.since_ms < self.since_ms):
            self.since_ms = one.since_ms


@dataclass(slots=True)
class Figures:
    """See the module. What could not be had in time is None, or empty, and ``errors`` counts it."""

    at_ms: int
    counted: dict[str, Counted]
    words: dict[str, int]
    disk_total: int | None = None
    disk_used: int | None = None
    segments: int | None = None
    oldest_ms: int | None = None
    topics: dict[str, Row] | None = None
    groups: dict[str, Row] | None = None
    queue_lags: list[QueueLag] = field(default_factory=list)
    group_lags: dict[tuple[str, str], GroupLag] = field(default_factory=dict)
    positions_left_out: int = 0
    processes: list[ProcessFigures] = field(default_factory=list)
    dispatchers: list[Row] = field(default_factory=list)
    log_cuts: int | None = None
    positions_lowered: int | None = None

    def count(self, name: str) -> Counted | None:
        return self.counted.get(name)

    def furthest_behind(self) -> list[tuple[str, str, GroupLag]]:
        """Group, topic and lag: the largest lag first, so an answer that cannot have all has those that matter."""
        found = [(group, topic, lag) for (group, topic), lag in self.group_lags.items()]
        return sorted(found, key=lambda one: -one[2].messages)

    def by_label(self, name: str, *labels: str) -> dict[tuple[str, ...], int]:
        """The counter or gauge ``name``, added up by these labels."""
        found: dict[tuple[str, ...], int] = defaultdict(int)
        counted = self.counted.get(name)
        if counted is not None:
            for values, words in counted.rows.items():
                shown = counted.labels(values)
                found[tuple(shown.get(label, "") for label in labels)] += words[0]
        return dict(found)


class Gathering:
    """Gathers. For one thread; nothing of it is used between two calls, so without a scrape it costs nothing."""

    def __init__(self, context: WorkerContext, deadline_s: float = DEADLINE_S) -> None:
        """``deadline_s``: of each question to a process of the node."""
        self._context, self._control = context, context.control
        self._settings = context.config.metrics
        self.line = NodeLine(context, deadline_s)
        self.lags = Lags(context)
        self._files = CountFiles(context.layout.run, self._settings.idle_after_s)
        self._processes = Processes(context.control)
        self._topics: dict[str, Row] | None = None
        self._topics_version = -1
        self._status: Row = {}
        self._status_at_s = -_STATUS_EVERY_S
        self._is_late = False
        self.errors = 0
        """Questions that no process answered in time, since the start."""

    def close(self) -> None:
        self.line.close()
        self.lags.close()
        self._files.close()

    def gather(self) -> Figures:
        """All figures now."""
        now_s = time.monotonic()
        self._is_late = False
        figures = Figures(time.time_ns() // 1_000_000, self._files.read(now_s), self._words())
        self._look_at_disk(figures)
        figures.topics = self._topics_now()
        figures.groups = self._tried(self._groups_now)
        self._look_at_lags(figures)
        age_s = now_s - self._status_at_s
        if age_s >= _STATUS_EVERY_S or (age_s >= _STATUS_LEAST_S and self._processes.has_lost_one()):
            status = self._tried(lambda: self.line.ask("admin", "status"))
            if status is not None:
                self._status, self._status_at_s = status, now_s
        figures.processes = self._processes.measure(self._status.get("processes", []))
        figures.dispatchers = self._status.get("dispatchers", [])
        node = self._status.get("node", {})
        figures.log_cuts, figures.positions_lowered = node.get("log_cuts"), node.get("positions_lowered")
        return figures

    def topics(self) -> dict[str, Row] | None:
        """The topics alone, by name: one question, and only when they have changed. None when they are not known."""
        self._is_late = False
        return self._topics_now()

    def _tried(self, work: Callable[[], _Found]) -> _Found | None:
        if self._is_late:
            return None  # one silence is enough for one answer
        try:
            return work()
        except (CommitMQError, KeyError, IndexError) as error:
            self._is_late = isinstance(error, NodeUnavailableError)
            self.errors += 1
            self._context.log.debug("a figure is missing", why=str(error))
            return None

    def _words(self) -> dict[str, int]:
        control = self._control
        words = {word.name.lower(): control.get(word) for word in Word}
        words["visible"] = control.visible(self._context.config.sync_flush)
        words["dispatched"] = control.dispatcher(0, DispatcherWord.DISPATCHED)
        words["dispatched_durable"] = control.dispatcher(0, DispatcherWord.DURABLE)
        return words

    def _look_at_disk(self, figures: Figures) -> None:
        layout = self._context.layout
        try:
            used = shutil.disk_usage(layout.root)
            figures.disk_total, figures.disk_used = used.total, used.total - used.free
            figures.segments = len(os.listdir(layout.commit_log))
        except OSError:
            self.errors += 1

    def _topics_now(self) -> dict[str, Row] | None:
        version = self._control.get(Word.TOPICS_VERSION)
        if self._topics is None or version != self._topics_version:
            found = self._tried(lambda: list(self.line.pages("coordinator", "topic.list", "topics", _MOST_NAMES)))
            if found is None:
                return self._topics
            self._topics, self._topics_version = {row["name"]: row for row in found}, version
        return self._topics

    def _groups_now(self) -> dict[str, Row]:
        groups: dict[str, Row] = {}
        for row in self.line.pages("coordinator", "group.list", "groups", self._settings.max_positions):
            known = groups.setdefault(row["name"], row)
            if known is not row:
                known["topics"] += row["topics"]
        return groups

    def _look_at_lags(self, figures: Figures) -> None:
        self.lags.begin(figures.topics or {})
        figures.oldest_ms = self.lags.oldest_ms()
        most = self._settings.max_positions
        pages = self.line.pages("coordinator", "group.positions", "positions", most * _LISTED + 1)
        rows = self._tried(lambda: list(pages))
        if rows is None:
            return
        figures.positions_left_out = max(0, len(rows) - most)
        figures.queue_lags = self.lags.of((Position(*row) for row in rows[: most * _LISTED]), most)
        for one in figures.queue_lags:
            figures.group_lags.setdefault((one.group, one.topic), GroupLag()).add(one)
