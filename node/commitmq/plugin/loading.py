"""Finds and loads plugins.

Built-in plugins are found by module name, third parties' by the entry-point group ``commitmq``, and plugins under
development that are not installed by the variable ``COMMITMQ_PLUGINS="name=module,…"``.

Each plugin is loaded by itself. A plugin that cannot be imported, does not fit the hooks or raises in one is reported
with its distribution and traceback and omitted (a hook that raises leaves out only that hook's part); the rest goes
on. This module cannot survive an import that hangs or ends the process; :mod:`commitmq.supervision.discovery` handles
that.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import metadata
from typing import Any

import pluggy

from commitmq.config import NodeConfig, section_from
from commitmq.errors import ConfigError
from commitmq.plugin import hookspecs
from commitmq.plugin.hookspecs import HOOK_API_VERSION, ConfigSection, DispatcherSpec, FilterSpec, WorkerSpec

BUILT_IN = (
    "commitmq_dispatchers.consume_queue",
    "commitmq_dispatchers.index",
    "commitmq_dispatchers.memory",
    "commitmq_plugins.sql92",
    "commitmq_plugins.rocketmq",
    "commitmq_plugins.metrics",
    "commitmq_plugins.dashboard",
    "commitmq_plugins.spark",
)
ENTRY_POINT_GROUP = "commitmq"
OWN_DISTRIBUTION = "commitmq"
OWN_DISPATCHERS = ("consume_queue", "index", "memory")
PLUGINS_VARIABLE = "COMMITMQ_PLUGINS"
TAG_FILTER = "TAG"
API_ATTRIBUTE = "COMMITMQ_HOOK_API"
_MAX_TRACEBACK_CHARS = 8_000


@dataclass(slots=True)
class PluginReport:
    """The result of loading one plugin. ``failure`` is None, or the traceback (or sentence) of the first failure, and
    ``failed_in`` is then ``import``, ``registration`` or the hook's name.
    """

    name: str
    distribution: str
    version: str
    hooks: list[str] = field(default_factory=list)
    failure: str | None = None
    failed_in: str | None = None

    def fail(self, where: str, why: str) -> None:
        """Note the first failure; later ones are mostly its consequences."""
        if self.failure is None:
            self.failed_in, self.failure = where, why[-_MAX_TRACEBACK_CHARS:]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "hooks": self.hooks,
            "failed_in": self.failed_in,
            "failure": self.failure,
        }

    @property
    def is_built_in(self) -> bool:
        return self.distribution == OWN_DISTRIBUTION


@dataclass(slots=True)
class LoadedPlugins:
    """The loaded plugins, and a report on each that was found. ``before`` gets the plugin whose hook is next."""

    manager: pluggy.PluginManager
    reports: list[PluginReport]
    before: Callable[[str], None] = lambda _name: None

    def call(self, hook: str, *, only: str = "", **arguments: Any) -> Iterator[tuple[PluginReport, list[Any]]]:
        """``(plugin, the result of its implementation of hook, as a list)`` for each plugin that has one. ``only``
        names one plugin to ask. A plugin that raises, or returns no list, is reported and skipped.
        """
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            report = next(one for one in self.reports if one.name == implementation.plugin_name)
            if only and only != report.name:
                continue
            self.before(report.name)
            try:
                values = implementation.function(*(arguments[name] for name in implementation.argnames))
                found = [] if values is None else [values] if isinstance(values, ConfigSection) else list(values)
            except (Exception, SystemExit):
                report.fail(hook, traceback.format_exc())
                continue
            yield report, found

    def dispatchers(self, config: NodeConfig) -> list[tuple[PluginReport, DispatcherSpec]]:
        """All dispatchers with their plugins, the built-in ConsumeQueue first."""
        found = self._named("commitmq_dispatchers", DispatcherSpec, config)
        found.sort(key=lambda pair: pair[1].name != "consume_queue")
        return found

    def workers(self, config: NodeConfig) -> list[tuple[PluginReport, WorkerSpec]]:
        return self._named("commitmq_workers", WorkerSpec, config)

    def _named(self, hook: str, kind: type[Any], config: NodeConfig) -> list[Any]:
        """All objects of ``kind`` that ``hook`` returns. Names must be unique and fit for files and endpoints."""
        found: list[Any] = []
        for report, specs in self.call(hook, config=config):
            for spec in specs:
                trouble = ""
                if not isinstance(spec, kind):
                    trouble = f"it must return a list of {kind.__name__}, there is {spec!r:.100} in it"
                elif not is_name(spec.name):
                    trouble = f"{spec.name!r:.100} is no name: up to 40 of a-z, 0-9 and _, a letter first"
                elif not isinstance(spec.factory, str) or ":" not in spec.factory:
                    trouble = f"the factory {spec.factory!r:.200} must be module:attribute"
                elif any(other.name == spec.name for _, other in found):
                    trouble = f"something of the name {spec.name!r} exists already"
                elif spec.name in OWN_DISPATCHERS and kind is DispatcherSpec and not report.is_built_in:
                    # Also while the node's own is switched off: it would find the other's position when it is switched
                    # on again.
                    trouble = f"the name {spec.name!r} is taken by a dispatcher of the node's own"
                elif getattr(spec, "stores_topics", False) and not report.is_built_in:
                    trouble = f"{spec.name!r} stores topics: only the node's own memory topics do so far"
                if trouble:
                    report.fail(hook, trouble)
                else:
                    found.append((report, spec))
        return found

    def filters(self, config: NodeConfig) -> list[tuple[PluginReport, FilterSpec]]:
        """All filter types. Their names occur only in requests, so they need not look like those of processes."""
        found: list[tuple[PluginReport, FilterSpec]] = []
        for report, specs in self.call("commitmq_filters", config=config):
            for spec in specs:
                trouble = ""
                if not isinstance(spec, FilterSpec):
                    trouble = f"it must return a list of FilterSpec, there is {spec!r:.100} in it"
                elif not isinstance(spec.type, str) or not 0 < len(spec.type) <= 40 or not spec.type.isprintable():
                    trouble = f"{spec.type!r:.100} is no type of filter: up to 40 characters"
                elif not isinstance(spec.factory, str) or ":" not in spec.factory:
                    trouble = f"the factory {spec.factory!r:.200} must be module:attribute"
                elif spec.type == TAG_FILTER or any(other.type == spec.type for _, other in found):
                    trouble = f"there is a filter of type {spec.type!r} already"
                if trouble:
                    report.fail("commitmq_filters", trouble)
                else:
                    found.append((report, spec))
        return found

    def sections(self) -> list[tuple[PluginReport, ConfigSection]]:
        """The configuration sections of all plugins, one for each that has one."""
        found: list[tuple[PluginReport, ConfigSection]] = []
        for report, sections in self.call("commitmq_config"):
            for section in sections[:1]:
                if not isinstance(section, ConfigSection):
                    report.fail("commitmq_config", f"it must return a ConfigSection, not {section!r:.100}")
                elif any(other.name == section.name for _, other in found):
                    report.fail("commitmq_config", f"a section named {section.name!r} exists already")
                else:
                    try:
                        section_from(section.schema, {}, f"plugins.{section.name}")
                    except Exception:
                        report.fail("commitmq_config", traceback.format_exc())
                        continue
                    found.append((report, section))
        return found

    def check_config(self, config: NodeConfig) -> list[str]:
        """A sentence for every value in ``config.plugins`` that no plugin takes."""
        sections = {section.name: section for _, section in self.sections()}
        broken = [report.name for report in self.reports if report.failure]
        troubles = []
        for name, values in config.plugins.items():
            section = sections.get(name)
            if section is None:
                # The section of a plugin that could not be loaded is not the fault of the configuration's author.
                if not broken:
                    known = ", ".join(sections) or "none"
                    troubles.append(f"no plugin has a section [plugins.{name}]; sections of plugins: {known}")
                continue
            try:
                section_from(section.schema, values, f"plugins.{name}")
            except ConfigError as error:
                troubles.append(str(error))
        return troubles


def is_name(name: object) -> bool:
    """True for a valid name of a dispatcher or a worker: it becomes part of file and socket names."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 40
        and name[0].isascii()
        and name[0].islower()
        and all(one.isascii() and (one.islower() or one.isdigit() or one == "_") for one in name)
    )


