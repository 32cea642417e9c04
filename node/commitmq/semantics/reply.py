"""Request and reply: the properties that lead a reply to its requester (spec 12.8; remoting 3.10, 6.9).

The requester marks its message with an id, its own client id and a time to live. The consumer that handles it sends a
reply to the cluster's reply topic, and the node pushes the reply to the client of that id and stores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.properties import encode_properties
from commitmq.semantics.derived import first_that_fits, without

REPLY_TOPIC_POSTFIX: Final = "_REPLY_TOPIC"
REPLY_TYPE: Final = "reply"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
"""The property that the node adds to a reply when it pushes it."""
ARRIVE_TIME: Final = "ARRIVE_TIME"
"""The property that the requester adds to a reply when it comes."""
_MOST_DIGITS: Final = 18
_ID_PREFIX: Final = "commitmq@"


class Reply(NamedTuple):
    """Where a reply goes, and its properties."""

    topic: str
    properties: dict[str, str]


def reply_topic(cluster: str) -> str:
    """The topic of the cluster's replies."""
    return cluster + REPLY_TOPIC_POSTFIX


def request_properties(correlation_id: str, client_id: str, ttl_ms: int) -> dict[str, str]:
    """The properties of a request. ``client_id`` is the requester's, ``ttl_ms`` how long it waits."""
    if ttl_ms <= 0:
        raise InvalidMessageError(f"a request waits at least one millisecond, not {ttl_ms}")
    return {
        Property.CORRELATION_ID: correlation_id,
        Property.REPLY_TO_CLIENT: client_id,
        Property.TTL: str(ttl_ms),
    }


def requester_id(queue: int, unique: str) -> str:
    """A client id of ours: its replies lie in ``queue`` of the reply topic. ``unique`` has no ``@``, and never comes again."""
    return f"{_ID_PREFIX}{unique}@{queue}"


def queue_of_requester(client_id: str) -> int | None:
    """The queue of the reply topic in which the client reads; None for a client of RocketMQ, to which replies are pushed."""
    queue = client_id.rpartition("@")[2]
    return int(queue) if client_id.startswith(_ID_PREFIX) and queue.isascii() and queue.isdigit() else None


def is_request(properties: Mapping[str, str]) -> bool:
    """Whether the sender of a message waits for a reply."""
    return Property.CORRELATION_ID in properties and Property.REPLY_TO_CLIENT in properties


def reply_to(request: Mapping[str, str]) -> Reply:
    """The reply to a message with the properties ``request``.

    The message must have CLUSTER, which names the reply topic; every node adds it to single messages. Raises
    InvalidMessageError when the message is no request, or has none.
    """
    cluster = request.get(Property.CLUSTER)
    if not cluster:
        raise InvalidMessageError("the request has no property CLUSTER, so its reply topic is unknown")
    if not is_request(request):
        raise InvalidMessageError("the message is no request: CORRELATION_ID and REPLY_TO_CLIENT are missing")
    properties = {Property.MESSAGE_TYPE: REPLY_TYPE}
    for name in (Property.CORRELATION_ID, Property.REPLY_TO_CLIENT, Property.TTL):
        if request.get(name):
            properties[name] = request[name]
    return Reply(reply_topic(cluster), properties)


def pushed(properties: Mapping[str, str], push_ms: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The properties of a reply that is pushed at ``push_ms``, with ``more`` that the broker adds, as far as they fit.

    It grows by PUSH_REPLY_TIME 31 and ``more``, all of which a requester can do without. Raises InvalidMessageError when the
    reply itself does not fit.
    """
    more = more or {}
    whole = {**properties, **more, PUSH_REPLY_TIME: str(push_ms)}
    return first_that_fits([whole, *without(whole, (*more, PUSH_REPLY_TIME))], encode_properties)[0]


def receiver_of(properties: Mapping[str, str]) -> str | None:
    """The client id to which a reply is pushed, None when the message is no reply or has no receiver."""
    if properties.get(Property.MESSAGE_TYPE) != REPLY_TYPE:
        return None
    return properties.get(Property.REPLY_TO_CLIENT)


def expires_at(properties: Mapping[str, str], born_ms: int) -> int | None:
    """When the requester stops waiting; None without a valid TTL."""
    text = properties.get(Property.TTL, "")
    return born_ms + int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None
