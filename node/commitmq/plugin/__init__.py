"""Everything that a plugin's author imports.

    from commitmq.plugin import ConfigSection, DispatcherSpec, hookimpl, setting           # the module with the hooks
    from commitmq.plugin import SqliteDispatcher, consumable                               # a dispatcher
    from commitmq.plugin import WorkerContext                                              # a worker

The names here keep their meaning for as long as ``HOOK_API_VERSION`` is the same; the modules behind them may move.
Names are loaded when they are first used, so the module with the hooks stays as light as a node's start needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commitmq import failpoints
    from commitmq.config import NodeConfig, setting
    from commitmq.counting import Family, Kind
    from commitmq.errors import CommitMQError, ConfigError, FilterError
    from commitmq.format.compression import decompress
    from commitmq.format.record import decode_record
    from commitmq.log import Log, get_log
    from commitmq.plugin.hookspecs import (
        HOOK_API_VERSION,
        CompiledFilter,
        ConfigSection,
        Dispatcher,
        DispatcherSpec,
        DispatcherView,
        FilterSpec,
        MessageFilter,
        WorkerSpec,
        hookimpl,
    )
    from commitmq.plugin.sqlite_dispatcher import SqliteDispatcher
    from commitmq.security.audit import Actor, AuditLog, Event
    from commitmq.security.start_rule import Listener
    from commitmq.store.log.dispatch_batch import DispatchBatch, consumable
    from commitmq.store.queues.message_filter import FilterBatch
    from commitmq.workers.runtime.context import WorkerContext
    from commitmq.workers.runtime.run_async import run_async

__all__ = [
    "HOOK_API_VERSION",
    "Actor",
    "AuditLog",
    "CommitMQError",
    "CompiledFilter",
    "ConfigError",
    "ConfigSection",
    "DispatchBatch",
    "Dispatcher",
    "DispatcherSpec",
    "DispatcherView",
    "Event",
    "Family",
    "FilterBatch",
    "FilterError",
    "FilterSpec",
    "Kind",
    "Listener",
    "Log",
    "MessageFilter",
    "NodeConfig",
    "SqliteDispatcher",
    "WorkerContext",
    "WorkerSpec",
    "consumable",
    "decode_record",
    "decompress",
    "failpoints",
    "get_log",
    "hookimpl",
    "run_async",
    "setting",
]

_HOMES = {
    "Actor": "commitmq.security.audit",
    "AuditLog": "commitmq.security.audit",
    "CommitMQError": "commitmq.errors",
    "ConfigError": "commitmq.errors",
    "DispatchBatch": "commitmq.store.log.dispatch_batch",
    "Event": "commitmq.security.audit",
    "Family": "commitmq.counting",
    "FilterBatch": "commitmq.store.queues.message_filter",
    "FilterError": "commitmq.errors",
    "Kind": "commitmq.counting",
    "Listener": "commitmq.security.start_rule",
    "Log": "commitmq.log",
    "NodeConfig": "commitmq.config",
    "SqliteDispatcher": "commitmq.plugin.sqlite_dispatcher",
    "WorkerContext": "commitmq.workers.runtime.context",
    "consumable": "commitmq.store.log.dispatch_batch",
    "decode_record": "commitmq.format.record",
    "decompress": "commitmq.format.compression",
    "get_log": "commitmq.log",
    "run_async": "commitmq.workers.runtime.run_async",
    "setting": "commitmq.config",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "failpoints":
        value: Any = import_module("commitmq.failpoints")  # the name is that of a module
    else:
        value = getattr(import_module(_HOMES.get(name, "commitmq.plugin.hookspecs")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
