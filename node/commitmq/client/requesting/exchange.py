"""The two messages of an exchange: the request with the marks that lead to its requester, and the reply to it (spec 12.8).

A node of RocketMQ adds CLUSTER to a single message; here the requester does, because it knows the reply topic anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from commitmq.client.message import Message
from commitmq.client.properties import Keys, both_keys
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.semantics import reply


class Content(NamedTuple):
    """What a program gives for a request, beside the topic."""

    body: bytes | Message
    tags: str | None = None
    keys: Keys | None = None
    properties: Mapping[str, str] | None = None
    sharding_key: str | None = None
    key: str | None = None
    flag: int = 0


def request_message(content: Content, marks: Mapping[str, str]) -> Message:
    """The message of a request. ``marks``: the properties that lead to the requester. Raises InvalidMessageError."""
    body = content.body
    if isinstance(body, Message):
        if any(value is not None for value in content[1:6]) or content.flag:
            raise InvalidMessageError(
                "a Message carries its own tags, keys, properties, sharding key and flag: give none beside it"
            )
        made = _copy(body)
    else:
        keys, sharding_key = content.keys, content.sharding_key
        if content.key is not None:
            keys, sharding_key = both_keys(content.key, keys, sharding_key)
        made = Message(
            body,
            tags=content.tags,
            keys=keys,
            properties=content.properties,
            sharding_key=sharding_key,
            flag=content.flag,
        )
    made.properties.update(marks)
    return made


class ReplyMessage(NamedTuple):
    """A reply, its topic, and the queue in which its requester reads; ``queue`` is None for a requester of another kind."""

    topic: str
    message: Message
    queue: int | None
    client_id: str


def reply_message(request: Message, body: bytes | Message, properties: Mapping[str, str] | None) -> ReplyMessage:
    """The reply to ``request``, a received message. Raises InvalidMessageError when that is no request.

    The requester's id is its tag too: the node passes over the replies to others without reading them.
    """
    lead = reply.reply_to(request.properties)
    if isinstance(body, Message):
        if properties is not None:
            raise InvalidMessageError("a Message carries its own properties: give none beside it")
        made = _copy(body)
    else:
        made = Message(body, properties=properties)
    client_id = lead.properties[Property.REPLY_TO_CLIENT]
    made.properties.update(lead.properties)
    made.properties[Property.TAGS] = client_id
    return ReplyMessage(lead.topic, made, reply.queue_of_requester(client_id), client_id)


def _copy(message: Message) -> Message:
    """A message of its own, which gets further properties; the program's stays as it is."""
    made = Message(message.body, flag=message.flag)
    made.properties.update(message.properties)
    return made
