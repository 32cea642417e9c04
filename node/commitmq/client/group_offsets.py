"""A group's committed offsets beside the bounds of its queues: how far it is behind, and where a reset moves it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from commitmq.client.admin_results import Lag, QueueBounds
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX


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
