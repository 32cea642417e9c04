"""What all visitors share: figures, topics and status of the node, which are gathered for the first of them who asks.

It is the node's own view; :mod:`.node` shows each visitor the part that he may see. A process of the node that does not answer
costs a page the deadline, and then the page's error or a figure that is not known.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, Final

from commitmq.client.admin import Admin
from commitmq.errors import NodeUnavailableError
from commitmq.plugin import WorkerContext
from commitmq.security.access_file import AccessFile
from commitmq.security.access_table import AccessTable
from commitmq.security.live_access import LiveAccess
from commitmq_plugins.dashboard.api.rights import Rights
from commitmq_plugins.dashboard.api.visitor_admin import VisitorAdmin
from commitmq_plugins.dashboard.history import History
from commitmq_plugins.dashboard.settings import DashboardSettings
from commitmq_plugins.metrics.figures import Figures, Gathering
from commitmq_plugins.metrics.health import Health
from commitmq_plugins.metrics.lags import Lags

_LEAST_RATE_S: Final = 1.0
_MOST_RATE_S: Final = 60.0
_MOST_QUEUES: Final = 200
_MOST_SEEN: Final = 32


class Shared:
    """Thread-safe. Nothing of it works while nobody asks, so an idle dashboard costs nothing."""

    def __init__(self, context: WorkerContext, settings: DashboardSettings) -> None:
        self.context, self.settings = context, settings
        self.deadline_s = settings.deadline_ms / 1000
        self.health = Health(context)
        self._access = LiveAccess(AccessFile(context.layout.root), context.log)
        self._access_lock = threading.Lock()
        self._own = threading.local()
        self._admins: list[VisitorAdmin] = []
        self._status_admin: Admin | None = None
        self._lock = threading.Lock()
        self._gathering = Gathering(context, self.deadline_s)
        self._figures: Figures | None = None
        self._figures_at_s = 0.0
        self._topics: dict[str, Any] | None = None
        self._status_lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._status_at_s = -math.inf
        self._bounds_lock = threading.Lock()
        self._lags = Lags(context)
        self._written: list[tuple[float, int]] = []
        self._seen: dict[tuple[str, str], tuple[AccessTable, dict[str, Any], dict[str, Any]]] = {}
        self.history = History(settings.history_s, settings.history_series)

    def close(self) -> None:
        """When no thread works any more."""
        for admin in self._admins:
            admin.close()
        if self._status_admin is not None:
            self._status_admin.close()
        self._gathering.close()
        self._lags.close()

    def admin(self, rights: Rights) -> VisitorAdmin:
        """The calling thread's, for this visitor. Each of its requests ends after the deadline, with NodeUnavailableError."""
        found: VisitorAdmin | None = getattr(self._own, "admin", None)
        if found is None:
            found = self._own.admin = self.new_admin(rights, self.deadline_s)
            self._admins.append(found)
        found.rights = rights
        return found

    def new_admin(self, rights: Rights, timeout_s: float) -> VisitorAdmin:
        """Another one, which the caller closes."""
        return VisitorAdmin(self.context.address, self.context.vouching, rights, timeout_s=timeout_s)

    def figures(self) -> Figures:
        """All figures, ``age_ms`` old at most; while another thread gathers them, the ones before.

        Raises NodeUnavailableError when there are none yet, and the other thread still waits for them.
        """
        before = self._figures
        if not self._lock.acquire(timeout=self.deadline_s if before is None else 0):
            if before is not None:
                return before
            raise NodeUnavailableError(f"the node's figures were not there within {self.deadline_s:g} s")
        try:
            now_s = time.monotonic()
            if self._figures is None or now_s - self._figures_at_s >= self.settings.age_ms / 1000:
                self._figures = self._gathering.gather()
                self._figures_at_s = time.monotonic()
                self._note_written(self._figures_at_s, self._figures.words["written"])
            return self._figures
        finally:
            self._lock.release()

    def topics(self) -> dict[str, Any]:
        """All topics by name; while another thread asks for them, as they were. Raises NodeUnavailableError."""
        if self._lock.acquire(timeout=self.deadline_s if self._topics is None else 0):
            try:
                self._topics = self._gathering.topics()
            finally:
                self._lock.release()
        if self._topics is None:
            raise self.silent("the coordinator")
        return self._topics

    def seen_topics(self, rights: Rights, topics: dict[str, Any]) -> dict[str, Any]:
        """Those of ``topics`` that a visitor may see. Answers are kept while topics and policies stay: there may be many."""
        key = rights.user or "", rights.actor.address
        known = self._seen.get(key)
        if known is None or known[0] is not rights.table or known[1] is not topics:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            seen = {name: row for name, row in topics.items() if rights.sees_topic(name)}
            known = self._seen[key] = rights.table, topics, seen
        return known[2]

    def status(self) -> dict[str, Any]:
        """The supervisor's, ``age_ms`` old at most: it measures the memory of all processes for it.

        Raises NodeUnavailableError.
        """
        if not self._status_lock.acquire(timeout=self.deadline_s):
            raise self.silent("the supervisor")
        try:
            if time.monotonic() - self._status_at_s >= self.settings.age_ms / 1000:
                if self._status_admin is None:
                    self._status_admin = Admin(self.context.address, timeout_s=self.deadline_s)
                self._status = self._status_admin.status()
                self._status_at_s = time.monotonic()
            return self._status
        finally:
            self._status_lock.release()

    def bounds(self, queues: list[tuple[str, int]]) -> list[tuple[int, int] | None]:
        """First offset and end of each queue, read from the ConsumeQueues as a reader does; None while not known."""
        topics = self.topics()
        with self._bounds_lock:
            self._lags.begin(topics)
            return [self._lags.bounds(topic, queue) for topic, queue in queues]

    def sample(self) -> None:
        """Add a sample to the histories; of what is not known there is none."""
        figures = self.figures()
        groups: dict[str, int | None] = {}
        for (name, _), lag in figures.group_lags.items():
            groups[name] = (groups.get(name) or 0) + lag.messages
        wanted = self.history.followed(topic for _, topic in figures.group_lags)
        rows = {name: int(row["read_queues"]) for name in wanted if (row := (figures.topics or {}).get(name))}
        places = [(name, queue) for name, queues in rows.items() if queues <= _MOST_QUEUES for queue in range(queues)]
        ends: dict[str, int | None] = {}
        if figures.topics is not None:
            for (name, _), bounds in zip(places, self.bounds(places), strict=True):
                before = ends.get(name, 0)
                ends[name] = None if bounds is None or before is None else before + bounds[1]
        self.history.add(figures.at_ms, figures.words["written"], ends, groups)

    def bytes_in_per_s(self) -> float | None:
        """Of the last minute; None until the dashboard has looked twice."""
        if len(self._written) < 2:
            return None
        (began_s, first), (ended_s, last) = self._written[0], self._written[-1]
        return (last - first) / (ended_s - began_s) if ended_s - began_s >= _LEAST_RATE_S else None

    def _note_written(self, at_s: float, written: int) -> None:
        self._written = [*(one for one in self._written if at_s - one[0] <= _MOST_RATE_S), (at_s, written)]

    def access(self) -> AccessTable:
        """Users and policies."""
        with self._access_lock:
            return self._access.table()

    @property
    def asks_for_login(self) -> bool:
        """Whether the node has users or keys: then nobody else may act as the node's owner."""
        return self.context.has_keys or not self.access().is_open

    def silent(self, who: str) -> NodeUnavailableError:
        """The error of a page that cannot do without ``who``."""
        return NodeUnavailableError(f"{who} did not answer within {self.deadline_s:g} s")
