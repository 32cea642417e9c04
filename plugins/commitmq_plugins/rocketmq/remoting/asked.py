"""Requests of a server to one of its peers, which wait for the peer's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import PeerGoneError, PeerSilentError

_MOST: Final = 1_024


class Asked:
    """By their ``opaque``. An answer that nobody waits for is ignored."""

    __slots__ = ("_futures", "_opaque")

    def __init__(self) -> None:
        self._opaque = 0
        self._futures: dict[int, asyncio.Future[Command]] = {}

    def next_opaque(self) -> int:
        """A number for another request."""
        self._opaque = (self._opaque + 1) & 0x7FFF_FFFF
        return self._opaque

    async def ask(self, command: Command, put: Callable[[Command], None], timeout_s: float, name: str) -> Command:
        """The peer's answer to ``command``, which ``put`` sends. Raises PeerGoneError, PeerSilentError."""
        if len(self._futures) >= _MOST:
            raise PeerSilentError(f"{name} has {len(self._futures)} requests to answer already")
        opaque = command.opaque = self.next_opaque()
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._futures[opaque] = future
        try:
            put(command)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise PeerSilentError(f"{name} did not answer in {timeout_s:g} s") from error
        finally:
            self._futures.pop(opaque, None)

    def answered(self, command: Command) -> None:
        """The peer sent an answer."""
        future = self._futures.get(command.opaque)
        if future is not None and not future.done():
            command.body = bytes(command.body)
            future.set_result(command)

    def fail(self, name: str) -> None:
        """The connection ended."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(PeerGoneError(f"the connection of {name} ended"))
        self._futures.clear()
