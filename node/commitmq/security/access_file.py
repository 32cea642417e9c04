"""``config/security/acl.json``: the file of users and policies.

It is changed as ``authorized_keys`` is: whoever may write the store's files may change it, while a node runs or none does. A
lock beside it lets one change happen at a time; each replaces the file in one step. Processes that serve clients read it
again when it has changed (:mod:`commitmq.security.access_file`).

Once it is there it must stay, with users: ``configured`` beside it says that there are some. Without the file, or with one
that has no user, every start is refused, because a node without users lets everybody in. No change takes the last user away.

``security.access_file``: which accounts of the machine are which users, over the local sockets.

All users and their policies, and decisions about them, which are made once each.

What a change of users and policies was, for the audit log: without secrets, of which it says only that they changed.

The table of users as a running process sees it: read again when the file has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq.errors import ConfigError, StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.disk_space import kind_of
from commitmq.log import Log, get_log
from commitmq.security.audit import SUMMARY, Actor, AuditLimits, AuditLog, Event
from commitmq.security.policy import (
    Action,
    Decision,
    Policies,
    Quota,
    Resource,
    User,
    check_name,
    decide,
    parse_address,
)

_EXAMPLE: Final = "1001=shop;reports=reader"


def parse_local_users(text: str) -> dict[int, str]:
    """``ACCOUNT=USER`` pairs with ``;`` between; an account is a number or a name. Raises ConfigError."""
    found = {}
    for pair in (one.strip() for one in text.split(";")):
        if not pair:
            continue
        account, equals, user = (one.strip() for one in pair.partition("="))
        try:
            if not equals:
                raise ValueError
            found[_uid(account)] = check_name(user)
        except (ValueError, KeyError):
            raise ConfigError(
                f"security.local_users: {pair!r:.100} is no account of this machine and its user, as in {_EXAMPLE}"
            ) from None
    return found


def _uid(account: str) -> int:
    return int(account) if account.isdecimal() else pwd.getpwnam(account).pw_uid


_MOST_DECISIONS: Final = 100_000
_NONE: Final = Policies()


@dataclass(slots=True)
class AccessTable:
    """One state of the file of users. It does not change once it is asked; a change makes another table. ``version``
    grows by one with each change.
    """

    users: dict[str, User] = field(default_factory=dict)
    policies: dict[str, Policies] = field(default_factory=dict)
    version: int = 0
    _owners: dict[str, str] | None = field(default=None, repr=False, compare=False)
    _decided: dict[tuple[str, Resource, frozenset[Action], str], Decision] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked who they are: there are no users."""
        return not self.users

    def decide(self, name: str, resource: Resource, actions: Collection[Action], address: str) -> Decision:
        """Whether the user of that name, at the IP ``address``, may do one of ``actions``."""
        key = name, resource, frozenset(actions), address
        known = self._decided.get(key)
        if known is None:
            user = self.users.get(name)
            if user is None:
                return Decision(False, f"there is no user {name!r:.200}")
            known = decide(user, self.policies.get(name, _NONE), resource, actions, parse_address(address))
            if len(self._decided) >= _MOST_DECISIONS:
                self._decided.clear()
            self._decided[key] = known
        return known

    def may_somewhere(self, name: str, resource: Resource, actions: Collection[Action]) -> bool:
        """Whether any entry allows the user of that name one of ``actions``, from any address; another entry may deny it."""
        user, policies = self.users.get(name), self.policies.get(name, _NONE)
        if user is None or not user.is_enabled:
            return False
        entries = (*policies.custom, *policies.default)
        return user.is_super or any(
            one.allow and one.pattern.matches(resource) and one.does(actions) for one in entries
        )

    def owner_of(self, key: str) -> User | None:
        if self._owners is None:
            self._owners = {one: user.name for user in self.users.values() for one in user.keys}
        name = self._owners.get(key)
        return None if name is None else self.users.get(name)

    def copy(self) -> AccessTable:
        """Another table of the next version, to be changed."""
        return AccessTable(dict(self.users), dict(self.policies), self.version + 1)

    @classmethod
    def from_json(cls, members: Any) -> AccessTable:
        """Raises ValueError that names the place."""
        try:
            users, policies = members["users"], members["policies"]
            version = members["version"]
            if type(version) is not int or version < 0:
                raise ValueError(f"version must be a whole number, not {version!r:.100}")
            table = cls(version=version)
            for name, one in users.items():
                with place_of(f"user {name!r:.200}"):
                    table.users[name] = User.from_json(name, one)
            keys = [one for user in table.users.values() for one in user.keys]
            if len(set(keys)) < len(keys):
                raise ValueError("two users have the same key")
            for name, one in policies.items():
                with place_of(f"the policies of {name!r:.200}"):
                    if name not in table.users:
                        raise ValueError("there is no such user")
                    table.policies[name] = Policies.from_json(one)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it has not the shape of a file of users: {error!r:.300}") from None
        return table

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "users": {name: one.to_json() for name, one in self.users.items()},
            "policies": {name: one.to_json() for name, one in self.policies.items()},
        }


