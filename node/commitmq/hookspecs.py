"""The contract with plugins (pluggy project name ``commitmq``), and what a dispatcher is.

Every hook says when it fires, in which process, whether it can fire twice, and what raising does. Hooks grow by optional
arguments; ``HOOK_API_VERSION`` changes when one is removed or means something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from commitmq.config import NodeConfig
    from commitmq.log import Log
    from commitmq.store.commit_log import CommitLog
    from commitmq.store.dispatch_batch import DispatchBatch
    from commitmq.store.layout import StoreLayout

HOOK_API_VERSION = 1
PROJECT = "commitmq"

_hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as an implementation of the hook of the same name."""


@dataclass(frozen=True, slots=True)
class DispatcherView:
    """What a dispatcher may use of the node it runs in. ``position`` is where the node suggests it resumes (bytes)."""

    layout: StoreLayout
    config: NodeConfig
    log: Log
    commit_log: CommitLog
    position: int
    topics_deleted: Callable[[], dict[str, int]]
    announce: Callable[[list[tuple[str, int]]], None]


class Dispatcher(Protocol):
    """Sees every record of the log, in order, in a process of its own. All offsets are physical, in bytes.

    Replay is at least once: after a crash records at or behind the returned position come again, so ``dispatch`` must be
    idempotent by physical offset. Raising anywhere ends the process; it is started again with back-off.
    """

    def open(self, view: DispatcherView) -> int:
        """Called once per process. Returns the offset to resume from: everything below is in this dispatcher's files."""

    def dispatch(self, batch: DispatchBatch) -> None:
        """Take the records of ``batch``, which starts where the last one ended. On return they are readable."""

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        """Make what was dispatched durable. Returns (durable offset, store timestamp in ms of its newest record).

        Not ``thorough``: the dispatcher may leave small amounts for later.
        """

    def truncate(self, offset: int) -> None:
        """Forget everything at or behind ``offset``."""

    def expire(self, min_offset: int) -> None:
        """The log now starts at ``min_offset``: what points below may go."""

    def close(self) -> None:
        """The process ends in good order; called after a last ``flush(thorough=True)``."""


@dataclass(frozen=True, slots=True)
class DispatcherSpec:
    """One dispatcher of a plugin. ``factory`` is ``module:attribute``, imported in the dispatcher's own process only."""

    name: str
    factory: str


@_hookspec
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:  # type: ignore[empty-body]
    """The dispatchers this plugin adds.

    Fires in the supervisor, once at every start of a node, before any worker runs; it fires again when the supervisor
    itself is restarted. Must not touch the store. Raising leaves this plugin's dispatchers out, named in ``status``.
    """
