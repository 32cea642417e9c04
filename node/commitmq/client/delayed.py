"""Messages that wait for their time: listing them from the topics in which they wait, and cancelling one.

Messages at a delay level wait in a queue of SCHEDULE_TOPIC_XXXX each, in the order of their times. Those with a time of their
own wait in ``rmq_sys_wheel_timer``, in the order in which they were sent. Where the waiting ones begin says the status of the
process that delivers them: the positions that it wrote down last.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commitmq.errors import InvalidMessageError, ProtocolError, TopicNotFoundError
from commitmq.format.constants import Property
from commitmq.semantics.delay import DELAY_LEVELS_MS, MAX_LEVEL, SCHEDULE_TOPIC, queue_of
from commitmq.semantics.pop_revive import REVIVE_TOPIC_PREFIX
from commitmq.semantics.timer import TIMER_TOPIC, RecallHandle

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message

Request = Callable[..., "tuple[dict[str, Any], list[zmq.Frame]]"]
"""``request(role, op, fields, payload=())``: the answer and its frames."""

_PAGE_MESSAGES: Final = 1_000
_SLACK_MS: Final = 60_000  # two records may have times in another order than their places, by little
_DEFAULT_WINDOW_MS: Final = 3 * 86_400_000


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that waits. ``topic`` and ``queue`` are those to which it will be delivered.

    ``due`` and ``stored`` are in ms since 1970. ``level`` is its delay level, 0 for a time of its own. ``recall_handle``
    cancels it; it is None at a delay level. ``msg_id``, ``queue_offset`` and ``physical_offset`` are those of the place where
    it waits.
    """

    topic: str
    queue: int
    unique_id: str
    keys: str
    tags: str
    due: int
    stored: int
    level: int
    body_bytes: int
    recall_handle: str | None
    msg_id: str
    queue_offset: int
    physical_offset: int

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DelayedMessages:
    """``messages``: those that are due first come first. ``complete``: everything that waits was read and fits in."""

    messages: list[DelayedMessage]
    complete: bool
    read: int

    def __iter__(self) -> Iterator[DelayedMessage]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


class DelayPositions(NamedTuple):
    """What the processes ``schedule`` and ``timer`` wrote down last; None where they did not say.

    ``levels``: the next queue offset of each level. ``read_ms``: what was due before is delivered. ``window_ms``: a
    message waits in the timer topic no longer than this before it is stored again. ``broker``: the node's name in
    recall handles.
    """

    levels: dict[int, int] | None
    read_ms: int | None
    window_ms: int
    broker: str

    @classmethod
    def of(cls, status: dict[str, Any]) -> DelayPositions:
        """From the answer to ``status``."""
        infos = {row["role"]: row.get("info") or {} for row in status["processes"]}
        offsets = infos.get("schedule", {}).get("offsets")
        timer = infos.get("timer", {})
        window_s = timer.get("roll_window_s")
        return cls(
            None if offsets is None else {int(level): int(offset) for level, offset in offsets},
            timer.get("read_ms"),
            _DEFAULT_WINDOW_MS if window_s is None else int(window_s) * 1000,
            str(timer.get("broker_name", "")),
        )


@dataclass(slots=True)
class ReadBounds:
    """What one list may still read: messages, bytes, and until when (monotonic seconds)."""

    messages: int
    size_bytes: int
    until_s: float

    @classmethod
    def of(cls, messages: int, size_bytes: int, most_s: float | None) -> ReadBounds:
        """From now on for ``most_s`` seconds; None for any time."""
        return cls(messages, size_bytes, math.inf if most_s is None else time.monotonic() + most_s)

    @property
    def is_over(self) -> bool:
        return self.messages <= 0 or self.size_bytes <= 0 or time.monotonic() >= self.until_s


