"""What :class:`commitmq.Admin` answers: topics, the bounds of queues, and how far a group is behind.

A newer node may say more of a topic than is known here; that is left out. Each of these can also be read like a dictionary,
``row["lag"]``, as in former versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self


class Row(Mapping[str, Any]):
    """A dataclass whose fields can be read by their names like a dictionary's."""

    __slots__ = ()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """From the node's answer; what has no field here is left out. Raises TypeError when something is missing."""
        return cls(**{name: answer[name] for name in cls._names() if name in answer})

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return tuple(one.name for one in fields(cls))  # type: ignore[arg-type]  # each subclass is a dataclass

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


@dataclass(frozen=True, slots=True, eq=False)
class TopicInfo(Row):
    """A topic's settings. ``perm`` is RocketMQ's: 4 to read, 2 to write, 1 inherited.

    ``incarnation`` tells this topic from others of the same name, before and after it. ``system``: the node's own.
    """

    name: str
    read_queues: int
    write_queues: int
    perm: int
    attributes: dict[str, str]
    incarnation: int = 0
    system: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TopicDescription(TopicInfo):
    """A topic's settings, and the ``groups`` that have offsets in it."""

    groups: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class TopicCreated(Row):
    """``created`` is False when the ``topic`` existed with the same settings."""

    created: bool
    topic: TopicInfo


class QueueBounds(NamedTuple):
    """The offsets of a queue: ``max`` is the one the next message will get.

    ``by_time`` is the first message that was stored at the time asked for or later, None when none was asked for.
    """

    queue: int
    min: int
    max: int
    by_time: int | None


class GroupOffset(NamedTuple):
    """``offset`` is that of the next message which the group reads in this queue."""

    topic: str
    queue: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Lag(Row):
    """How far a group is behind in one queue.

    ``committed`` is None where it never committed; ``end`` is the next message's offset; ``lag`` counts messages, from the
    first one where nothing is committed; ``member`` reads the queue now, or None. ``problem`` is None, or says what is wrong:
    more is committed than the queue has, so messages to come will be skipped.
    """

    topic: str
    queue: int
    committed: int | None
    end: int
    lag: int
    member: str | None
    problem: str | None
