"""The arguments of ``Consumer.run`` and ``AsyncConsumer.run``, the middleware around handlers, and the counters of ``run``.

Middleware are functions that get a message and what comes next.

The first of ``middleware=[m1, m2]`` is the outermost. ``m(message, next)`` calls ``next(message)`` and returns what that
returned, or another result; it may also hand on another message, or not call ``next`` at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypedDict, TypeVar

from commitmq.client import checks
from commitmq.client.handling.consume_result import LONGEST_S, Backoff, ConsumeResult, check_backoff
from commitmq.client.message import Message

DEFAULT_WORKERS: Final = 20
_MANY_WORKERS: Final = 10_000
_MEBIBYTE: Final = 1024 * 1024


class RunOptions(TypedDict, total=False):
    """How messages are passed to a handler; see :meth:`commitmq.Consumer.run`."""

    workers: int
    ordered: bool
    max_retries: int | None
    backoff: Backoff
    max_unfinished: int
    max_unfinished_bytes: int
    max_unfinished_span: int
    stop_timeout_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """:class:`RunOptions` with the defaults, which are RocketMQ's but for ``stop_timeout_s``."""

    workers: int = DEFAULT_WORKERS
    ordered: bool = False
    max_retries: int | None = 16
    backoff: Backoff = None
    max_unfinished: int = 1_000
    max_unfinished_bytes: int = 100 * _MEBIBYTE
    max_unfinished_span: int = 2_000
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no setting."""
        for name in ("workers", "max_unfinished", "max_unfinished_bytes", "max_unfinished_span"):
            if checks.integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.workers > _MANY_WORKERS:
            raise ValueError(f"workers must be at most {_MANY_WORKERS}, not {self.workers}")
        if not isinstance(self.ordered, bool):
            raise ValueError(f"ordered must be True or False, not {self.ordered!r}")
        if self.max_retries is not None and checks.integer("max_retries", self.max_retries) < 0:
            raise ValueError(f"max_retries must not be below 0, not {self.max_retries}")
        checks.seconds("stop_timeout_s", self.stop_timeout_s, zero=True)
        object.__setattr__(self, "backoff", check_backoff(self.backoff, self.longest_delay_s))

    @property
    def longest_delay_s(self) -> float | None:
        """The longest delay of a message that is sent back; None in ordered mode, where the consumer itself waits."""
        return None if self.ordered else LONGEST_S


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


_AnyHandler = TypeVar("_AnyHandler", Handler, AsyncHandler)


def chained(handler: _AnyHandler, middleware: Iterable[Callable[[Message, _AnyHandler], Any]]) -> _AnyHandler:
    """``handler`` with ``middleware`` around it. Raises ValueError for what cannot be called."""
    checks.callback("handler", _given("handler", handler))
    for one in reversed(list(middleware)):
        checks.callback("middleware", _given("middleware", one))
        handler = partial(_call, one, handler)
    return handler


def _call(middleware: Callable[[Message, Any], Any], following: Any, message: Message) -> Any:
    return middleware(message, following)


def _given(name: str, value: _T) -> _T:
    if value is None:
        raise ValueError(f"{name} must be a function, not None")
    return value


class HandlerCounts(NamedTuple):
    """What became of the messages of ``run`` so far, and how many there are now.

    ``handled``: calls of the handler that ended with DONE. ``failed``: those that did not. ``dead``: messages that went to
    the dead letters. ``running``: handlers that run now. ``unfinished``: messages that were fetched and are not done.
    """

    handled: int = 0
    failed: int = 0
    dead: int = 0
    running: int = 0
    unfinished: int = 0
