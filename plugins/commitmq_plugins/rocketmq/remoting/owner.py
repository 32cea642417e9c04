"""What a connection needs of the server that accepted it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from commitmq.log import Log
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.limits import ServerLimits
from commitmq_plugins.rocketmq.remoting.tls import Tls
from commitmq_plugins.rocketmq.remoting.turn import Turn


class Owner:
    """What a connection needs of its server."""

    limits: ServerLimits
    log: Log
    tls: Tls | None
    turn: Turn
    handler: Callable[[Any, Command], Command | Awaitable[Command | None] | None]

    def remove(self, connection: Any, pending_bytes: int) -> None:
        raise NotImplementedError

    def spawn(self, awaitable: Awaitable[None]) -> None:
        raise NotImplementedError

    def note_pending(self, change: int) -> None:
        raise NotImplementedError

    def note_behind(self, change: int) -> None:
        raise NotImplementedError

    def note_requests(self, change: int) -> None:
        raise NotImplementedError

    @property
    def is_full(self) -> bool:
        raise NotImplementedError

    @property
    def slice_s(self) -> float:
        raise NotImplementedError