class place_of:
    """Turns every error of a member into a ValueError that names the member; never shows its value's secrets. ``shape``: whose
    shape a value of another type has not.
    """

    def __init__(self, name: str, shape: str = "") -> None:
        self._name, self._shape = name, shape

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError):
            raise ValueError(f"{self._name}: {error} is missing") from None
        if self._shape and isinstance(error, TypeError | AttributeError):
            raise ValueError(f"{self._name} has not the shape of {self._shape}") from None
        if isinstance(error, ValueError | TypeError | AttributeError):
            raise ValueError(f"{self._name}: {error}") from None


ROLE: Final = "users"
_KEY_CHARACTERS: Final = 12
_MOST_BYTES: Final = 1 << 30


def this_account() -> Actor:
    """The account of this process, which may write the store's files."""
    return Actor(f"uid {os.getuid()}", "file", "local")


@contextlib.contextmanager
def written_down(
    root: Path, actor: Actor, before: AccessTable, after: AccessTable, is_made: Callable[[], bool | None]
) -> Iterator[None]:
    """Write to the audit log of the store in ``root`` what the block is going to change; needs the lock of the users.

    ``is_made``: whether the change is there, although the block raised; None where that cannot be read. Raises StoreError
    where the audit log cannot be written: nobody would see that there was a change.
    """
    events = [*_users(actor, before, after), *_policies(actor, before, after)]
    # Only the store's owner changes users, with a sync for each change, and every line counts.
    limits = AuditLimits(changes_per_second=len(events), user_bytes_per_second=_MOST_BYTES)
    log = AuditLog(root / "commitmq" / "audit", ROLE, get_log(ROLE), limits, syncs_at_once=True)
    try:
        try:
            log.begin()
            _check(log)
            for one in events:
                log.write(one)
                _check(log)
            yield
        except BaseException as error:
            _tell(log, events, is_made(), f"{error}" or repr(error))
            raise
    finally:
        log.close()


def _check(log: AuditLog) -> None:
    if log.lost:
        raise StoreError(f"users stay as they are, because the change cannot be written down: {log.fault}")


def _tell(log: AuditLog, events: list[Event], is_there: bool | None, reason: str) -> None:
    """Write what became of a change that raised. Of one that was not made no line stays that has no ``failed`` behind it."""
    if is_there is not False:
        fate = "made, but a power cut may take it back" if is_there else "it cannot be read whether this was made"
        for one in events:
            log.write(replace(one, reason=f"{fate}: {reason}"))
        return
    for one in events:
        log.failed(one, reason)
        if log.lost:
            log.take_back()
            log.failed(Event(one.actor, SUMMARY), f"changes of users, {len(events)}, were not made: {reason}")
            break


def _users(actor: Actor, before: AccessTable, after: AccessTable) -> Iterator[Event]:
    for name in sorted(before.users.keys() | after.users.keys()):
        old, new = before.users.get(name), after.users.get(name)
        if old is not None and new is not None and old.keys != new.keys:
            yield from _keys(actor, old, new)
            old = replace(old, keys=new.keys)
        if old != new:
            operation = "user.add" if old is None else "user.delete" if new is None else "user.alter"
            now = _shown(new)
            if old is not None and new is not None and old.secret != new.secret:
                now = {**(now or {}), "secret": "another"}
            yield Event(actor, operation, f"User:{name}", before=_shown(old), after=now)


def _keys(actor: Actor, old: User, new: User) -> Iterator[Event]:
    shown = [{"keys": [one[:_KEY_CHARACTERS] for one in user.keys]} for user in (old, new)]
    if set(new.keys) - set(old.keys):
        yield Event(actor, "user.key.add", f"User:{new.name}", before=shown[0], after=shown[1])
    if set(old.keys) - set(new.keys):
        yield Event(actor, "user.key.remove", f"User:{new.name}", before=shown[0], after=shown[1])


def _shown(user: User | None) -> dict[str, Any] | None:
    if user is None:
        return None
    return {
        **user.shown(),
        "keys": [one[:_KEY_CHARACTERS] for one in user.keys],
        **user.shown_quotas(),
    }


