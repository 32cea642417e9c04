"""The settings of a share consumer and of its handlers: names, types, checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypedDict

from commitmq.client import checks
from commitmq.client.handling.backoff import Backoff, check_backoff
from commitmq.client.selector import MessageSelector, selector
from commitmq.store.metadata.topic_config import validate_group, validate_topic

_MOST_WORKERS: Final = 10_000
BACKOFF_S: Final = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's delays of a message that a POP consumer failed on (remoting 5.10)."""


class ShareOptions(TypedDict, total=False):
    """How a share consumer receives; see :class:`commitmq.ShareConsumer`."""

    invisible_s: float
    ordered: bool
    start: str
    filter: str | MessageSelector
    check_crc: bool
    timeout_s: float


class ShareRunOptions(TypedDict, total=False):
    """How messages are handed to a handler; see :meth:`commitmq.ShareConsumer.run`."""

    workers: int
    backoff: Backoff
    max_unfinished: int
    stop_timeout_s: float


class ShareSettings:
    """Checked :class:`ShareOptions`."""

    def __init__(
        self,
        topics: str | Iterable[str],
        group: str,
        *,
        invisible_s: float = 60.0,
        ordered: bool = False,
        start: str = "earliest",
        filter: str | MessageSelector = "*",
        check_crc: bool = True,
        timeout_s: float = 10.0,
    ) -> None:
        """Raises ValueError that names a wrong setting."""
        self.topics = list(dict.fromkeys([topics] if isinstance(topics, str) else topics))
        if not self.topics:
            raise ValueError("a share consumer needs at least one topic")
        for topic in self.topics:
            validate_topic(topic)
        validate_group(group)
        self.group = group
        self.invisible_s = checks.seconds("invisible_s", invisible_s)
        if not isinstance(ordered, bool):
            raise ValueError(f"ordered must be True or False, not {ordered!r}")
        self.ordered = ordered
        if start not in ("earliest", "latest"):
            raise ValueError(f"start must be earliest or latest, not {start!r}")
        self.start = start
        self.selector = selector(filter)
        self.check_crc = check_crc
        self.timeout_s = checks.seconds("timeout_s", timeout_s)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """:class:`ShareRunOptions` with the defaults."""

    workers: int = 20
    backoff: Backoff = None
    max_unfinished: int = 100
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no setting."""
        for name in ("workers", "max_unfinished"):
            if checks.integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.workers > _MOST_WORKERS:
            raise ValueError(f"workers must be at most {_MOST_WORKERS}, not {self.workers}")
        checks.seconds("stop_timeout_s", self.stop_timeout_s, zero=True)
        backoff = BACKOFF_S if self.backoff is None else self.backoff
        object.__setattr__(self, "backoff", check_backoff(backoff))
