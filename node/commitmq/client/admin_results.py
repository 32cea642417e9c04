"""The results of :class:`commitmq.Admin`: topics, the bounds of queues, clients, and a group's committed offsets beside the
bounds of its queues: how far it is behind, and where a reset moves it.

A newer node may send more fields of a topic; the client leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, NamedTuple, Self

from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX


class Row:
    """A dataclass that is made from an answer of the node."""

    __slots__ = ()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """From the node's answer, without the fields that this class lacks. Raises TypeError when a field is missing."""
        names = (one.name for one in fields(cls))  # type: ignore[arg-type]  # each subclass is a dataclass
        return cls(**{name: answer[name] for name in names if name in answer})


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class TopicDescription(TopicInfo):
    """The settings of a topic, and the ``groups`` with offsets in it."""

    groups: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class ClientInfo(Row):
    """A client that is connected, or a member of a group that speaks the node's own protocol.

    ``gateway`` is ``native`` for the latter, whose ``id`` is the member's name, else the server that the client is connected
    to, as ``rocketmq``. ``user`` and ``address`` are empty where they are not known; a member on the node's own host has
    ``process PID`` as its address. ``consumes`` and ``produces`` are names of groups, ``topics`` those that are subscribed to;
    ``left_out`` counts names of these lists that were not kept. ``queues`` is None where the node does not know it.
    ``heard_ms_ago``: since the last heartbeat.
    """

    id: str
    gateway: str
    address: str
    user: str
    language: str
    version: str
    consumes: list[str]
    produces: list[str]
    topics: list[str]
    left_out: int
    queues: int | None
    heard_ms_ago: int


@dataclass(frozen=True, slots=True)
class ConnectedClients:
    """``complete`` is False when the node did not keep all clients, or not all names of the groups and topics asked for."""

    clients: list[ClientInfo]
    complete: bool


def hidden_lag(lag: Lag, read_queues: int) -> Lag:
    """``lag`` of a queue that lies beyond the ``read_queues`` of its topic."""
    return replace(lag, problem=f"nobody reads this queue, because the topic has {read_queues} read queues")


def lag_of(topic: str, bounds: QueueBounds, committed: int | None, member: str | None) -> Lag:
    """How far a group is behind in one queue, in which ``committed`` is its offset."""
    # No consumer can read an expired message any more, so it is no lag.
    reached = max(bounds.min, committed or 0)
    is_beyond = committed is not None and committed > bounds.max
    return Lag(
        topic=topic,
        queue=bounds.queue,
        committed=committed,
        end=bounds.max,
        lag=max(bounds.max - reached, 0),
        member=member,
        problem=f"offset {committed} is committed, and the queue ends at {bounds.max}: reset the group's offset"
        if is_beyond
        else None,
    )


def is_of_failures(topic: str) -> bool:
    """Whether a topic has a group's retries or dead letters, which a reset of the whole group leaves alone."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


def check_target(to: str | int | datetime) -> None:
    """Raise ValueError unless a group's offset can be moved to ``to``."""
    if isinstance(to, str) and to not in ("earliest", "latest"):
        raise ValueError(f"to must be 'earliest', 'latest', a datetime or an offset, not {to!r}")


def reset_targets(
    topic: str, bounds: Iterable[QueueBounds], to: str | int | datetime, queues: Iterable[int] | None
) -> list[tuple[str, int, int]]:
    """``(topic, queue, offset)`` for ``queues`` of a topic (None: for all). Raises ValueError for a queue that it lacks."""
    wanted = None if queues is None else set(queues)
    targets = [(topic, one.queue, _target(one, to)) for one in bounds if wanted is None or one.queue in wanted]
    if wanted is not None and len(targets) != len(wanted):
        raise ValueError(f"topic {topic!r} does not have all of the queues {sorted(wanted)}")
    return targets


def _target(bounds: QueueBounds, to: str | int | datetime) -> int:
    if isinstance(to, datetime):
        return bounds.min if bounds.by_time is None else bounds.by_time
    if isinstance(to, int):
        return min(max(to, bounds.min), bounds.max)
    return bounds.min if to == "earliest" else bounds.max