class WaitingMessages:
    """Reads the topics in which messages wait, within ``bounds``."""

    def __init__(self, request: Request, positions: DelayPositions, topic: str | None, bounds: ReadBounds) -> None:
        """``topic``: only messages that will be delivered to it."""
        self._request, self._positions, self._topic = request, positions, topic
        self._left = bounds
        self._now_ms = time.time_ns() // 1_000_000
        self._complete = True
        self._read = 0

    def first(self, count: int) -> DelayedMessages:
        """The ``count`` messages that are due first, among those that were read."""
        levels = list(self._of_levels(count))
        found = [*levels, *self._of_timer()]
        messages = heapq.nsmallest(count, found, key=attrgetter("due", "physical_offset"))
        return DelayedMessages(messages, self._complete and len(messages) == len(found), self._read)

    # ------------------------------------------------------------ delay levels

    def _of_levels(self, count: int) -> Iterator[DelayedMessage]:
        """Up to ``count`` and one of each level: the queue of a level is in the order of its times."""
        offsets = self._positions.levels
        for level in range(1, MAX_LEVEL + 1):
            queue = queue_of(level)
            since_ms = max(0, self._now_ms - DELAY_LEVELS_MS[level - 1])
            bounds = self._bounds(SCHEDULE_TOPIC, queue, since_ms)
            if bounds is None:
                return
            low, end, by_time = bounds
            start = by_time if offsets is None else max(low, offsets.get(level, 0))
            found = 0
            for message in self._messages(SCHEDULE_TOPIC, queue, start, end):
                one = self._waiting(message, message.store_timestamp + DELAY_LEVELS_MS[level - 1], level)
                if one is not None:
                    found += 1
                    yield one
                if found > count:
                    break

    # ------------------------------------------------------------ times of their own

    def _of_timer(self) -> list[DelayedMessage]:
        """Those that wait in the timer topic.

        A cancellation lies behind the message that it takes away. Both go round again on their own, so that a later record of
        the message can lie between the two of the cancellation.
        """
        read_ms = self._now_ms if self._positions.read_ms is None else self._positions.read_ms
        since_ms = max(0, min(read_ms, self._now_ms) - self._positions.window_ms - _SLACK_MS)
        bounds = self._bounds(TIMER_TOPIC, 0, since_ms)
        if bounds is None:
            return []
        found: dict[tuple[str, str], DelayedMessage] = {}  # by topic and unique id
        gone: set[tuple[str, str]] = set()
        for message in self._messages(TIMER_TOPIC, 0, bounds[2], bounds[1]):
            properties = message.properties
            cancelled = properties.get(Property.TIMER_DELETE_KEY)
            if cancelled is not None:
                topic = properties.get(Property.REAL_TOPIC, "")  # a cancellation means a message of its own topic
                for unique in {cancelled, cancelled.removeprefix(f"{topic}+")}:  # with its topic before it (spec 12.2)
                    gone.add((topic, unique))
                    found.pop((topic, unique), None)
                continue
            out = properties.get(Property.TIMER_OUT_MS, "")
            if not out.isdigit() or int(out) < read_ms:
                continue
            one = self._waiting(message, _asked_ms(properties, int(out), message.store_timestamp), 0)
            if one is not None and (one.topic, one.unique_id) not in gone:
                # One that went round again lies behind its previous record and takes its place.
                found[one.topic, one.unique_id or one.msg_id] = one
        return list(found.values())

    def _waiting(self, message: Message, due: int, level: int) -> DelayedMessage | None:
        properties = message.properties
        topic = properties.get(Property.REAL_TOPIC, "")
        queue = properties.get(Property.REAL_QUEUE_ID, "")
        if topic != self._topic and (self._topic is not None or topic.startswith(REVIVE_TOPIC_PREFIX)):
            return None
        return DelayedMessage(
            topic=topic,
            queue=int(queue) if queue.isdigit() else -1,
            unique_id=properties.get(Property.UNIQUE_KEY, ""),
            keys=properties.get(Property.KEYS, ""),
            tags=properties.get(Property.TAGS, ""),
            due=due,
            stored=message.store_timestamp,
            level=level,
            body_bytes=len(message.body),
            recall_handle=None if level else handle_of(properties, self._positions.broker),
            msg_id=message.msg_id or "",
            queue_offset=message.queue_offset,
            physical_offset=message.physical_offset,
        )

    # ------------------------------------------------------------ reading

    def _bounds(self, topic: str, queue: int, since_ms: int) -> tuple[int, int, int] | None:
        """(first offset, offset behind the last one, first one stored at ``since_ms`` or later); None without the topic."""
        try:
            answer, _ = self._request("reader", "offsets", {"topic": topic, "queues": [queue], "timestamp": since_ms})
        except TopicNotFoundError:
            return None
        ((_, low, end, by_time),) = answer["queues"]
        return int(low), int(end), int(low if by_time is None else by_time)

    def _messages(self, topic: str, queue: int, offset: int, end: int) -> Iterator[Message]:
        from commitmq.client.receiving.query import batch_of

        while offset < end:
            if self._left.is_over:
                self._complete = False
                return
            most = min(_PAGE_MESSAGES, end - offset, self._left.messages)
            fields = {"topic": topic, "queue": queue, "offset": offset, "max_messages": most}
            answer, frames = self._request("reader", "pull", fields)
            batch = batch_of(topic, [frame.buffer for frame in frames])
            self._read += len(batch)
            self._left.messages -= len(batch)
            self._left.size_bytes -= sum(len(frame.buffer) for frame in frames)
            yield from batch
            following = int(answer["next_offset"])
            if following <= offset:
                return
            offset = following