@lru_cache(maxsize=1)
def load() -> LoadedPlugins:
    """Import and register every plugin, each on its own. Cached for the life of the process."""
    return load_each(candidates())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plugin that was found and not yet imported."""

    name: str
    distribution: str
    version: str
    load: Callable[[], object]


def candidates() -> list[Candidate]:
    """The built-in plugins, those of ``COMMITMQ_PLUGINS`` and every entry point of the group, without importing any. A
    plugin of the variable replaces an installed one of the same name: a developer means the newer code.
    """
    own = _own_version()
    found = [Candidate(name, OWN_DISTRIBUTION, own, partial(importlib.import_module, name)) for name in BUILT_IN]
    for part in filter(None, (piece.strip() for piece in os.environ.get(PLUGINS_VARIABLE, "").split(","))):
        name, _, module = (piece.strip() for piece in part.partition("="))
        found.append(Candidate(name, PLUGINS_VARIABLE, "-", partial(_import_named, part, module)))
    named = {one.name for one in found if one.distribution == PLUGINS_VARIABLE}
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name in named:
            continue
        distribution = point.dist
        found.append(
            Candidate(
                point.name,
                distribution.name if distribution is not None else "unknown",
                distribution.version if distribution is not None else "unknown",
                point.load,
            )
        )
    return found


def _import_named(part: str, module: str) -> object:
    if not module:
        raise ValueError(f"{PLUGINS_VARIABLE}: {part!r} is not name=module")
    return importlib.import_module(module)


def load_each(
    found: Iterable[Candidate],
    *,
    before: Callable[[Candidate], None] = lambda _candidate: None,
    leave_out: Mapping[str, str] | None = None,
) -> LoadedPlugins:
    """Load ``found``, calling ``before`` with each; those in ``leave_out`` (name: why) are reported and not touched."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    reports: list[PluginReport] = []
    for candidate in found:
        report = PluginReport(candidate.name, candidate.distribution, candidate.version)
        reports.append(report)
        if any(other.name == report.name for other in reports[:-1]):
            report.fail("registration", f"another plugin is called {report.name!r} too; the first one is used")
            continue
        if leave_out and candidate.name in leave_out:
            report.fail("import", leave_out[candidate.name])
            continue
        before(candidate)
        try:
            plugin = candidate.load()
        except (Exception, SystemExit):
            report.fail("import", traceback.format_exc())
            continue
        _register(manager, report, plugin)
    return LoadedPlugins(manager, reports)


