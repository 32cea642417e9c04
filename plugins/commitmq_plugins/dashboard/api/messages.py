"""Messages: of a topic, by id and by keys, their story, and a test message.

The messages of a topic come newest first or from a place on, a page of a bounded look. A look ends with its rows, or
with the first of its bounds: messages, bytes, time. It says what it looked at and where the next look continues. The
place of a look is a text, ``0:17,1:4``: an offset for each queue. Bodies and properties are text, never markup. The
story of a message is made from the records that clients wrote into the trace topic.

A tail shows a topic's newest messages, again and again: each look continues where the one before has begun, and marks
what is new since. The page has no script. It asks the browser to load the next look, whose address has two places:
``go_on``, where the shown messages begin, and ``seen``, where the look before has ended.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from commitmq.client.admin_results import QueueBounds
from commitmq.errors import InvalidMessageError, ProtocolError, TopicNotFoundError
from commitmq.semantics.trace import TRACE_TOPIC, decode_trace
from commitmq_plugins.dashboard.api.node import MAX_OFFSET, BadValueError, VisitorNode, command, moment, value
from commitmq_plugins.dashboard.guard import NotAllowedError

if TYPE_CHECKING:
    from commitmq.client.consumer import Reader
    from commitmq.client.message import Message
    from commitmq.semantics.trace import TraceRecord


PREVIEW_BYTES: Final = 200
BODY_BYTES: Final = 64 * 1024
_HEX_BYTES: Final = 4 * 1024
_PRETTY_BYTES: Final = 4 * BODY_BYTES
_MOST_KEYS: Final = 20
_KEY_LENGTH: Final = 200


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list. ``preview`` is the beginning of its body; ``is_text`` false when that is hexadecimal."""

    topic: str
    queue: int
    offset: int
    message_id: str | None
    unique_id: str | None
    tag: str | None
    keys: list[str]
    store_ms: int
    born_ms: int
    size: int
    preview: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class WholeMessage:
    """All of a message; 64 KiB of its body. ``body_form``: json, text or hex. ``damage``: why it has none."""

    row: MessageRow
    physical_offset: int
    sys_flag: int
    flag: int
    reconsume_times: int
    origin_topic: str
    properties: dict[str, str]
    body: str
    body_form: str
    body_bytes: int
    body_is_cut: bool
    damage: str | None


@dataclass(frozen=True, slots=True)
class SearchFilter:
    """A filter: what is None does not count."""

    tag: str | None = None
    key: str | None = None
    text: str | None = None

    @property
    def is_filter(self) -> bool:
        return bool(self.tag or self.key or self.text)

    def fits(self, message: Message) -> bool:
        if self.tag and message.tags != self.tag:
            return False
        if self.key and self.key not in message.keys:
            return False
        if not self.text:
            return True
        return self.text.encode() in body_of(message) or any(
            self.text in one for pair in message.properties.items() for one in pair
        )


def body_of(message: Message) -> bytes:
    """The decoded body; the stored bytes of one that cannot be decoded."""
    return message.raw_body if message.damage is not None else message.body


def row_of(message: Message) -> MessageRow:
    body = body_of(message)
    text = _text(body, PREVIEW_BYTES)
    return MessageRow(
        message.topic,
        message.queue_id,
        message.queue_offset,
        message.msg_id,
        message.unique_id,
        message.tags,
        [one[:_KEY_LENGTH] for one in message.keys[:_MOST_KEYS]],
        message.store_timestamp,
        message.born_timestamp,
        len(body),
        body[:PREVIEW_BYTES].hex(" ") if text is None else text,
        text is not None,
    )


def whole(message: Message) -> WholeMessage:
    body = body_of(message)
    shown, form = _shown(body)
    return WholeMessage(
        row_of(message),
        message.physical_offset,
        message.sys_flag,
        message.flag,
        message.reconsume_times,
        message.origin_topic,
        message.properties,
        shown,
        form,
        len(body),
        len(body) > (_HEX_BYTES if form == "hex" else BODY_BYTES),
        message.damage,
    )


