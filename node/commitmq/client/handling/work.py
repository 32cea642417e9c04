"""What a pool of handlers works on: the engine of a consumer, or of a share consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from commitmq.client.handling.consume_result import Verdict


class Concurrency(Protocol):
    """How many handlers run at a time."""

    @property
    def workers(self) -> int: ...


class Work(Protocol):
    """``take`` and ``wake`` are called with ``lock`` held; an entry has the attribute ``message``."""

    lock: Any
    wake: Callable[[int], None]
    is_stopping: bool

    @property
    def settings(self) -> Concurrency: ...
    def take(self) -> Any: ...
    def judge(self, entry: Any, verdict: Verdict) -> None: ...
    def abandon(self, entry: Any) -> None: ...
