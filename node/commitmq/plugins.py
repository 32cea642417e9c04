"""Finding plugins: the built-in ones by module name, third parties by the entry-point group ``commitmq``.

A plugin that cannot be imported is named with its distribution and traceback, and left out; the node runs on.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import metadata

import pluggy

from commitmq import hookspecs
from commitmq.config import NodeConfig
from commitmq.hookspecs import DispatcherSpec

BUILT_IN = ("commitmq_dispatchers.consume_queue",)
ENTRY_POINT_GROUP = "commitmq"
OWN_DISTRIBUTION = "commitmq"


@dataclass(slots=True)
class PluginReport:
    """What became of one plugin. ``failure`` is None, or the traceback of why it is left out."""

    name: str
    distribution: str
    version: str
    hooks: list[str] = field(default_factory=list)
    failure: str | None = None


@dataclass(slots=True)
class Plugins:
    """The loaded plugins and the report on every one that was found."""

    manager: pluggy.PluginManager
    reports: list[PluginReport]

    def dispatchers(self, config: NodeConfig) -> list[DispatcherSpec]:
        """All dispatchers, the built-in ConsumeQueue first. A plugin whose hook raises is left out and reported."""
        found: list[DispatcherSpec] = []
        for implementation in self.manager.hook.commitmq_dispatchers.get_hookimpls():
            report = next((one for one in self.reports if one.name == implementation.plugin_name), None)
            try:
                specs: list[DispatcherSpec] = list(implementation.function(config))  # type: ignore[call-overload]
            except Exception:
                if report is None or report.distribution == OWN_DISTRIBUTION:
                    raise
                report.failure = traceback.format_exc()
                continue
            for spec in specs:
                if any(other.name == spec.name for other in found):
                    if report is not None:
                        report.failure = f"a dispatcher named {spec.name!r} exists already"
                    continue
                found.append(spec)
        found.sort(key=lambda spec: spec.name != "consume_queue")
        return found


@lru_cache(maxsize=1)
def load() -> Plugins:
    """Import and register every plugin, each on its own. Cached for the life of the process."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    reports: list[PluginReport] = []
    own_version = _own_version()
    for module_name in BUILT_IN:
        report = PluginReport(module_name, OWN_DISTRIBUTION, own_version)
        _register(manager, report, partial(importlib.import_module, module_name))
        reports.append(report)
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = point.dist
        report = PluginReport(
            point.name,
            distribution.name if distribution is not None else "unknown",
            distribution.version if distribution is not None else "unknown",
        )
        _register(manager, report, point.load)
        reports.append(report)
    return Plugins(manager, reports)


def _register(manager: pluggy.PluginManager, report: PluginReport, load_module: Callable[[], object]) -> None:
    try:
        plugin = load_module()
        manager.register(plugin, report.name)
        report.hooks = sorted(caller.name for caller in manager.get_hookcallers(plugin) or [])
    except Exception:
        report.failure = traceback.format_exc()


def _own_version() -> str:
    try:
        return metadata.version("commitmq")
    except metadata.PackageNotFoundError:
        return "source"


def resolve(factory: str) -> object:
    """The object that ``module:attribute`` names. Raises ImportError or AttributeError."""
    module_name, _, attribute = factory.partition(":")
    return getattr(importlib.import_module(module_name), attribute)