def _register(manager: pluggy.PluginManager, report: PluginReport, plugin: object) -> None:
    version = getattr(plugin, API_ATTRIBUTE, HOOK_API_VERSION)
    if version != HOOK_API_VERSION:
        sentence = f"it is written for version {version!r:.20} of the hooks, this node has version {HOOK_API_VERSION}"
        report.fail("registration", sentence)
        return
    try:
        manager.register(plugin, report.name)
        callers = manager.get_hookcallers(plugin) or []
        unknown = [caller.name for caller in callers if not caller.has_spec()]
        if unknown:
            known = ", ".join(sorted(name for name in vars(hookspecs) if name.startswith("commitmq_")))
            raise pluggy.PluginValidationError(plugin, f"there is no hook {', '.join(unknown)}; hooks are {known}")
    except Exception:
        report.fail("registration", traceback.format_exc())
        _forget(manager, plugin)
        return
    report.hooks = sorted(caller.name for caller in callers)


def _forget(manager: pluggy.PluginManager, plugin: object) -> None:
    """Remove the remains of a registration that failed half-way."""
    for caller in list(vars(manager.hook).values()):
        if isinstance(caller, pluggy.HookCaller) and any(one.plugin is plugin for one in caller.get_hookimpls()):
            caller._remove_plugin(plugin)
    for name in [name for name, one in manager.list_name_plugin() if one is plugin]:
        manager._name2plugin.pop(name, None)


def settings(config: NodeConfig, plugin: str) -> Any:
    """The validated section of the plugin called ``plugin`` as its own dataclass; None when it declares none. Imports
    that plugin only. Raises ConfigError when the values do not fit.
    """
    loaded = load_each([one for one in candidates() if one.name == plugin])
    for _, section in loaded.sections():
        return section_from(section.schema, config.plugins.get(section.name, {}), f"plugins.{section.name}")
    return None


def _own_version() -> str:
    try:
        return metadata.version("commitmq")
    except metadata.PackageNotFoundError:
        return "source"


def resolve(factory: str) -> object:
    """The object that ``module:attribute`` names. Raises ImportError or AttributeError."""
    module_name, _, attribute = factory.partition(":")
    return getattr(importlib.import_module(module_name), attribute)
