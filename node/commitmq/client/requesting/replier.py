"""Who replies for the handler that runs: set by the pool of handlers, asked by their messages."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from commitmq.errors import CommitMQError

if TYPE_CHECKING:
    from typing import Any


class Replier(Protocol):
    """:class:`~commitmq.client.handling.pools.HandlerProducer`, as far as a message uses it."""

    def reply(self, message: Any, body: Any, properties: Mapping[str, str] | None) -> Any: ...
    async def reply_async(self, message: Any, body: Any, properties: Mapping[str, str] | None) -> Any: ...


_current: ContextVar[Replier | None] = ContextVar("commitmq_replier", default=None)


def set_current(replier: Replier) -> None:
    """In the thread or the context in which handlers run."""
    _current.set(replier)


def current() -> Replier:
    """Of the handler that calls. Raises CommitMQError outside of a handler."""
    found = _current.get()
    if found is None:
        raise CommitMQError("only a handler of run() can reply by its message: call producer.reply(message, body)")
    return found
