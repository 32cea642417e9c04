"""The settings of a node that runs: its configuration, changes by ``config set``, and the file that keeps those.

``commitmq/settings.json``: ``{"settings": {"section.key": {"value", "set_ms", "life"}}}``. A change is durable in this
file before any process hears of it, so a process that dies in the meantime comes back with it. At a start the file goes
over the defaults, the configuration file and the environment. ``--set`` of that start goes over it: what an operator
types at a start counts. But a supervisor that its keeper starts again belongs to the same *life* of the node, and then
the change counts, which is newer than that start.

A kept setting that this version does not know, or that does not fit the others any more, is omitted with a warning. It
never keeps a node from starting.

The admin socket's operations on settings: ``config.show``, ``config.set``, ``config.unset``.

A change is kept in a file first (:mod:`commitmq.supervision.live_settings`), then sent to every process over its
lifeline. The answer comes when all of them have taken it, or after :data:`PATIENCE_MS` with the names of those that
have not: they take it as soon as they come to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from commitmq.config import NodeConfig, from_mapping, validated
from commitmq.config.loading import flat, live_keys, with_text
from commitmq.config.schema import of_profile
from commitmq.errors import ConfigError, ProtocolError, StoreError
from commitmq.files import atomic_file
from commitmq.log import Log
from commitmq.protocol import wire
from commitmq.supervision.admin_socket import AdminSocket, Handler
from commitmq.supervision.process_table import ProcessTable
from commitmq.workers.runtime.context import monotonic_ms

SOURCE: Final = "config set"
_SECRETS: Final = ("secret", "password", "token")
_MAX_TEXT_CHARACTERS: Final = 4_096
_DEFAULTS: Final = dict(flat(NodeConfig()))  # without a profile


class LiveSettings:
    """The configuration of a supervisor. ``config`` is the present one; ``notes`` are sentences for the start."""

    def __init__(self, path: Path, config: NodeConfig, life: str) -> None:
        """``config`` is the one that the node was started with. Reads the file at ``path``; never raises for it."""
        self._path, self._started, self._life = path, config, life
        self.notes: list[str] = []
        self._kept = self._read()
        self.config = self._laid_over(config)
        self._asked = self.config

    def fitted(self, config: NodeConfig) -> None:
        """Take ``config``: the same with the store's sizes."""
        self.config = config

    def set(self, name: str, text: str) -> NodeConfig:
        """Keep the value that ``text`` writes for the live setting ``name``; returns the new configuration.

        Raises ConfigError for a name or a value that cannot be, or a setting that is not live; StoreError when the
        change cannot be kept. Nothing has changed then.
        """
        self._check(name)
        if len(text) > _MAX_TEXT_CHARACTERS:
            raise ConfigError(f"config set: the value of {name} has more than {_MAX_TEXT_CHARACTERS} characters")
        config = validated(with_text(self.config, name, text, SOURCE))
        value = dict(flat(config))[name]
        kept = {"value": value, "set_ms": time.time_ns() // 1_000_000, "life": self._life}
        return self._take(config, {**self._kept, name: kept}, {**self.config.sources, name: SOURCE})

    def unset(self, name: str) -> NodeConfig:
        """Give up a change: the value is again the one of file, environment or ``--set``. Raises as :meth:`set`."""
        self._check(name)
        section, _, key = name.partition(".")
        value = dict(flat(self._started))[name]
        config = validated(from_mapping({section: {key: value}}, base=self.config, where=SOURCE))
        sources = {one: source for one, source in self.config.sources.items() if one != name}
        if name in self._started.sources:
            sources[name] = self._started.sources[name]
        return self._take(config, {one: kept for one, kept in self._kept.items() if one != name}, sources)

    def is_undone_by_a_start(self, name: str) -> bool:
        """Whether the next start with the same arguments takes the value of its ``--set``."""
        return name in self._kept and self._started.sources.get(name) == "--set"

    def rows(self) -> list[dict[str, Any]]:
        """Each setting: key, value, default (of the profile; None for plugins), source, and whether it is live."""
        defaults = dict(flat(of_profile(self.config.profile)))
        asked = dict(flat(self._asked))
        rows = []
        for name, value in flat(self.config):
            source = self.config.sources.get(name, "")
            if name not in live_keys() and value != asked.get(name, value):
                source = "the store's files"
            elif not source:
                source = "default" if value == _DEFAULTS.get(name) else f"profile {self.config.profile}"
            if name.startswith("plugins.") and any(word in name.lower() for word in _SECRETS):
                value = "***"
            rows.append(
                {
                    "key": name,
                    "value": value,
                    "default": defaults.get(name),
                    "source": source,
                    "live": name in live_keys(),
                }
            )
        return rows

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.rows() if row["key"] == name)

    # ------------------------------------------------------------ the file

    def _take(self, config: NodeConfig, kept: dict[str, Any], sources: Mapping[str, str]) -> NodeConfig:
        try:
            atomic_file.replace(self._path, orjson.dumps({"settings": kept}, option=orjson.OPT_INDENT_2), "settings")
        except OSError as error:
            raise StoreError(
                f"the change cannot be kept: {error.strerror}; nothing was changed", path=self._path
            ) from error
        self._kept = kept
        self.config = replace(config, sources=sources)
        return self.config

    def _read(self) -> dict[str, Any]:
        try:
            data = orjson.loads(self._path.read_bytes())["settings"]
            return {str(name): dict(kept) for name, kept in data.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.notes.append(f"{self._path} cannot be read, so changes by `commitmq config set` do not count: {error}")
            return {}

    def _laid_over(self, config: NodeConfig) -> NodeConfig:
        """``config`` with the kept values. They were right together, in whatever order they came; so they are checked
        together, and one by one only if the rest of the configuration is another one now.
        """
        changed = config
        fit = []
        for name, kept in self._kept.items():
            value = kept.get("value")
            if config.sources.get(name) == "--set" and kept.get("life") != self._life:
                if value != dict(flat(config)).get(name):
                    self.notes.append(f"--set {name} counts, not the value that `commitmq config set` kept")
                continue
            try:
                if name not in live_keys():
                    raise ConfigError(f"{name} is no setting that can be changed while a node runs")
                changed = self._with(changed, name, value)
                fit.append((name, value))
            except ConfigError as error:
                self._leave_out(error)
        try:
            return validated(changed)
        except ConfigError:
            changed = config
        for name, value in fit:
            try:
                changed = validated(self._with(changed, name, value))
            except ConfigError as error:
                self._leave_out(error)
        return changed

    def _with(self, config: NodeConfig, name: str, value: Any) -> NodeConfig:
        section, _, key = name.partition(".")
        changed = from_mapping({section: {key: value}}, base=config, where=str(self._path))
        return replace(changed, sources={**config.sources, name: SOURCE})

    def _leave_out(self, error: ConfigError) -> None:
        self.notes.append(f"a change by `commitmq config set` is omitted: {error}")

    def _check(self, name: str) -> None:
        """Raise ConfigError unless ``name`` is a live setting."""
        if name in live_keys():
            return
        if name in dict(flat(self.config)) or name.startswith("plugins."):
            raise ConfigError(
                f"{name} cannot be changed while the node runs: change it in the configuration file, the environment or"
                " --set, and restart the node"
            )
        section, _, key = name.partition(".")
        known = {one.name for one in fields(self.config)}
        if section in known and hasattr(getattr(self.config, section), "__dataclass_fields__"):
            keys = ", ".join(one.name for one in fields(getattr(self.config, section)))
            raise ConfigError(f"there is no setting {section}.{key}; keys of [{section}] are {keys}")
        raise ConfigError(f"there is no setting {name!r}; `commitmq config show` lists them")


PATIENCE_MS: Final = 5_000
_MAX_WAITING: Final = 1_000
_USERS_MS: Final = 500


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class _PendingChange(NamedTuple):
    """An answer that waits until the processes have taken a change."""

    peer: bytes
    identity: int
    version: int
    deadline_ms: int
    fields: dict[str, Any]


class SettingsOperations:
    """Handlers for the admin socket. :meth:`attach` comes before the first request is served."""

    def __init__(self, settings: LiveSettings, users: Path, check_serves: Callable[[], None], log: Log) -> None:
        """``users``: the file of users. ``check_serves`` raises ProtocolError while the node starts or stops."""
        self._settings, self._check_serves, self._log = settings, check_serves, log
        self._users, self._users_seen, self._users_at_ms = users, _state(users), 0
        self.handlers: dict[str, Handler] = {
            "config.show": self._show,
            "config.set": self._set,
            "config.unset": self._unset,
        }
        self._waiting: list[_PendingChange] = []

    def attach(self, table: ProcessTable, admin: AdminSocket, takers: list[Callable[[NodeConfig], None]]) -> None:
        """``takers`` are called with each new configuration, before the workers hear of it."""
        self._table, self._admin, self._takers = table, admin, takers
        admin.settings = self._value

    def tick(self, now_ms: int) -> None:
        """Answer the changes that all processes have taken, or that have waited long enough. Tell all processes of a file of
        users that has changed: it has quotas.
        """
        if now_ms >= self._users_at_ms:
            self._users_at_ms = now_ms + _USERS_MS
            if (seen := _state(self._users)) != self._users_seen:
                self._users_seen = seen
                self._table.configure(self._settings.config)
        if not self._waiting:
            return
        missing = self._table.without_settings()
        left = []
        for one in self._waiting:
            if missing and now_ms < one.deadline_ms:
                left.append(one)
            else:
                self._admin.send(one.peer, wire.ok(one.identity, not_yet=missing, **one.fields))
        self._waiting = left

    def _show(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        return wire.ok(header["id"], settings=self._settings.rows())

    def _set(self, peer: bytes, header: dict[str, Any]) -> bytes | None:
        name, text = header.get("key"), header.get("value")
        if not isinstance(name, str) or not isinstance(text, str):
            raise ProtocolError("INVALID_PARAMETER", "config.set takes key and value, both texts")
        return self._change(peer, header["id"], name, lambda: self._settings.set(name, text))

    def _unset(self, peer: bytes, header: dict[str, Any]) -> bytes | None:
        name = header.get("key")
        if not isinstance(name, str):
            raise ProtocolError("INVALID_PARAMETER", "config.unset takes key, a text")
        return self._change(peer, header["id"], name, lambda: self._settings.unset(name))

    def _value(self, name: str) -> Any:
        return next((row["value"] for row in self._settings.rows() if row["key"] == name), None)

    def _change(self, peer: bytes, identity: int, name: str, change: Callable[[], NodeConfig]) -> bytes | None:
        self._check_serves()
        if len(self._waiting) >= _MAX_WAITING:
            raise ProtocolError(
                "SYSTEM_BUSY", "too many changes of settings wait for the processes", retry_after_ms=1_000
            )
        before = self._value(name)
        try:
            config = change()
        except ConfigError as error:
            raise ProtocolError("INVALID_PARAMETER", str(error)) from error
        except StoreError as error:
            raise ProtocolError("SYSTEM_ERROR", str(error)) from error
        row = self._settings.row(name)
        self._log.info("setting changed", key=name, before=before, now=row["value"], source=row["source"])
        for take in self._takers:
            take(config)
        self._table.configure(config)
        fields = {**row, "before": before, "until_restart": self._settings.is_undone_by_a_start(name)}
        self._waiting.append(_PendingChange(peer, identity, self._table.settings, monotonic_ms() + PATIENCE_MS, fields))
        self.tick(monotonic_ms())
        return None
