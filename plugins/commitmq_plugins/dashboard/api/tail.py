"""A topic's newest messages, again and again: each look goes on where the one before has begun, and marks what is new since.

The page has no script. It asks the browser to load the next look, whose address has two places: ``go_on``, where the shown
messages begin, and ``seen``, where the look before has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commitmq_plugins.dashboard.api.messages import IN_TIME, Look, bounds_of, place_of, text_of
from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.shown_message import MessageRow, Wanted, row_of
from commitmq_plugins.dashboard.api.values import value

if TYPE_CHECKING:
    from commitmq.client.message import Message

_MOST_ROWS: Final = 100
_LONGEST: Final = 6_000  # of an address: a head of a request has 16 KiB


@dataclass(frozen=True, slots=True)
class TailAsked:
    """Of which topic, and from where on. Without ``go_on`` from the newest messages on."""

    topic: str = value(doc="The topic's name.", longest=255)
    queue: int | None = value(None, "Only this queue.", high=65_535)
    tag: str | None = value(None, "Only messages with this tag.", longest=255)
    limit: int = value(20, "Rows.", low=1, high=_MOST_ROWS)
    every: int = value(5, "Seconds until the page loads the next look; 0 for never.", high=3_600)
    go_on: str | None = value(None, "next of the look before.", longest=_LONGEST)
    seen: str | None = value(None, "seen of the look before.", longest=_LONGEST)


@dataclass(frozen=True, slots=True)
class TailRow:
    """A message; ``is_new``: the look before did not have it."""

    message: MessageRow
    is_new: bool


@dataclass(frozen=True, slots=True)
class Tail:
    """The newest messages, the newest first. ``complete``: false when the look ended at a bound, and goes on there."""

    messages: list[TailRow]
    new: int
    every: int
    looked_at: int
    complete: bool
    next: str
    seen: str


def tail(node: Node, asked: TailAsked) -> Tail:
    """Bounds of the topic, then one look."""
    bounds = bounds_of(node, asked.topic, asked.queue)
    place = {} if asked.go_on is None else place_of(asked.go_on)
    seen = {} if asked.seen is None else place_of(asked.seen)
    ranges = {}
    for one in bounds:
        begin = place.get(one.queue, one.max - asked.limit)
        ranges[one.queue] = (min(max(begin, one.min), one.max), one.max)
    look = Look(node, asked.topic, ranges)
    wanted = Wanted(tag=asked.tag)
    found: list[Message] = [message for message in look if wanted.fits(message)]
    found.sort(key=IN_TIME, reverse=True)
    kept = found[: asked.limit]
    # The next look begins with the oldest message that is still shown of each queue.
    positions = {one.queue: look.positions[one.queue] for one in bounds}
    following = dict(positions)
    for message in kept:
        following[message.queue_id] = min(following[message.queue_id], message.queue_offset)
    rows = [TailRow(row_of(one), one.queue_offset >= seen.get(one.queue_id, 0) and bool(seen)) for one in kept]
    return Tail(
        rows,
        sum(row.is_new for row in rows),
        asked.every,
        look.looked_at,
        look.ended_by == "queues",
        text_of(following),
        text_of(positions),
    )
