"""Handlers, and the middleware around them: functions that get a message and what comes next.

The first of ``middleware=[m1, m2]`` is the outermost. ``m(message, next)`` calls ``next(message)`` and returns what that
returned, or another result; it may also hand on another message, or not call ``next`` at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from commitmq.client import checks
from commitmq.client.handling.consume_result import ConsumeResult
from commitmq.client.message import Message

_T = TypeVar("_T")

Returned = ConsumeResult | bool | None
Handler = Callable[[Message], Returned]
"""``handler`` of :meth:`commitmq.Consumer.run`."""
Middleware = Callable[[Message, Handler], Returned]
OnError = Callable[[Message | None, BaseException], object]
"""``on_error``: the message is None for an error that is not of one message."""

AsyncHandler = Callable[[Message], Awaitable[Returned]]
"""``handler`` of :meth:`commitmq.AsyncConsumer.run`: a coroutine function."""
AsyncMiddleware = Callable[[Message, AsyncHandler], Awaitable[Returned]]
AsyncOnError = Callable[[Message | None, BaseException], Awaitable[object] | object]


def chained(handler: Handler, middleware: Iterable[Middleware]) -> Handler:
    """``handler`` with ``middleware`` around it. Raises ValueError for what cannot be called."""
    checks.callback("handler", _given("handler", handler))
    for one in reversed(list(middleware)):
        checks.callback("middleware", _given("middleware", one))
        handler = partial(_call, one, handler)
    return handler


def chained_async(handler: AsyncHandler, middleware: Iterable[AsyncMiddleware]) -> AsyncHandler:
    """:func:`chained` for coroutine functions."""
    checks.callback("handler", _given("handler", handler))
    for one in reversed(list(middleware)):
        checks.callback("middleware", _given("middleware", one))
        handler = partial(_call_async, one, handler)
    return handler


def _call(middleware: Middleware, following: Handler, message: Message) -> Returned:
    return middleware(message, following)


def _call_async(middleware: AsyncMiddleware, following: AsyncHandler, message: Message) -> Awaitable[Returned]:
    return middleware(message, following)


def _given(name: str, value: _T) -> _T:
    if value is None:
        raise ValueError(f"{name} must be a function, not None")
    return value
