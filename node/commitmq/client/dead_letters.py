"""The dead letters of a group: reading ``%DLQ%group`` page by page, selecting letters, and how far the group is with them.

The *position* says which dead letters are dealt with: those before it were resent or purged. It is the committed offset of
the group DEAD_LETTER_GROUP in the dead-letter topic, so it is as durable as every committed offset. Nothing of the log is
deleted before it expires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commitmq.client.admin_results import GroupOffset
from commitmq.client.receiving.query import milliseconds
from commitmq.errors import ProtocolError, TopicNotFoundError
from commitmq.format.constants import DEAD_LETTER_GROUP, Property
from commitmq.semantics.retry import UNDELIVERED_GROUP, dead_letter_topic, is_retry_topic, popped_topic

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message

Request = Callable[..., "tuple[dict[str, Any], list[zmq.Frame]]"]
"""``request(role, op, fields, payload=())``: the answer and its frames."""

PAGE_MESSAGES: Final = 256
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"

_COUNTER_AND_TIME: Final = 12  # the last characters of a unique id: ms since the month began 8, counter 4


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters: all conditions that are given must hold.

    ``topic`` is the original topic, ``tag`` and ``key`` are the message's. ``begin`` and ``end`` are the times at which it
    became a dead letter, in milliseconds or as datetimes, both inclusive. ``offsets`` are queue offsets of the dead letters.
    """

    topic: str | None = None
    tag: str | None = None
    key: str | None = None
    begin: int | datetime | None = None
    end: int | datetime | None = None
    offsets: Sequence[int] | None = None

    def matches(self, letter: DeadLetter) -> bool:
        """Whether ``letter`` is one of these."""
        message = letter.message
        begin, end = milliseconds(self.begin), milliseconds(self.end)
        return (
            (self.topic is None or letter.topic == self.topic)
            and (self.tag is None or message.tags == self.tag)
            and (self.key is None or self.key in message.keys)
            and (begin is None or message.store_timestamp >= begin)
            and (end is None or message.store_timestamp <= end)
            and (self.offsets is None or message.queue_offset in self.offsets)
        )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter. ``message`` is as it lies in the dead-letter topic, ``topic`` its original topic or None.

    ``state``: ``dead``; ``resent``, once it lies in its topic again; ``purged``, when the position is behind it and it was not
    resent.
    """

    message: Message
    topic: str | None
    state: str = "dead"

    @property
    def origin_id(self) -> str | None:
        """The offset message id that the message had in its original topic."""
        properties = self.message.properties
        return properties.get(Property.ORIGIN_MESSAGE_ID) or properties.get(DLQ_ORIGIN_MESSAGE_ID)

    @property
    def resend_id(self) -> str:
        """The unique id that the message gets when it is resent, always the same: so a second copy is noticed.

        Its form is that of every unique id (spec 2.10), with the time at which the message became a dead letter.
        """
        message = self.message
        text = f"{message.stored_topic} {message.queue_id} {message.queue_offset} {message.physical_offset}"
        digest = hashlib.sha256(f"{text} {message.store_timestamp}".encode()).hexdigest().upper()
        return digest[: 32 - _COUNTER_AND_TIME] + _month_ms(message.store_timestamp) + digest[-4:]

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON: the message, its original topic and id, and the state."""
        return {"state": self.state, "origin_topic": self.topic, "origin_id": self.origin_id, **self.message.to_json()}


class Page(NamedTuple):
    """Dead letters of one queue, in order. ``next_offset`` is where the next page begins."""

    queue: int
    letters: list[DeadLetter]
    next_offset: int


