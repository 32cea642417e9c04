"""The start rule at a node's start, and what ``status`` says of listeners that were allowed to break it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq

from commitmq.config import NodeConfig
from commitmq.errors import StoreError
from commitmq.log import Log, get_log
from commitmq.network.guard import Guard, audit_log, make_guard
from commitmq.security import start_rule
from commitmq.security.access_file import AccessFile
from commitmq.security.native_rights import Vouching
from commitmq.security.node_keys import keep_node_keys, load_node_keys
from commitmq.security.start_rule import Listener
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import CliExit, StartFailed


class Exposure:
    """``node_key``: the public key with which the native protocol's tcp ports ask for keys; none if they do not.

    ``listeners``, ``warnings``: name and sentence of each listener that a network reaches without authentication or
    encryption. ``audit``: the supervisor's. ``vouching_key``: of this start, for the node's processes. ``users``: the path of
    the file of users.
    """

    def __init__(self, config: NodeConfig, store: Path) -> None:
        self._config, self._store, self._file = config, store, AccessFile(store)
        self._allowed = start_rule.allowed_names(config.security.insecure_listeners)
        self.users = self._file.path
        self.audit = audit_log(StoreLayout(store).audit, "supervisor", config, get_log("supervisor"))
        self.node_key = ""
        self.vouching_key = Vouching.draw()
        self.listeners: list[str] = []
        self.warnings: list[str] = []
        self._users_of: tuple[object, bool] = (None, False)

    @classmethod
    def of_node(cls, config: NodeConfig, store: Path) -> Exposure:
        """With the listener of the node's own protocol, checked as by :meth:`check`; and a file of users that can be used."""
        found = cls(config, store)
        found._file.load()
        keys = load_node_keys(store)
        found.node_key = keys.public if keys is not None else ""
        # Without users nobody gets in over a port with keys.
        remedy = "make node keys (`commitmq keys init`)"
        has_keys = keys is not None
        found.check([Listener(start_rule.NATIVE, config.network.host, has_keys, has_keys, remedy=remedy)])
        return found

    def security(self) -> dict[str, Any]:
        """``users``: whether the store has users, None when their file cannot be used. ``node_keys``: whether the node's ports
        ask for keys. ``faults``: a sentence for each file that is not as the node needs it.
        """
        faults: list[str] = []
        users: bool | None = None
        try:
            users = self._has_users()
        except StoreError as error:
            faults.append(str(error))
        try:
            keys = load_node_keys(self._store)
        except StoreError as error:
            faults.append(str(error))
        else:
            if self.node_key and keys is None:
                faults.append("the node's keys were removed while it runs: from its next start it has none")
            elif keys is not None and not self.node_key:
                faults.append("the store has node keys, and the node was started before: stop and start it")
            elif keys is not None and keys.public != self.node_key:
                faults.append(
                    f"the file of the node's keys is another one since its start: put back the one with the public key"
                    f" {self.node_key}, because a process that starts again refuses this one"
                )
        return {"users": users, "node_keys": bool(self.node_key), "faults": faults}

    def _has_users(self) -> bool:
        """Reads the file only when it has changed. Raises StoreError."""
        try:
            found = os.stat(self.users)
            state = found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
        except OSError:
            return not self._file.load().is_open
        if self._users_of[0] != state:
            self._users_of = state, not self._file.load().is_open
        return self._users_of[1]

    def guard_of(self, context: zmq.Context[zmq.Socket[bytes]], role: str, log: Log) -> Guard | None:
        """The guard of a process of the node that binds a port. Raises StoreError."""
        config, store = self._config, self._store
        if self.node_key:
            keep_node_keys(store)  # those of an earlier version, or of a `keys init` that died
        return make_guard(context, config, store, role, log, node_key=self.node_key, audit=self.audit)

    def check(self, listeners: Iterable[Listener]) -> None:
        """Call it before ``listeners`` are bound. Raises StartFailed, and StoreError when the file of users cannot be used."""
        off_loopback = [one for one in listeners if not start_rule.is_loopback(one.host)]
        if not off_loopback:
            return
        has_users = not self._file.load().is_open
        if sentence := start_rule.refusal(off_loopback, self._allowed, has_users=has_users):
            raise StartFailed(sentence, CliExit.INSECURE_LISTENER)
        for one in start_rule.exposed(off_loopback, has_users=has_users):
            self.listeners.append(one.name)
            self.warnings.append(start_rule.warning(one, has_users=has_users))