def _shown(body: bytes) -> tuple[str, str]:
    text = _text(body, BODY_BYTES)
    if text is None:
        return body[:_HEX_BYTES].hex(" "), "hex"
    if len(body) <= BODY_BYTES and text[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            return _pretty(json.loads(text)), "json"
    return text, "text"


def _pretty(value: object) -> str:
    """Indented JSON. Raises ValueError when that is far longer: deep nesting makes a short body a huge page."""
    parts, size = [], 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        parts.append(part)
        size += len(part)
        if size > _PRETTY_BYTES:
            raise ValueError("too long")
    return "".join(parts)


def _text(body: bytes, most: int) -> str | None:
    """The first ``most`` bytes as UTF-8, without a character that is cut there; None for other bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(body[:most], final=len(body) <= most)
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to send. Its topic must exist."""

    topic: str = value(doc="The topic's name.", longest=255)
    body: str = value(doc="The body, as text.", longest=65_536)
    tag: str | None = value(None, "Its tag.", longest=255)
    keys: str | None = value(None, "Its keys, with spaces between.", longest=1_024)


@dataclass(frozen=True, slots=True)
class Sent:
    """Where the message is."""

    topic: str
    queue: int
    offset: int
    message_id: str | None
    unique_id: str | None
    command: str


def send_message(node: VisitorNode, asked: NewMessage) -> Sent:
    """One send by a producer of its own. Raises SendError, InvalidMessageError."""
    node.admin.topic(asked.topic)  # a mistyped name creates no topic
    keys = (asked.keys or "").split() or None
    with node.producer(asked.topic) as producer:
        result = producer.send(asked.topic, asked.body.encode(), tags=asked.tag, keys=keys)
    options = [*(["--tags", asked.tag] if asked.tag else []), *(["--keys", " ".join(keys)] if keys else [])]
    line = command("produce", asked.topic, *options)
    return Sent(
        asked.topic,
        result.queue,
        result.queue_offset,
        result.msg_id,
        result.unique_id,
        f"printf '%s\\n' BODY | {line}",
    )


_MOST_MESSAGES: Final = 200
_MOST_ROWS: Final = 500
_OFFSET_ID_DIGITS: Final = (32, 56)
_DETAILS: Final = {
    "Pub": ("topic", "tags", "keys", "offset_message_id", "store_host"),
    "SubBefore": ("retry_times",),
    "EndTransaction": ("state", "topic", "from_check"),
    "Recall": ("topic",),
}


@dataclass(frozen=True, slots=True)
class TraceQuery:
    """One message: by the unique id that its producer gave, or by its offset message id."""

    id: str = value(doc="Its unique id, or its offset message id.", longest=255)
    topic: str | None = value(None, "Its topic, which the visitor must be allowed to read.", longest=255)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A record. ``outcome``: done, failed, or what a handler said; null where the kind has none."""

    time_ms: int | None
    record: str
    group: str | None
    cost_ms: int | None
    outcome: str | None
    details: dict[str, str]


@dataclass(frozen=True, slots=True)
class Trace:
    """The records by their times; none when clients write no traces. ``complete``: nothing is missing."""

    id: str
    records: list[TraceRow]
    complete: bool
    unreadable: int
    command: str


def trace(node: VisitorNode, asked: TraceQuery) -> Trace:
    """A query of the index, and a look-up where the id is a place."""
    if asked.topic is not None:
        node.rights.check("reader", "pull", {"topic": asked.topic})
    unique, records, unreadable, complete = _unique_id(node, asked.id), [], 0, True
    try:
        found = node.admin.query(TRACE_TOPIC, key=unique, max_messages=_MOST_MESSAGES, wait_s=0.2)
    except TopicNotFoundError:
        found = None
    for message in found or ():
        try:
            records += [one for one in decode_trace(message.body) if one.message_id == unique]
        except InvalidMessageError:
            unreadable += 1
    if found is not None:
        complete = found.complete and found.next is None and len(records) <= _MOST_ROWS
    rows = sorted(map(_row, records), key=lambda row: row.time_ms or 0)[:_MOST_ROWS]
    return Trace(unique, rows, complete, unreadable, command("trace", unique))


def _unique_id(node: VisitorNode, text: str) -> str:
    """The unique id of the message with this offset message id; another id as it is. Both may have 32 digits."""
    if len(text) not in _OFFSET_ID_DIGITS:
        return text
    try:
        return node.admin.message(text).unique_id or text
    except NotAllowedError:
        raise
    except (ProtocolError, ValueError):
        return text


def _row(one: TraceRecord) -> TraceRow:
    success = getattr(one, "success", None)
    outcome = None if success is None else "done" if success else "failed"
    if one.kind == "SubAfter" and not success:
        outcome = str(getattr(one, "result").name).lower()  # noqa: B009
    names = _DETAILS.get(one.kind, ())
    details = {name: str(found) for name in names if (found := getattr(one, name, None)) not in (None, "")}
    when = int(getattr(one, "timestamp", 0)) or None
    return TraceRow(when, one.kind, one.group or None, getattr(one, "cost_ms", None), outcome, details)


MOST_ROWS: Final = 200
IN_TIME: Final = attrgetter("store_timestamp", "physical_offset", "queue_offset")
"""The order of messages of several queues."""
_MOST_QUEUES: Final = 1_024
_POLL_S: Final = 0.25
_POLL_MESSAGES: Final = 2_000


@dataclass(frozen=True, slots=True)
class MessagesQuery:
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


class MessageScan:
    """Messages between two offsets of each queue, and the bounds of reading them."""

    def __init__(self, node: VisitorNode, topic: str, ranges: dict[int, tuple[int, int]]) -> None:
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
        """Messages expired while they were read: the reader continues behind them."""
        for gap in reader.gaps:
            if gap.to_offset > self.positions.get(gap.queue, MAX_OFFSET):
                self.positions[gap.queue] = min(gap.to_offset, self.ends[gap.queue])
        return False


@dataclass(frozen=True, slots=True)
class _MessageSearch:
    """What is looked for, and where: the bounds of the queues, and the place of the page before, None for the first."""

    node: VisitorNode
    topic: str
    limit: int
    wanted: SearchFilter
    bounds: list[QueueBounds]
    place: dict[int, int] | None

    @property
    def total(self) -> int:
        return sum(one.max - one.min for one in self.bounds)


def messages(node: VisitorNode, asked: MessagesQuery) -> Messages:
    """Bounds of the topic, then one look."""
    if asked.offset is not None and asked.time is not None:
        raise BadValueError("give offset or time, not both")
    when = None if asked.time is None else moment("time", asked.time)
    bounds = bounds_of(node, asked.topic, asked.queue, when)
    wanted = SearchFilter(asked.tag, asked.key, asked.text)
    place = None if asked.go_on is None else place_of(asked.go_on)
    search = _MessageSearch(node, asked.topic, asked.limit, wanted, bounds, place)
    if asked.offset is None and when is None:
        return _newest(search)
    return _onwards(search, asked.offset)


def bounds_of(
    node: VisitorNode, topic: str, queue: int | None = None, when: datetime | None = None
) -> list[QueueBounds]:
    """The queues of a look, with the offset of a time. Raises BadValueError."""
    bounds = node.admin.offsets(topic, when)
    if queue is not None:
        bounds = [one for one in bounds if one.queue == queue]
        if not bounds:
            raise BadValueError(f"topic {topic} has no queue {queue}")
    if len(bounds) > _MOST_QUEUES:
        raise BadValueError(f"topic {topic} has more than {_MOST_QUEUES} queues: name one")
    return bounds


def _onwards(search: _MessageSearch, offset: int | None) -> Messages:
    """From a place on, in the order of each queue."""
    ranges = {}
    for one in search.bounds:
        begin = one.max if one.by_time is None else one.by_time
        if offset is not None:
            begin = offset
        if search.place is not None:
            begin = search.place.get(one.queue, one.max)
        ranges[one.queue] = (min(max(begin, one.min), one.max), one.max)
    look = MessageScan(search.node, search.topic, ranges)
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


def _newest(search: _MessageSearch) -> Messages:
    """The newest first: the last messages of each queue, as many as the page can need or the bound allows."""
    bounds, limit, place = search.bounds, search.limit, search.place
    share = max(1, search.node.settings.scan_messages // max(1, len(bounds)))
    window = share if search.wanted.is_filter else min(limit, share)
    ranges = {}
    for one in bounds:
        end = one.max if place is None else min(one.max, place.get(one.queue, one.min))
        ranges[one.queue] = (max(one.min, end - window), max(one.min, end))
    look = MessageScan(search.node, search.topic, ranges)
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


def _page(look: MessageScan, rows: list[MessageRow], total: int, left: dict[int, int]) -> Messages:
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


_MOST_TAIL_ROWS: Final = 100
_LONGEST: Final = 6_000  # of an address: a head of a request has 16 KiB


@dataclass(frozen=True, slots=True)
class TailQuery:
    """Of which topic, and from where on. Without ``go_on`` from the newest messages on."""

    topic: str = value(doc="The topic's name.", longest=255)
    queue: int | None = value(None, "Only this queue.", high=65_535)
    tag: str | None = value(None, "Only messages with this tag.", longest=255)
    limit: int = value(20, "Rows.", low=1, high=_MOST_TAIL_ROWS)
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
    """The newest messages, the newest first. ``complete``: false when the look ended at a bound, and continues there."""

    messages: list[TailRow]
    new: int
    every: int
    looked_at: int
    complete: bool
    next: str
    seen: str


def tail(node: VisitorNode, asked: TailQuery) -> Tail:
    """Bounds of the topic, then one look."""
    bounds = bounds_of(node, asked.topic, asked.queue)
    place = {} if asked.go_on is None else place_of(asked.go_on)
    seen = {} if asked.seen is None else place_of(asked.seen)
    ranges = {}
    for one in bounds:
        begin = place.get(one.queue, one.max - asked.limit)
        ranges[one.queue] = (min(max(begin, one.min), one.max), one.max)
    look = MessageScan(node, asked.topic, ranges)
    wanted = SearchFilter(tag=asked.tag)
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


_MOST: Final = 200
_MOST_GROUPS: Final = 50


class NotThereError(ProtocolError):
    """There is no such message."""

    def __init__(self, text: str) -> None:
        super().__init__("INVALID_PARAMETER", text)


@dataclass(frozen=True, slots=True)
class MessageQuery:
    """One message: by its offset message id, or with ``topic`` by the unique id that its producer gave."""

    id: str = value(doc="The offset message id, or with topic the unique id.", longest=255)
    topic: str | None = value(None, "The topic, for a unique id and for messages of memory topics.", longest=255)


@dataclass(frozen=True, slots=True)
class GroupState:
    """Where a group is: it has committed behind the message (``passed``), or not yet; null when it never committed there."""

    group: str
    passed: bool | None
    committed: int | None


@dataclass(frozen=True, slots=True)
class MessagePage:
    """A message, and the groups of its topic. ``others``: messages with the same unique id, copies perhaps."""

    message: WholeMessage
    groups: list[GroupState]
    others: list[MessageRow]


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """Messages of a topic with a key, the newest; or with ``id`` one message."""

    topic: str | None = value(None, "The topic's name.", longest=255)
    key: str | None = value(None, "One of the message's keys.", longest=255)
    id: str | None = value(None, "An offset message id, or with topic a unique id.", longest=255)
    begin: str | None = value(None, "Stored at this time or later.", longest=64)
    end: str | None = value(None, "Stored at this time or earlier.", longest=64)
    limit: int = value(64, "Rows.", low=1, high=_MOST)
    go_on: str | None = value(None, "next of the page before.", longest=1_024)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found. ``complete``: nothing is missing in what was looked at; ``next`` continues behind it."""

    messages: list[MessageRow]
    complete: bool
    next: str | None


def message(node: VisitorNode, asked: MessageQuery) -> MessagePage:
    """The message by its id, the offsets of 50 groups, and copies."""
    found, others = _found(node, asked)
    return MessagePage(whole(found), _groups(node, found), [row_of(one) for one in others])


def body(node: VisitorNode, asked: MessageQuery) -> bytes:
    return body_of(_found(node, asked)[0])


def _found(node: VisitorNode, asked: MessageQuery) -> tuple[Message, list[Message]]:
    if _is_offset_id(asked.id):
        try:
            if asked.topic is None:
                return node.admin.message(asked.id), []
            return node.admin.view(asked.id, asked.topic), []
        except (TopicNotFoundError, NotAllowedError):
            raise
        except ProtocolError as error:
            if asked.topic is None or error.retryable:
                raise
        except ValueError:
            pass
    if asked.topic is None:
        raise BadValueError("a unique id needs the topic too")
    matches = list(node.admin.query(asked.topic, unique_key=asked.id, max_messages=8, wait_s=0.2))
    if not matches:
        raise NotThereError(f"topic {asked.topic} has no message {asked.id!r:.100}, or its index does not have it yet")
    return matches[0], matches[1:]


def _is_offset_id(text: str) -> bool:
    return len(text) in (32, 56) and all(one in "0123456789abcdefABCDEF" for one in text)


def _groups(node: VisitorNode, found: Message) -> list[GroupState]:
    try:
        described = node.admin.topic(found.topic)
    except TopicNotFoundError:
        return []
    names = [name for name in described.groups if node.rights.sees_group(name)][:_MOST_GROUPS]
    place = (found.topic, found.queue_id)
    committed = {one.group: one.offset for one in node.figures().queue_lags if (one.topic, one.queue) == place}
    return [
        GroupState(name, None if name not in committed else committed[name] > found.queue_offset, committed.get(name))
        for name in names
    ]


def search(node: VisitorNode, asked: SearchQuery) -> SearchResult:
    """A query of the index, which bounds its own work; one by ``id`` has a result, or NotThereError."""
    if asked.id is not None:
        found, others = _found(node, MessageQuery(asked.id, asked.topic))
        return SearchResult([row_of(one) for one in (found, *others)], True, None)
    if asked.topic is None or asked.key is None:
        raise BadValueError("a search needs an id, or topic and key")
    begin = None if asked.begin is None else moment("begin", asked.begin)
    end = None if asked.end is None else moment("end", asked.end)
    result = node.admin.query(
        asked.topic,
        key=asked.key,
        begin=begin,
        end=end,
        max_messages=asked.limit,
        continue_from=asked.go_on,
        wait_s=0.2,
    )
    rows = [row_of(one) for one in result]
    return SearchResult(rows[::-1], result.complete, result.next)