class DeadLetters:
    """The dead letters of one group that exist now; later ones belong to the next look."""

    def __init__(self, request: Request, group: str) -> None:
        """Raises ProtocolError TOPIC_NOT_EXIST when the group has no dead-letter topic."""
        self.group = group
        self.topic = dead_letter_topic(group)
        self._request = request
        try:
            answer, _ = request("reader", "offsets", {"topic": self.topic})
        except TopicNotFoundError:
            raise TopicNotFoundError(
                "TOPIC_NOT_EXIST", f"group {group} has no dead letters: topic {self.topic} does not exist"
            ) from None
        self.begins = {int(row[0]): int(row[1]) for row in answer["queues"]}
        self.ends = {int(row[0]): int(row[2]) for row in answer["queues"]}

    def positions(self) -> dict[int, int]:
        """The position in each queue."""
        wanted = [[self.topic, queue] for queue in self.begins]
        answer, _ = self._request("coordinator", "offset.fetch", {"group": DEAD_LETTER_GROUP, "queues": wanted})
        return {queue: max(offset, self.begins[queue]) for _, queue, offset in answer["offsets"]}

    def move(self, positions: dict[int, int], *, purges: bool = False) -> list[GroupOffset]:
        """Move the position ahead, durably. One that is further already stays; returns the position of each of the queues.

        ``purges``: the audit log has it as ``dlq.purge``.
        """
        offsets = [[self.topic, queue, offset] for queue, offset in positions.items()]
        fields: dict[str, Any] = {"group": DEAD_LETTER_GROUP, "offsets": offsets}
        answer, _ = self._request("coordinator", "offset.commit", {**fields, "by_person": True} if purges else fields)
        return [GroupOffset(*one[:3]) for one in answer["stored"]]

    def pages(self, queue: int, offset: int, most: int = PAGE_MESSAGES) -> Iterator[Page]:
        """The dead letters of ``queue`` from ``offset`` on, up to ``most`` at a time."""
        end = self.ends[queue]
        while offset < end:
            fields = {"topic": self.topic, "queue": queue, "offset": offset, "max_messages": min(most, end - offset)}
            answer, frames = self._request("reader", "pull", fields)
            letters = [self._letter(one) for one in _messages(self.topic, queue, frames)]
            following = min(int(answer["next_offset"]), end)
            yield Page(queue, [one for one in letters if one.message.queue_offset < end], following)
            if following <= offset:
                return
            offset = following

    def at(self, queue: int, offset: int) -> DeadLetter:
        """One dead letter. ProtocolError INVALID_PARAMETER when there is none."""
        if self.begins.get(queue, 0) <= offset < self.ends.get(queue, 0):
            for page in self.pages(queue, offset, 1):
                for letter in page.letters:
                    if letter.message.queue_offset == offset:
                        return letter
                break
        raise ProtocolError("INVALID_PARAMETER", f"{self.topic} has no message {offset} in queue {queue}")

    def _letter(self, message: Message) -> DeadLetter:
        properties = message.properties
        topic = properties.get(Property.RETRY_TOPIC) or properties.get(DLQ_ORIGIN_TOPIC)
        if topic is None and self.group == UNDELIVERED_GROUP:
            topic = properties.get(Property.REAL_TOPIC)
        if topic is not None:
            topic = popped_topic(topic, self.group)
        return DeadLetter(message, None if topic is None or is_retry_topic(topic) else topic)


class Resent:
    """Says which dead letters lie in their topics again, by the index of the node.

    The first answer fixes the end of the log up to which it looks; the index must have come so far.
    """

    def __init__(self, request: Request, *, wait: Callable[[], None]) -> None:
        """``wait`` is called while the index is behind; it raises when that takes too long."""
        self._request, self._wait = request, wait
        self._up_to: int | None = None

    def has(self, letter: DeadLetter, *, deleted: bool = False) -> bool:
        """Whether the letter lies in its topic again; with ``deleted`` also if that topic was deleted since.

        Raises ProtocolError SERVICE_NOT_AVAILABLE when the index cannot tell.
        """
        if letter.topic is None:
            return False
        following: str | None = None
        while True:
            fields = {"topic": letter.topic, "key": letter.resend_id, "type": "unique", "max": 1}
            more = {"up_to": self._up_to, "next": following, "deleted": deleted or None}
            try:
                answer, _ = self._request("reader", "query", fields | {k: v for k, v in more.items() if v is not None})
            except TopicNotFoundError:
                return False  # its topic was deleted
            self._up_to = int(answer["log_end"])
            if answer["count"]:
                return True
            if answer["indexed_to"] < self._up_to:
                self._wait()
                continue
            following = answer["next"]
            if following is None:
                if not answer["complete"]:
                    raise ProtocolError(
                        "SERVICE_NOT_AVAILABLE", f"the index cannot say what of topic {letter.topic} was resent: look at it"
                        " with `commitmq dispatcher list`",
                    )  # fmt: skip
                return False


def _messages(topic: str, queue: int, frames: Sequence[zmq.Frame]) -> Iterator[Message]:
    from commitmq.client.receiving.query import batch_of

    return iter(batch_of(topic, [frame.buffer for frame in frames]))


def _month_ms(when_ms: int) -> str:
    """Eight hex digits: the milliseconds from the beginning of the month (UTC) to ``when_ms``."""
    when = datetime.fromtimestamp(when_ms / 1000, UTC)
    start = datetime(when.year, when.month, 1, tzinfo=UTC)
    return f"{when_ms - int(start.timestamp() * 1000) & 0xFFFFFFFF:08X}"
