"""One message by its id, and messages by their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commitmq.errors import ProtocolError, TopicNotFoundError
from commitmq_plugins.dashboard.api.messages import MessageRow, WholeMessage, body_of, row_of, whole
from commitmq_plugins.dashboard.api.node import BadValueError, Node, moment, value
from commitmq_plugins.dashboard.guard import NotAllowedError

if TYPE_CHECKING:
    from commitmq.client.message import Message

_MOST: Final = 200
_MOST_GROUPS: Final = 50


class NotThereError(ProtocolError):
    """There is no such message."""

    def __init__(self, text: str) -> None:
        super().__init__("INVALID_PARAMETER", text)


@dataclass(frozen=True, slots=True)
class MessageAsked:
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
class SearchAsked:
    """Messages of a topic with a key, the newest; or with ``id`` one message."""

    topic: str | None = value(None, "The topic's name.", longest=255)
    key: str | None = value(None, "One of the message's keys.", longest=255)
    id: str | None = value(None, "An offset message id, or with topic a unique id.", longest=255)
    begin: str | None = value(None, "Stored at this time or later.", longest=64)
    end: str | None = value(None, "Stored at this time or earlier.", longest=64)
    limit: int = value(64, "Rows.", low=1, high=_MOST)
    go_on: str | None = value(None, "next of the page before.", longest=1_024)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found. ``complete``: nothing is missing in what was looked at; ``next`` goes on behind it."""

    messages: list[MessageRow]
    complete: bool
    next: str | None


def message(node: Node, asked: MessageAsked) -> MessagePage:
    """The message by its id, the offsets of 50 groups, and copies."""
    found, others = _found(node, asked)
    return MessagePage(whole(found), _groups(node, found), [row_of(one) for one in others])


def body(node: Node, asked: MessageAsked) -> bytes:
    """The body of a message, to be saved."""
    return body_of(_found(node, asked)[0])


def _found(node: Node, asked: MessageAsked) -> tuple[Message, list[Message]]:
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


def _groups(node: Node, found: Message) -> list[GroupState]:
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


def search(node: Node, asked: SearchAsked) -> Found:
    """A query of the index, which bounds its own work; one by ``id`` has a result, or NotThereError."""
    if asked.id is not None:
        found, others = _found(node, MessageAsked(asked.id, asked.topic))
        return Found([row_of(one) for one in (found, *others)], True, None)
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
    return Found(rows[::-1], result.complete, result.next)
