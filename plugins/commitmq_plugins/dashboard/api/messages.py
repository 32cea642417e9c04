"""The messages of a topic, newest first or from a place on, a page of a bounded look.

A look ends with its rows, or with the first of its bounds: messages, bytes, time. It says what it looked at and where the
next look goes on. The place of a look is a text, ``0:17,1:4``: an offset for each queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from commitmq.client.admin_results import QueueBounds
from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.shown_message import MessageRow, Wanted, row_of
from commitmq_plugins.dashboard.api.values import MAX_OFFSET, BadValueError, moment, value

if TYPE_CHECKING:
    from commitmq.client.consumer import Reader
    from commitmq.client.message import Message

MOST_ROWS: Final = 200
IN_TIME: Final = attrgetter("store_timestamp", "physical_offset", "queue_offset")
"""The order of messages of several queues."""
_MOST_QUEUES: Final = 1_024
_POLL_S: Final = 0.25
_POLL_MESSAGES: Final = 2_000


@dataclass(frozen=True, slots=True)
class MessagesAsked:
    """Which messages of a topic. With ``offset`` or ``time`` from there on, else the newest."""

    topic: str = value(doc="The topic's name.", longest=255)
    queue: int | None = value(None, "Only this queue.", high=65_535)
    offset: int | None = value(None, "From this queue offset on.")
    time: str | None = value(None, "From this time on: 2026-06-01T12:00 (UTC), or milliseconds.", longest=64)
    tag: str | None = value(None, "Only messages with this tag.", longest=255)
    key: str | None = value(None, "Only messages with this key.", longest=255)
    text: str | None = value(None, "Only messages with this text in body or properties.", longest=255)
    limit: int = value(50, "Rows.", low=1, high=MOST_ROWS)
    go_on: str | None = value(None, "next of the page before.", longest=32_768)


@dataclass(frozen=True, slots=True)
class Messages:
    """A page of messages. ``looked_at`` messages of about ``total`` in the queues, stored from ``from_ms`` to ``until_ms``.

    ``next``: give it as ``go_on``, with the same other values; null when there is nothing more. ``ended_by``: rows,
    messages, bytes, time, queues (read to their ends), or the node's silence.
    """

    messages: list[MessageRow]
    looked_at: int
    total: int
    from_ms: int | None
    until_ms: int | None
    ended_by: str
    next: str | None


class Look:
    """Messages between two offsets of each queue, and the bounds of reading them."""

    def __init__(self, node: Node, topic: str, ranges: dict[int, tuple[int, int]]) -> None:
        self._node, self._topic = node, topic
        self.ends = {queue: end for queue, (begin, end) in ranges.items() if begin < end}
        self.positions = {queue: begin for queue, (begin, _) in ranges.items()}
        settings = node.settings
        self._messages, self._bytes = settings.scan_messages, settings.scan_bytes
        self._until_s = time.monotonic() + settings.scan_ms / 1000
        self.looked_at = 0
        self.times: list[int] = []
        self.ended_by = "queues"

    def __iter__(self) -> Iterator[Message]:
        """Each message, once; ``positions`` are behind it then."""
        if not self.ends:
            return
        queues = [(self._topic, queue) for queue in self.ends]
        with self._node.reader(queues) as reader:
            for queue in self.ends:
                reader.seek(self._topic, queue, self.positions[queue])
            yield from self._read(reader)

    def _read(self, reader: Reader) -> Iterator[Message]:
        size = 0
        while any(self.positions[queue] < end for queue, end in self.ends.items()):
            if reason := self._over(size):
                self.ended_by = reason
                return
            left_s = max(0.01, min(_POLL_S, self._until_s - time.monotonic()))
            batch = reader.poll(left_s, min(_POLL_MESSAGES, self._messages - self.looked_at))
            if not batch and not self._jumped(reader):
                continue
            sizes = batch.total_size.tolist()
            for index, message in enumerate(batch):
                if not self._takes(message):
                    continue
                size += sizes[index]
                yield message
                if reason := self._over(size):
                    self.ended_by = reason
                    return

    def _takes(self, message: Message) -> bool:
        queue, offset = message.queue_id, message.queue_offset
        if offset < self.positions.get(queue, 0):
            return False  # of an inner batch that begins before
        self.positions[queue] = max(self.positions[queue], min(offset + 1, self.ends[queue]))
        if offset >= self.ends[queue]:
            return False
        self.looked_at += 1
        self.times.append(message.store_timestamp)
        return True

    def _over(self, size: int) -> str:
        if self.looked_at >= self._messages:
            return "messages"
        if size >= self._bytes:
            return "bytes"
        return "time" if time.monotonic() >= self._until_s else ""

    def _jumped(self, reader: Reader) -> bool:
        """Messages expired while they were read: the reader goes on behind them."""
        for gap in reader.gaps:
            if gap.to_offset > self.positions.get(gap.queue, MAX_OFFSET):
                self.positions[gap.queue] = min(gap.to_offset, self.ends[gap.queue])
        return False


@dataclass(frozen=True, slots=True)
class _Search:
    """What is looked for, and where: the bounds of the queues, and the place of the page before, None for the first."""

    node: Node
    topic: str
    limit: int
    wanted: Wanted
    bounds: list[QueueBounds]
    place: dict[int, int] | None

    @property
    def total(self) -> int:
        return sum(one.max - one.min for one in self.bounds)


def messages(node: Node, asked: MessagesAsked) -> Messages:
    """Bounds of the topic, then one look."""
    if asked.offset is not None and asked.time is not None:
        raise BadValueError("give offset or time, not both")
    when = None if asked.time is None else moment("time", asked.time)
    bounds = bounds_of(node, asked.topic, asked.queue, when)
    wanted = Wanted(asked.tag, asked.key, asked.text)
    place = None if asked.go_on is None else place_of(asked.go_on)
    search = _Search(node, asked.topic, asked.limit, wanted, bounds, place)
    if asked.offset is None and when is None:
        return _newest(search)
    return _onwards(search, asked.offset)


def bounds_of(node: Node, topic: str, queue: int | None = None, when: datetime | None = None) -> list[QueueBounds]:
    """The queues of a look, with the offset of a time. Raises BadValueError."""
    bounds = node.admin.offsets(topic, when)
    if queue is not None:
        bounds = [one for one in bounds if one.queue == queue]
        if not bounds:
            raise BadValueError(f"topic {topic} has no queue {queue}")
    if len(bounds) > _MOST_QUEUES:
        raise BadValueError(f"topic {topic} has more than {_MOST_QUEUES} queues: name one")
    return bounds


def _onwards(search: _Search, offset: int | None) -> Messages:
    """From a place on, in the order of each queue."""
    ranges = {}
    for one in search.bounds:
        begin = one.max if one.by_time is None else one.by_time
        if offset is not None:
            begin = offset
        if search.place is not None:
            begin = search.place.get(one.queue, one.max)
        ranges[one.queue] = (min(max(begin, one.min), one.max), one.max)
    look = Look(search.node, search.topic, ranges)
    found: list[Message] = []
    for message in look:
        if search.wanted.fits(message):
            found.append(message)
            if len(found) == search.limit:
                look.ended_by = "rows"
                break
    left = {queue: at for queue, at in look.positions.items() if at < ranges[queue][1]}
    found.sort(key=IN_TIME)
    return _page(look, [row_of(one) for one in found], search.total, left)


def _newest(search: _Search) -> Messages:
    """The newest first: the last messages of each queue, as many as the page can need or the bound allows."""
    bounds, limit, place = search.bounds, search.limit, search.place
    share = max(1, search.node.settings.scan_messages // max(1, len(bounds)))
    window = share if search.wanted.is_filter else min(limit, share)
    ranges = {}
    for one in bounds:
        end = one.max if place is None else min(one.max, place.get(one.queue, one.min))
        ranges[one.queue] = (max(one.min, end - window), max(one.min, end))
    look = Look(search.node, search.topic, ranges)
    found = [message for message in look if search.wanted.fits(message)]
    found.sort(key=IN_TIME, reverse=True)
    kept, rest = found[:limit], found[limit:]
    left = {queue: begin for queue, (begin, _) in ranges.items()}
    if look.ended_by == "queues":
        for message in rest:
            left[message.queue_id] = max(left[message.queue_id], message.queue_offset + 1)
        if rest:
            look.ended_by = "rows"
    begins = {one.queue: one.min for one in bounds}
    rows = [row_of(one) for one in kept]
    return _page(look, rows, search.total, {queue: at for queue, at in left.items() if at > begins[queue]})


def _page(look: Look, rows: list[MessageRow], total: int, left: dict[int, int]) -> Messages:
    times = look.times
    return Messages(
        rows,
        look.looked_at,
        total,
        min(times) if times else None,
        max(times) if times else None,
        look.ended_by,
        text_of(left) or None,
    )


def text_of(place: dict[int, int]) -> str:
    """A place as a text."""
    return ",".join(f"{queue}:{offset}" for queue, offset in sorted(place.items()))


def place_of(text: str) -> dict[int, int]:
    """Raises BadValueError."""
    found: dict[int, int] = {}
    for part in text.split(","):
        queue, _, offset = part.partition(":")
        if not (queue.isascii() and queue.isdecimal() and offset.isascii() and offset.isdecimal() and len(part) < 30):
            raise BadValueError(f"go_on is next of the page before, not {text!r:.100}")
        found[int(queue)] = int(offset)
    return found
