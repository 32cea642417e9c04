"""The settings of a consumer and of a reader: their names and types, and their checks; and the callbacks of a consumer.

``on_assign`` and ``on_revoke`` tell a program which queues it gets and loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypedDict

from commitmq.client import checks
from commitmq.client.receiving.assignment import Assignment, Queue, QueueState, Start, check_start
from commitmq.client.receiving.position_file import check_member
from commitmq.client.selector import MessageSelector, selector
from commitmq.format.constants import RETRY_PREFIX
from commitmq.store.metadata.topic_config import validate_group, validate_topic

_MODES: Final = ("auto", "ranges", "bytes")


class ReadOptions(TypedDict, total=False):
    """How a consumer or a reader reads; see :class:`commitmq.Consumer`."""

    start: Start
    filter: str | MessageSelector
    mode: str
    max_pull_bytes: int
    check_crc: bool
    timeout_s: float


class GroupOptions(ReadOptions, total=False):
    """How a member of a group reads; see :class:`commitmq.Consumer`."""

    auto_commit: bool
    auto_commit_interval_s: float
    session_timeout_ms: int | None
    rebalance_timeout_s: float
    max_poll_interval_s: float | None
    member: str | None
    strategy: str | None
    broadcasting: bool
    positions_folder: str | Path | None


class ConsumerSettings:
    """Checked settings. ``group`` is None for a reader, ``queues`` is None unless a reader was given queues."""

    def __init__(
        self,
        topics: str | Iterable[str],
        *,
        group: str | None,
        queues: Iterable[Queue] | None = None,
        start: Start = "earliest",
        filter: str | MessageSelector = "*",
        auto_commit: bool = True,
        auto_commit_interval_s: float = 1.0,
        mode: str = "auto",
        max_pull_bytes: int = 2 * 1024 * 1024,
        check_crc: bool = True,
        session_timeout_ms: int | None = None,
        rebalance_timeout_s: float = 10.0,
        max_poll_interval_s: float | None = 300.0,
        timeout_s: float = 10.0,
        member: str | None = None,
        strategy: str | None = None,
        broadcasting: bool = False,
        positions_folder: str | Path | None = None,
    ) -> None:
        """Raises ValueError that names a wrong setting."""
        self.topics = list(dict.fromkeys([topics] if isinstance(topics, str) else topics))
        self.queues = _distinct(queues)
        self.group = group
        self._check_names()
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
        self.mode = mode
        if checks.integer("max_pull_bytes", max_pull_bytes) < 1:
            raise ValueError(f"max_pull_bytes must be at least 1, not {max_pull_bytes}")
        self.max_pull_bytes = max_pull_bytes
        self.check_crc = check_crc
        self.start = check_start(start)
        self.selector = selector(filter)
        self.auto_commit = auto_commit and group is not None
        self.auto_commit_interval_s = checks.seconds("auto_commit_interval_s", auto_commit_interval_s, zero=True)
        self.session_timeout_ms = session_timeout_ms
        self.rebalance_timeout_s = checks.seconds("rebalance_timeout_s", rebalance_timeout_s, zero=True)
        self.max_poll_interval_s = (
            None if max_poll_interval_s is None else checks.seconds("max_poll_interval_s", max_poll_interval_s)
        )
        self.timeout_s = checks.seconds("timeout_s", timeout_s)
        self.member = member
        self.strategy = strategy
        self.broadcasting = broadcasting
        self.positions_folder = positions_folder
        if positions_folder is not None and not broadcasting:
            raise ValueError(
                "positions_folder is for a consumer with broadcasting=True: else the node keeps the offsets"
            )
        if broadcasting and member is not None:
            check_member(member)

    @property
    def unfiltered_topic(self) -> str | None:
        """The group's own retry topic, which is read without the filter, as in RocketMQ."""
        return None if self.group is None else RETRY_PREFIX + self.group

    def _check_names(self) -> None:
        if self.group is not None and self.queues is not None:
            raise ValueError("a group assigns the queues by itself; give queues only without a group")
        if not self.topics and not self.queues:
            raise ValueError("a consumer needs at least one topic")
        for topic in [*self.topics, *(topic for topic, _ in self.queues or ())]:
            validate_topic(topic)
        if self.group is not None:
            validate_group(self.group)


def _distinct(queues: Iterable[Queue] | None) -> list[Queue] | None:
    if queues is None:
        return None
    return list(dict.fromkeys((topic, checks.integer("a queue", queue)) for topic, queue in queues))


RebalanceCallback = Callable[[list[Queue]], object]
"""``on_assign`` and ``on_revoke``: called with queues, sorted."""


class QueueCallbacks:
    """Calls the two callbacks, in the thread that polls or closes.

    If a callback raises, the next poll calls it again with the same queues.
    """

    def __init__(self, on_assign: RebalanceCallback | None, on_revoke: RebalanceCallback | None) -> None:
        """Raises ValueError for a callback that cannot be called."""
        checks.callback("on_assign", on_assign)
        checks.callback("on_revoke", on_revoke)
        self.on_assign = on_assign
        self.on_revoke = on_revoke

    def tell_changes(self, assignment: Assignment) -> None:
        """Tell which queues were lost and which are new since the last call."""
        with assignment.lock:
            lost = sorted(assignment.lost)
            new = [state for state in assignment.owned.values() if not state.is_announced and not state.revoked_at]
        if lost:
            if self.on_revoke is not None:
                self.on_revoke(lost)
            with assignment.lock:
                assignment.lost = [key for key in assignment.lost if key not in lost]
        if new:
            if self.on_assign is not None:
                self.on_assign(sorted(state.key for state in new))
            for state in new:
                state.is_announced = True

    def tell_revoked(self, states: Iterable[QueueState]) -> None:
        """Tell that these queues are about to be returned."""
        announced = [state for state in states if state.is_announced]
        if not announced:
            return
        if self.on_revoke is not None:
            self.on_revoke(sorted(state.key for state in announced))
        for state in announced:
            state.is_announced = False
