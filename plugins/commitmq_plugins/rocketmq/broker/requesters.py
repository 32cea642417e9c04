"""Which connection sent a request, whose reply is pushed to it.

A reply names its requester by the client id, which a client chooses. So another user's client may have the same id, by chance
or to take the replies: then a reply goes to the connection that sent the request. Without users ids alone count, as at
RocketMQ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from commitmq.format.constants import Property
from commitmq_plugins.rocketmq.broker.registry import Registry
from commitmq_plugins.rocketmq.remoting.server import Connection

_MOST_REQUESTS: Final = 256
"""Of one connection; the oldest are forgotten."""
_MOST_CHARACTERS: Final = 255

_Request = tuple[str, str]
"""Client id and correlation id."""


class Requesters:
    """See the module. ``registry`` knows the client ids."""

    def __init__(self, registry: Registry[Connection]) -> None:
        self._registry = registry
        self._senders: dict[_Request, Connection] = {}
        self._sent: dict[Connection, deque[_Request]] = {}

    def sent(self, connection: Connection, properties: Mapping[str, str]) -> None:
        """A client sends a request with these properties. The first sender counts: who reads a request can send it again."""
        request = _request_of(properties)
        if not connection.user or request in self._senders or sum(map(len, request)) > _MOST_CHARACTERS:
            return
        own = self._sent.setdefault(connection, deque())
        if len(own) >= _MOST_REQUESTS:
            del self._senders[own.popleft()]
        own.append(request)
        self._senders[request] = connection

    def closed(self, connection: Connection) -> None:
        """The connection ended."""
        for request in self._sent.pop(connection, ()):
            del self._senders[request]

    def link_of(self, properties: Mapping[str, str]) -> Connection | None:
        """Where the reply with these properties is to be pushed; None when its requester is not connected."""
        request = _request_of(properties)
        named, sender = self._registry.client(request[0]), self._senders.get(request)
        return sender if sender is not None and (named is None or named.user != sender.user) else named


def _request_of(properties: Mapping[str, str]) -> _Request:
    return properties.get(Property.REPLY_TO_CLIENT, ""), properties.get(Property.CORRELATION_ID, "")