def _policies(actor: Actor, before: AccessTable, after: AccessTable) -> Iterator[Event]:
    for name in sorted(before.policies.keys() | after.policies.keys()):
        old, new = before.policies.get(name), after.policies.get(name)
        if old != new:
            shown = [None if one is None else one.to_json() for one in (old, new)]
            yield Event(actor, "acl.change", f"User:{name}", before=shown[0], after=shown[1])


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


class UserQuotas:
    """The quotas of all users as a running process knows them.

    The supervisor sees that the file of users has changed, and tells every process as it tells changed settings; then
    this is recreated. So a request looks at nothing but dictionaries, and only where a user has a quota of its kind.

    ``bounds_sends``, ``bounds_pulls``: whether any user has a rate. ``bounds_connections``: whether any has
        a quota of connections or pending bytes, ``bounds_pending`` of these. ``bounds_names``: of topics or groups.
    """

    def __init__(self, root: Path, flow: object, log: Log) -> None:
        """Of the store in ``root``; ``flow``: the settings ``[flow]``. Never raises: without a file that can be read users
        have the quotas of the settings.
        """
        self._file, self._log = AccessFile(root), log
        self._of_all = Quota()
        self._own: dict[str, Quota] = {}
        self._users: dict[str, dict[str, int]] = {}
        self.look(flow)

    def look(self, flow: object) -> None:
        """Take the settings and the file of users as they are now. A file that cannot be read changes nothing."""
        try:
            users = self._file.load().users.values()
        except StoreError as error:
            self._log.error("the file of users cannot be used; the quotas of before stay", error=str(error))
        else:
            self._users = {one.name: dict(one.quotas) for one in users if one.quotas}
        of_all = Quota.of_settings(flow)
        self._own = {name: of_all.laid_over(quotas) for name, quotas in self._users.items()}
        self._of_all = of_all
        every = (of_all, *self._own.values())
        self.bounds_sends = any(one.send_messages_per_s or one.send_bytes_per_s for one in every)
        self.bounds_pulls = any(one.pull_messages_per_s or one.pull_bytes_per_s for one in every)
        self.bounds_connections = any(one.connections or one.pending_bytes for one in every)
        self.bounds_pending = any(one.pending_bytes for one in every)
        self.bounds_names = any(one.topics or one.groups for one in every)

    def of(self, user: str) -> Quota:
        """All quotas of ``user``."""
        return self._own.get(user, self._of_all)

    def sends(self, user: Any) -> tuple[int, int]:
        """The rates of what ``user`` sends: messages and bytes a second; 0 bounds nothing."""
        found = self._own.get(user, self._of_all)
        return found.send_messages_per_s, found.send_bytes_per_s

    def pulls(self, user: Any) -> tuple[int, int]:
        """The same of what ``user`` pulls."""
        found = self._own.get(user, self._of_all)
        return found.pull_messages_per_s, found.pull_bytes_per_s


LOOK_MS: Final = 200
"""A change acts after this time at most."""


class LiveAccess:
    """Raises StoreError when the file cannot be used at the start.

    Later a file that is missing, damaged or not readable changes nothing: the last table stays, the log tells once, and each
    look tries again. The threads of a process may share it.
    """

    def __init__(self, file: AccessFile, log: Log, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._file, self._log, self._clock_ns = file, log, clock_ns
        self._lock = threading.Lock()
        self._told = ""
        self._seen = self._state()
        self._table = file.load()
        self._next_ns = clock_ns() + LOOK_MS * 1_000_000

    def table(self) -> AccessTable:
        """The newest table, at most LOOK_MS old."""
        now_ns = self._clock_ns()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + LOOK_MS * 1_000_000
            self._look()
        return self._table

    def newest(self) -> AccessTable:
        """The table of this moment; for questions that are rare."""
        self._look()
        return self._table

    def _look(self) -> None:
        with self._lock:  # of two reads at once the older could be kept
            state = self._state()
            if state == self._seen:
                return
            try:
                table = self._file.load()
            except StoreError as error:
                self._tell(str(error))
                return
            if table.is_open and not self._table.is_open and table.version <= self._table.version:
                self._tell(f"it is gone: {self._file.path}")
                return
            self._log.info("users and policies were read", version=table.version, users=len(table.users))
            self._seen, self._table, self._told = state, table, ""

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self._log.error("the file of users cannot be used; the users of before stay", error=reason)

    def _state(self) -> tuple[int, int, int, int] | None:
        """What changes with the file: each change makes another file, and a change of its rights another ``ctime``."""
        try:
            found = os.stat(self._file.path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
