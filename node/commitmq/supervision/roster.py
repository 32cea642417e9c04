"""The roles of a node: its own, and those that plugins add, each with its place in the control block.

The supervisor's side of :mod:`commitmq.supervision.discovery`; plain data, no plugin is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.config import NodeConfig
from commitmq.control import DISPATCHER_BASE, DISPATCHER_SLOTS, WORKER_BASE, WORKER_SLOTS, role_slot
from commitmq.log import Log
from commitmq.security.start_rule import Listener
from commitmq.semantics import movers
from commitmq.supervision.exit_codes import CliExit, StartFailed

DISPATCHER_MODULE: Final = "commitmq.workers.dispatcher.process"
PLUGIN_WORKER_MODULE: Final = "commitmq.workers.plugin_worker"
CONSUME_QUEUE: Final = "consume_queue"
# Slots of dispatchers that other processes look for. Plugins get the slots behind, in the order of their discovery.
FIXED_DISPATCHER_SLOTS: Final[Mapping[str, int]] = {CONSUME_QUEUE: 0, "index": 1, "memory": 2}
FIRST_PLUGIN_DISPATCHER_SLOT: Final = 3


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to run. ``essential``: the node cannot start without it. ``plugin``: its plugin, empty for the node's
    own. ``on_demand``: it starts when it is needed first. ``listens``: a plugin's process that others connect to.
    """

    name: str
    module: str
    slot: int
    one_shot: bool = False
    essential: bool = True
    plugin: str = ""
    dispatcher: str = ""
    dispatcher_slot: int = -1
    on_demand: bool = False
    listens: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_batches(self) -> bool:
        """True for a dispatcher that gets batches from reput; memory topics never reach the log."""
        return bool(self.dispatcher) and self.dispatcher != "memory"


def own_role(name: str, module: str) -> ProcessSpec:
    """One of the node's roles. The index dispatcher catches up while the node serves: not essential, as movers."""
    one_shot = name in ("recovery", "discovery")
    dispatcher = name.removeprefix("dispatcher-") if name.startswith("dispatcher-") else ""
    slot = FIXED_DISPATCHER_SLOTS.get(dispatcher, -1)
    params: dict[str, Any] = {"dispatcher_slot": slot} if dispatcher else {}
    return ProcessSpec(
        name,
        module,
        role_slot(name),
        one_shot=one_shot,
        essential=name != "dispatcher-index" and name not in movers.ROLES,
        on_demand=name in movers.ROLES,
        dispatcher=dispatcher,
        dispatcher_slot=slot,
        params=params,
    )


class Roster:
    """The result of discovery. ``reports`` has one dict for each plugin, as ``status`` shows it."""

    def __init__(self, found: Mapping[str, Any] | None = None) -> None:
        """``found``: the ``info`` of the discovery process. Without it a node runs only its own roles."""
        found = found or {}
        self.reports: list[dict[str, Any]] = list(found.get("plugins", ()))
        self.config_errors: list[str] = list(found.get("config_errors", ()))
        self.filters: list[dict[str, Any]] = list(found.get("filters", ()))
        self._dispatchers: list[dict[str, Any]] = list(found.get("dispatchers", ()))
        self._workers: list[dict[str, Any]] = list(found.get("workers", ()))

    @property
    def listeners(self) -> list[Listener]:
        """Where the workers of plugins listen."""
        return [Listener(**one) for worker in self._workers for one in worker.get("listeners", ())]

    def log_failures(self, log: Log) -> None:
        """A line for each plugin that failed."""
        for report in self.reports:
            if report["failure"]:
                log.error("a plugin failed", plugin=report["name"], where=report["failed_in"], why=_why(report))

    def failures(self) -> list[str]:
        """A sentence for each plugin that failed, for whoever asked for it."""
        return [
            f"the plugin {one['name']} failed in {one['failed_in']}: {_why(one)}; `commitmq plugins` shows more"
            for one in self.reports
            if one["failure"]
        ]

    def factory_of(self, dispatcher: str) -> str:
        """``module:attribute`` of a built-in dispatcher. Raises StartFailed with what failed."""
        for one in self._dispatchers:
            if one["built_in"] and one["name"] == dispatcher:
                return str(one["factory"])
        failures = "; ".join(self.failures())
        raise StartFailed(f"no built-in plugin has the dispatcher {dispatcher}: {failures}", CliExit.START_FAILED)

    def plugin_roles(self) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
        """``(dispatchers, workers)`` of third parties. Those that do not fit into the control block are reported."""
        dispatchers, workers = [], []
        slot = FIRST_PLUGIN_DISPATCHER_SLOT
        for one in self._dispatchers:
            if one["built_in"] and one["name"] in FIXED_DISPATCHER_SLOTS:
                continue
            if slot >= DISPATCHER_SLOTS:
                self._fail(
                    one["plugin"], f"a node runs {DISPATCHER_SLOTS} dispatchers at most, {one['name']} is omitted"
                )
                continue
            dispatchers.append(
                ProcessSpec(
                    f"dispatcher-{one['name']}",
                    DISPATCHER_MODULE,
                    DISPATCHER_BASE + slot,
                    essential=False,
                    plugin=one["plugin"],
                    dispatcher=one["name"],
                    dispatcher_slot=slot,
                    params={
                        "dispatcher_slot": slot,
                        "factory": one["factory"],
                        "can_undo": one["can_undo"],
                        "plugin": one["plugin"],
                    },
                )
            )
            slot += 1
        for number, one in enumerate(self._workers):
            if WORKER_BASE + number >= WORKER_SLOTS:
                self._fail(one["plugin"], f"there is no room for another worker, {one['name']} is omitted")
                continue
            workers.append(
                ProcessSpec(
                    f"worker-{one['name']}",
                    PLUGIN_WORKER_MODULE,
                    WORKER_BASE + number,
                    essential=False,
                    plugin=one["plugin"],
                    params={
                        "factory": one["factory"],
                        "plugin": one["plugin"],
                        "is_server": one.get("is_server", False),
                    },
                    listens=bool(one.get("is_server") or one.get("listeners")),
                )
            )
        return dispatchers, workers

    def _fail(self, plugin: str, why: str) -> None:
        for report in self.reports:
            if report["name"] == plugin and not report["failure"]:
                report["failed_in"], report["failure"] = "registration", why


def _why(report: Mapping[str, Any]) -> str:
    return str(report["failure"].strip().splitlines()[-1])


def start_order(config: NodeConfig) -> dict[str, str]:
    """Module of each of the node's own roles, in start order; they stop in the reverse order."""
    return {
        "recovery": "commitmq.workers.recovery",
        "coordinator": "commitmq.workers.coordinator",
        f"dispatcher-{CONSUME_QUEUE}": DISPATCHER_MODULE,
        **({"dispatcher-index": DISPATCHER_MODULE} if config.index.enable else {}),
        "reput": "commitmq.workers.reput",
        "flush": "commitmq.workers.flush",
        "allocate": "commitmq.workers.allocate",
        **({"dispatcher-memory": "commitmq.workers.memory"} if config.memory.enable else {}),
        **{f"reader-{number}": "commitmq.workers.reader.process" for number in range(config.reader.count)},
        "cleanup": "commitmq.workers.cleanup",
        "writer": "commitmq.workers.writer.process",
        # Movers append through the writer: they start after it and stop before it.
        **{mover.role: mover.module for mover in movers.MOVERS if getattr(config, mover.role).enable},
    }
