"""``config/security/acl.json``: the file of users and policies.

It is changed as ``authorized_keys`` is: whoever may write the store's files may change it, while a node runs or none does. A
lock beside it lets one change happen at a time; each replaces the file in one step. Processes that serve clients read it
again when it has changed (:mod:`commitmq.security.live_access`).

Once it is there it must stay, with users: ``configured`` beside it says that there are some. Without the file, or with one
that has no user, every start is refused, because a node without users lets everybody in. No change takes the last user away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import orjson

from commitmq.errors import StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.no_space import kind_of
from commitmq.security.access_changes import this_account, written_down
from commitmq.security.access_table import AccessTable
from commitmq.security.audit_line import Actor

_MODE: Final = 0o600
MAX_FILE_BYTES: Final = 64 * 1024 * 1024


class AccessFile:
    """The file of the store in the folder ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root / "config" / "security"
        self.path = self.folder / "acl.json"
        self._configured = self.folder / "configured"

    def load(self) -> AccessTable:
        """The table; an open one when there never were users. Raises StoreError."""
        try:
            with open(self.path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            if self._configured.exists():
                raise StoreError(
                    "the file of users is missing, and without it everybody would be let in. Put back a copy; or remove"
                    f" {self._configured} too, and the node has no users",
                    path=self.path,
                ) from None
            return AccessTable()
        except OSError as error:
            raise StoreError(f"cannot read the file of users: {error.strerror}", path=self.path) from error
        if len(data) > MAX_FILE_BYTES:
            raise StoreError(f"the file of users has more than {MAX_FILE_BYTES} bytes", path=self.path)
        try:
            table = AccessTable.from_json(orjson.loads(data))
        except ValueError as error:
            raise StoreError(
                f"the file of users is damaged: {error}. Put back a copy; nothing was changed", path=self.path
            ) from None
        if table.is_open and self._configured.exists():
            raise StoreError(
                "the file of users has no user, although there were some, and everybody would be let in. Put back a copy; or"
                f" remove {self._configured} too, and the node has no users",
                path=self.path,
            )
        return table

    def change(self, apply: Callable[[AccessTable], None], by: Actor | None = None) -> AccessTable:
        """Let ``apply`` change a copy of the table, and make that the file. What ``apply`` raises changes nothing. ``by``: who
        asks, for the audit log, which has the change first; this process's account if nobody is named.

        Raises StoreError, DiskFullError: the file is the old one, or, when only the folder's sync failed, the new one, which a
        power cut may take back.
        """
        try:
            if (owner := os.stat(self._root).st_uid) != os.geteuid():
                raise StoreError(
                    f"users are changed by the store's owner, uid {owner}, who runs its node", path=self.path
                )
            self.folder.parent.mkdir(mode=0o700, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            # A power cut must not take the folder: a store without it lets everybody in.
            disk.sync_folder(self.folder.parent)
            disk.sync_folder(self._root)
            with self._locked():
                former = self.load()
                table = former.copy()
                apply(table)
                if table.is_open and not former.is_open:
                    raise StoreError("the last user stays: without users everybody would be let in", path=self.path)
                data = orjson.dumps(table.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
                with written_down(self._root, by or this_account(), former, table, lambda: self._holds(data)):
                    atomic_file.replace(self.path, data, "acl", mode=_MODE)
                if not table.is_open and not self._configured.exists():
                    with disk.opened(self._configured, os.O_WRONLY | os.O_CREAT, "acl_configured", _MODE):
                        pass
                    disk.sync_folder(self.folder, "acl_configured")
                return table
        except OSError as error:
            raise kind_of(error)(f"cannot change the file of users: {error.strerror}", path=self.path) from error

    def _holds(self, data: bytes) -> bool | None:
        try:
            return self.path.read_bytes() == data
        except FileNotFoundError:
            return False
        except OSError:
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Wait for others that change the file. The lock ends with the process, however that ends."""
        with disk.opened(self.folder / "lock", os.O_RDWR | os.O_CREAT, "acl_lock", _MODE) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
