"""The results of :class:`commitmq.Admin`: topics, the bounds of queues, and the lag of a group.

A newer node may send more fields of a topic; the client leaves them out. A program can also read a result like a dictionary,
``row["lag"]``, as in former versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self


class Row(Mapping[str, Any]):
    """A dataclass whose fields a program can also read by name, as in a dictionary."""

    __slots__ = ()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """From the node's answer, without the fields that this class lacks. Raises TypeError when a field is missing."""
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
    """The settings of a topic. ``perm`` is RocketMQ's sum: 4 to read, 2 to write, 1 inherited.

    ``incarnation`` tells this topic from earlier and later topics of the same name. ``system``: the topic is the node's own.
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
    """The settings of a topic, and the ``groups`` with offsets in it."""

    groups: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class TopicCreated(Row):
    """``created`` is False if the ``topic`` existed already, with the same settings."""

    created: bool
    topic: TopicInfo


class QueueBounds(NamedTuple):
    """The bounds of a queue: ``min`` is the offset of its first message, ``max`` the offset that the next message will get.

    ``by_time`` is the offset of the first message that was stored at the given time or later; None without a time.
    """

    queue: int
    min: int
    max: int
    by_time: int | None


class GroupOffset(NamedTuple):
    """The committed offset of a group in one queue: the offset of the next message that the group reads."""

    topic: str
    queue: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Lag(Row):
    """How far a group is behind in one queue.

    ``committed`` is None if the group never committed an offset. ``end`` is the offset of the next message. ``lag`` is a
    number of messages; without a committed offset it counts from the first message. ``member`` is the member that reads the
    queue now, or None. ``problem`` is None, or it says that the committed offset is behind the end, so the group will skip
    new messages.
    """

    topic: str
    queue: int
    committed: int | None
    end: int
    lag: int
    member: str | None
    problem: str | None
