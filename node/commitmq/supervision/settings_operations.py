"""The admin socket's operations on settings: ``config.show``, ``config.set``, ``config.unset``.

A change is kept in a file first (:mod:`commitmq.supervision.live_settings`), then sent to every process over its lifeline.
The answer comes when all of them have taken it, or after :data:`PATIENCE_MS` with the names of those that have not: they
take it as soon as they come to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from commitmq.config import NodeConfig
from commitmq.errors import ConfigError, ProtocolError, StoreError
from commitmq.log import Log
from commitmq.protocol import wire
from commitmq.supervision.admin_socket import AdminSocket, Handler
from commitmq.supervision.live_settings import LiveSettings
from commitmq.supervision.process_table import ProcessTable
from commitmq.workers.runtime.context import monotonic_ms

PATIENCE_MS: Final = 5_000
_MAX_WAITING: Final = 1_000
_USERS_MS: Final = 500


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class _Waiting(NamedTuple):
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
        self._waiting: list[_Waiting] = []

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
        self._waiting.append(_Waiting(peer, identity, self._table.settings, monotonic_ms() + PATIENCE_MS, fields))
        self.tick(monotonic_ms())
        return None