def handle_of(properties: Mapping[str, str], broker: str) -> str | None:
    """The recall handle of a message of the timer topic; None when it lacks a unique id or its time."""
    unique_id = properties.get(Property.UNIQUE_KEY)
    topic, out = properties.get(Property.REAL_TOPIC), properties.get(Property.TIMER_OUT_MS, "")
    if not unique_id or not topic or not out.isdigit() or Property.TIMER_DELETE_KEY in properties:
        return None
    return RecallHandle(topic, broker, int(out) + 1, unique_id).encode()


def handle_for(text: str, find: Callable[[str, str], list[Message]], broker: str) -> str:
    """The recall handle that ``text`` is, or that of the waiting message with the unique id ``text``.

    ``find(topic, id)`` looks into the index. Raises InvalidMessageError for a message at a delay level, and ProtocolError when
    no message waits.
    """
    try:
        RecallHandle.decode(text)
    except InvalidMessageError:
        pass
    else:
        return text
    # The newest of them has the same time as the others: it is the same message, which went round again.
    for message in reversed(find(TIMER_TOPIC, text)):
        handle = handle_of(message.properties, broker)
        if handle is not None:
            return handle
    if find(SCHEDULE_TOPIC, text):
        raise InvalidMessageError(f"the message {text} has a delay level, and such a message cannot be cancelled")
    raise ProtocolError("INVALID_PARAMETER", f"{text!r:.100} is no recall handle, and no waiting message has this id")


def _asked_ms(properties: Mapping[str, str], out_ms: int, stored_ms: int) -> int:
    """The very time that the sender asked for, if it lies in the second of ``out_ms``; else the end of that second."""
    at = properties.get(Property.TIMER_DELIVER_MS, "")
    delay_ms, delay_s = properties.get(Property.TIMER_DELAY_MS, ""), properties.get(Property.TIMER_DELAY_SECONDS, "")
    asked = out_ms + 1000
    if delay_s.isdigit():
        asked = stored_ms + int(delay_s) * 1000
    elif delay_ms.isdigit():
        asked = stored_ms + int(delay_ms)
    elif at.isdigit():
        asked = int(at)
    return asked if out_ms <= asked <= out_ms + 1000 else out_ms + 1000
