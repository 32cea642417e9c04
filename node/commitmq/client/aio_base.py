"""What the asyncio twins of clients share: how they begin and end."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

from commitmq.errors import CommitMQError

_Client = TypeVar("_Client", bound=Any)


class AsyncClosing:
    """A client whose ``async with`` block ends with :meth:`close`."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class AsyncStarted(AsyncClosing, Generic[_Client]):
    """The twin of a consumer, which connects in its thread when it is entered."""

    def __init__(self, make: Callable[[], _Client], thread_name: str) -> None:
        self._make = make
        self._consumer: _Client | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)

    async def start(self) -> Self:
        """Connect, and join the group. After a failure a program must make a new consumer."""
        if self._is_closed:
            raise CommitMQError("the consumer is closed")
        if self._consumer is None:
            making = self._thread.submit(self._make)
            try:
                consumer = await asyncio.shield(asyncio.wrap_future(making))
                if self._is_closed:
                    making.add_done_callback(_close_unwanted)
                    raise CommitMQError("the consumer was closed while it connected")
                self._consumer = consumer
            except asyncio.CancelledError:
                making.add_done_callback(_close_unwanted)
                raise
            finally:
                if self._consumer is None:
                    self._thread.shutdown(wait=False)
        return self

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._is_closed or (self._consumer is not None and bool(self._consumer.is_closed))

    @property
    def _started(self) -> _Client:
        if self._consumer is None:
            raise RuntimeError("the consumer is not started: use `async with`, or await start()")
        return self._consumer

    async def __aenter__(self) -> Self:
        return await self.start()


def _close_unwanted(making: Future[Any]) -> None:
    """Close a consumer that was made after its twin was closed or cancelled."""
    if not making.cancelled() and making.exception() is None:
        making.result()._forgotten()
