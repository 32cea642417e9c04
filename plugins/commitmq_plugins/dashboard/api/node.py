"""The node as one visitor sees it: what he may not see is not there, and what he may not ask for is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from commitmq.client.consumer import Reader
from commitmq.client.producer import Producer
from commitmq.errors import NodeUnavailableError
from commitmq.plugin import WorkerContext
from commitmq.security.access_table import AccessTable
from commitmq_plugins.dashboard.api.rights import ONLY_SUPER, Rights
from commitmq_plugins.dashboard.api.shared import Shared
from commitmq_plugins.dashboard.api.visitor_admin import VisitorAdmin
from commitmq_plugins.dashboard.history import History
from commitmq_plugins.dashboard.settings import DashboardSettings
from commitmq_plugins.metrics.figures import Figures
from commitmq_plugins.metrics.health import Health


class Node:
    """Made for each request of a visitor."""

    def __init__(self, shared: Shared, rights: Rights) -> None:
        self._shared, self.rights = shared, rights

    @property
    def context(self) -> WorkerContext:
        return self._shared.context

    @property
    def settings(self) -> DashboardSettings:
        return self._shared.settings

    @property
    def deadline_s(self) -> float:
        return self._shared.deadline_s

    @property
    def health(self) -> Health:
        return self._shared.health

    @property
    def history(self) -> History:
        return self._shared.history

    @property
    def admin(self) -> VisitorAdmin:
        """The calling thread's. Each of its requests ends after the deadline, with NodeUnavailableError."""
        return self._shared.admin(self.rights)

    def new_admin(self, timeout_s: float) -> VisitorAdmin:
        """One with another deadline; the caller closes it."""
        return self._shared.new_admin(self.rights, timeout_s)

    @contextlib.contextmanager
    def reader(self, queues: list[tuple[str, int]]) -> Iterator[Reader]:
        """A reader without a group: nothing of it stays in the node. Raises NotAllowedError."""
        for topic in {topic for topic, _ in queues}:
            self.rights.check("reader", "pull", {"topic": topic})
        options: Any = {"mode": "bytes", "start": "latest", "timeout_s": self.deadline_s, "max_pull_bytes": 1 << 20}
        with Reader(queues=queues, node=self.context.address, **options) as found:
            yield found

    @contextlib.contextmanager
    def producer(self, topic: str) -> Iterator[Producer]:
        """A producer for one message to ``topic``. Raises NotAllowedError."""
        self.rights.check("writer", "send", {"topic": topic})
        with Producer(self.context.address, timeout_s=self.deadline_s) as found:
            yield found

    def figures(self) -> Figures:
        """The shared figures, with the topics and groups that the visitor may see. Raises NodeUnavailableError."""
        found, rights = self._shared.figures(), self.rights
        if rights.everything:
            return found
        topics, groups = found.topics, found.groups
        return replace(
            found,
            topics=None if topics is None else self._shared.seen_topics(rights, topics),
            groups=None if groups is None else {name: row for name, row in groups.items() if rights.sees_group(name)},
        )

    def topics(self) -> dict[str, Any]:
        """The topics that the visitor may see, by name. Raises NodeUnavailableError."""
        found = self._shared.topics()
        return found if self.rights.everything else self._shared.seen_topics(self.rights, found)

    def status(self) -> dict[str, Any]:
        """The supervisor's, ``age_ms`` old at most. Raises NodeUnavailableError, NotAllowedError."""
        self.rights.check("admin", "status", {})
        return self._shared.status()

    def bounds(self, queues: list[tuple[str, int]]) -> list[tuple[int, int] | None]:
        """First offset and end of each queue; None while not known, and for topics that the visitor may not read."""
        rights = self.rights
        if rights.everything:
            return self._shared.bounds(queues)
        readable = {topic for topic in {topic for topic, _ in queues} if rights.reads_topic(topic)}
        known = iter(self._shared.bounds([one for one in queues if one[0] in readable]))
        return [next(known) if topic in readable else None for topic, _ in queues]

    def bytes_in_per_s(self) -> float | None:
        """Of the last minute; None until the dashboard has looked twice."""
        return self._shared.bytes_in_per_s()

    def access(self) -> AccessTable:
        """Users and policies, for super users. Raises NotAllowedError."""
        self.check_super()
        return self._shared.access()

    def check_super(self) -> None:
        """Raises NotAllowedError for a visitor who may not do everything."""
        self.rights.check(*ONLY_SUPER, {})

    def silent(self, who: str) -> NodeUnavailableError:
        """The error of a page that cannot do without ``who``."""
        return self._shared.silent(who)
