"""Users and policies that come from another system, and what an import of them changes.

All of it is taken or nothing. A user that is there already is a conflict, unless it is the same: an import replaces no secret
and no entry.

The member ``users`` of the document of ``commitmq export config``: users and what they may do, without their secrets.

    "users": [{"name": "shop", "type": "Normal", "status": "enable", "keys": ["…"], "quotas": {"connections": 20},
               "policies": {"custom": [{"resource": "Topic:orders", "actions": ["Pub"], "decision": "Allow"}]}}]

``keys`` are public keys. An import changes no credential: a user that is there keeps its secret and its keys, so that an old
file cannot let a key in again that was taken away. A user that is new has the keys of the document, and a secret that nobody
knows: ``commitmq user alter NAME --new-secret`` gives it another.

Users and policies as RocketMQ's ACL 2.0 tells them: what ``mqadmin listUser`` and ``listAcl`` print, and their JSON.

The tables have columns with blanks between them, the passwords in clear:

    #UserName         #Password               #UserType               #UserStatus
    shop              a-secret                Normal                  enable

    #Subject          #PolicyType  #Resource     #Actions    #SourceIp      #Decision
    User:shop         Custom       Topic:orders  [Pub, Sub]  [10.1.0.0/16]  Allow

The JSON is that of a broker's answers, a list of UserInfo (username, password, userType, userStatus) or of AclInfo (subject,
policies of policyType and entries of resource, actions, sourceIps, decision), or of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from commitmq.security.access_file import AccessTable, place_of
from commitmq.security.policy import (
    MAX_KEYS,
    Policies,
    PolicyEntry,
    ResourcePattern,
    Secret,
    User,
    check_name,
    parse_actions,
    parse_network,
)

_MEMBERS: Final = ("name", "type", "status", "keys", "quotas", "policies")


@dataclass(frozen=True, slots=True)
class UserChange:
    """What an import changes of the user ``name``: the members that differ; ``before`` is None for a new user."""

    name: str
    before: dict[str, Any] | None
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UserImport:
    """``conflicts``: sentences on what can never be. ``keys_kept``: users whose other keys stay."""

    changes: list[UserChange]
    conflicts: list[str]
    keys_kept: list[str]


@dataclass(frozen=True, slots=True)
class ExportedUsers:
    """Users and policies by name, as they were read. The secrets of the users are new ones."""

    users: dict[str, User]
    policies: dict[str, Policies]

    @classmethod
    def of(cls, document: object) -> ExportedUsers:
        """Raises ValueError, which names the place in the document; it never shows a member that is none of a user's."""
        rows = document.get("users") if isinstance(document, dict) else None
        if rows is None:
            raise ValueError("users: the document has none; export it with them")
        if type(rows) is not list:
            raise ValueError("users must be a list")
        found = cls({}, {})
        for number, row in enumerate(rows):
            with place_of(f"users[{number}]", "a user that was exported"):
                user, policies = _user(row)
                if user.name in found.users:
                    raise ValueError(f"{user.name} is there twice; leave one out")
            found.users[user.name], found.policies[user.name] = user, policies
        return found

    def compared(self, table: AccessTable) -> UserImport:
        """What an import into ``table`` changes."""
        done = UserImport([], [], [])
        owners = {key: one.name for one in table.users.values() for key in one.keys}
        for name, wanted in self.users.items():
            after = _shown(wanted, self.policies[name])
            known = table.users.get(name)
            if known is None:
                for key in wanted.keys:
                    if (owner := owners.setdefault(key, name)) != name:
                        done.conflicts.append(f"user {name} has a key that user {owner} has already")
                done.changes.append(UserChange(name, None, after))
                continue
            before = _shown(known, table.policies.get(name, Policies()))
            if set(before.pop("keys")) != set(after.pop("keys")):
                done.keys_kept.append(name)
            differing = {one: value for one, value in after.items() if before[one] != value}
            if differing:
                done.changes.append(UserChange(name, {one: before[one] for one in differing}, differing))
        return done

    def put_into(self, table: AccessTable) -> UserImport:
        """Change ``table``, and say what changed. Raises ValueError for what can never be."""
        done = self.compared(table)
        if done.conflicts:
            raise ValueError("; ".join(done.conflicts))
        for name in (one.name for one in done.changes):
            wanted, known = self.users[name], table.users.get(name)
            if known is not None:
                wanted = replace(wanted, secret=known.secret, keys=known.keys)
            table.users[name] = wanted
            table.policies[name] = self.policies[name]
        return done


def exported_users(table: AccessTable) -> list[dict[str, Any]]:
    """The member ``users`` for all users of ``table``."""
    return [
        {"name": name, **_shown(one, table.policies.get(name, Policies()))} for name, one in sorted(table.users.items())
    ]


def _user(row: Any) -> tuple[User, Policies]:
    if type(row) is not dict:
        raise ValueError("a user must be an object")
    if unknown := sorted(set(row) - set(_MEMBERS)):
        raise ValueError(f"a user has no member {unknown[0]!r:.100}; there are {', '.join(_MEMBERS)}")
    user = User.from_json(row["name"], {**row, "secret": Secret.make().reveal()})
    if len(user.keys) > MAX_KEYS or len(set(user.keys)) < len(user.keys):
        raise ValueError(f"{user.name} must have at most {MAX_KEYS} keys, each once")
    return user, Policies.from_json(row.get("policies", {}))


def _shown(user: User, policies: Policies) -> dict[str, Any]:
    return {**user.shown(), "keys": list(user.keys), "quotas": dict(user.quotas), "policies": policies.to_json()}


@dataclass(frozen=True, slots=True)
class AccessChange:
    """What an import makes: the user ``name`` (``user`` is None where only entries are new) and its entries."""

    name: str
    user: User | None
    policies: Policies

    def shown(self) -> dict[str, Any]:
        return {**(self.user.shown() if self.user else {}), "policies": self.policies.to_json()}


@dataclass(slots=True)
class ImportedAccess:
    """``policies`` may name users that are not in ``users``: those must be in the file of users."""

    users: dict[str, User] = field(default_factory=dict)
    policies: dict[str, Policies] = field(default_factory=dict)

    def add_user(self, user: User) -> None:
        """Raises ValueError when there is another of that name."""
        if self.users.setdefault(user.name, user) != user:
            raise ValueError(f"user {user.name} is there twice, and not the same; leave one out")

    def add_policies(self, name: str, policies: Policies) -> None:
        """The entries of the user ``name``, besides those that it has already; the same entry counts once."""
        known = self.policies.get(name, Policies())
        self.policies[name] = Policies(
            tuple(dict.fromkeys((*known.custom, *policies.custom))),
            tuple(dict.fromkeys((*known.default, *policies.default))),
        )

    def merge(self, other: ImportedAccess) -> None:
        """Take what is in ``other`` too. Raises ValueError for two users of a name that are not the same."""
        for user in other.users.values():
            self.add_user(user)
        for name, policies in other.policies.items():
            self.add_policies(name, policies)

    def compared(self, table: AccessTable) -> tuple[list[AccessChange], list[str]]:
        """What the import would change in ``table``, and the conflicts, a sentence each."""
        changes: list[AccessChange] = []
        conflicts: list[str] = []
        for name in sorted(self.users.keys() | self.policies.keys()):
            wanted, known = self.users.get(name), table.users.get(name)
            policies = self.policies.get(name)
            there = table.policies.get(name, Policies())
            if known is None and wanted is None:
                conflicts.append(f"there is no user {name} to have the entries; import the users too")
            elif known is None:
                changes.append(AccessChange(name, wanted, policies or Policies()))
            elif wanted is None and there == Policies() and policies:
                if policies != there:
                    changes.append(AccessChange(name, None, policies))
            elif differing := list(_differing(known, wanted, there, policies)):
                conflicts.append(
                    f"user {name} is there already, with another {' and '.join(differing)}; delete it, or leave it out"
                )
        return changes, conflicts

    def put_into(self, table: AccessTable) -> list[AccessChange]:
        """Change ``table``, and say what changed. Raises ValueError, which has the conflicts."""
        changes, conflicts = self.compared(table)
        if conflicts:
            raise ValueError("; ".join(conflicts))
        for one in changes:
            if one.user is not None:
                table.users[one.name] = one.user
            if one.policies != Policies():
                table.policies[one.name] = one.policies
        return changes


def _differing(known: User, wanted: User | None, there: Policies, policies: Policies | None) -> Iterator[str]:
    """Keys and quotas do not count: what is imported has none."""
    if wanted is not None:
        if known.secret != wanted.secret:
            yield "secret"
        if known.is_super != wanted.is_super:
            yield "type"
        if known.is_enabled != wanted.is_enabled:
            yield "status"
    if policies is not None and not (_same(there.custom, policies.custom) and _same(there.default, policies.default)):
        yield "set of entries"


def _same(some: Iterable[object], others: Iterable[object]) -> bool:
    """Whether they are the same entries, in whatever order."""
    return set(some) == set(others)


_USERS_HEAD: Final = "#UserName"
_ENTRIES_HEAD: Final = "#Subject"
_HEAD: Final = re.compile(r"^(?:#UserName +#Password|#Subject +#PolicyType)\b", re.MULTILINE)
_ENTRY: Final = re.compile(r"(\S+)\s+(\S+)\s+(\S+)\s+\[(.*?)\]\s+(?:null|\[(.*?)\])\s+(\S+)").fullmatch
_REPORT: Final = re.compile(r"get user from \S+ success\.").fullmatch
_USER_MEMBERS: Final = ("username", "password", "userType", "userStatus")
_TYPES: Final = {"super": True, "normal": False}
_STATUSES: Final = {"enable": True, "disable": False}
_DECISIONS: Final = {"allow": True, "deny": False}


def has_tables(text: str) -> bool:
    return _HEAD.search(text) is not None


def read_tables(text: str) -> ImportedAccess:
    """What listUser and listAcl print, one or both. Lines before the first head are mqadmin's log. Raises ValueError
    that names the line; it shows no secret.
    """
    found, head = ImportedAccess(), ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or _REPORT(line):
            continue
        if _HEAD.match(line):
            head = line.split()[0]
            continue
        try:
            if head == _USERS_HEAD:
                _add_user_line(found, line)
            elif head == _ENTRIES_HEAD:
                _add_entry_line(found, line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return found


def _add_user_line(found: ImportedAccess, line: str) -> None:
    fields = line.split()
    if len(fields) != len(_USER_MEMBERS):
        raise ValueError("a user has name, password, type and status, without blanks in them")
    found.add_user(_imported_user(*(None if one == "null" else one for one in fields)))


def _add_entry_line(found: ImportedAccess, line: str) -> None:
    if len(line.split()) == 1:
        found.add_policies(_subject(line), Policies())
        return
    match = _ENTRY(line)
    if match is None:
        raise ValueError("an entry has subject, type, resource, [actions], [addresses] or null, and decision")
    subject, kind, resource, actions, networks, decision = match.groups()
    entry = _entry(resource, _split(actions), _split(networks), decision)
    found.add_policies(_subject(subject), _policies(kind, (entry,)))


def _split(text: str | None) -> list[str]:
    return [one.strip() for one in (text or "").split(",") if one.strip()]


def read_json(text: str) -> ImportedAccess:
    """The JSON of users and policies. Raises ValueError that names the place; it shows no secret."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: no JSON") from None
    found = ImportedAccess()
    for number, row in enumerate(document if type(document) is list else [document]):
        with place_of(f"[{number}]", "RocketMQ's UserInfo or AclInfo"):
            if type(row) is not dict:
                raise ValueError("it must be an object")
            if "username" in row:
                _check_members(row, _USER_MEMBERS)
                found.add_user(_imported_user(*(row.get(one) for one in _USER_MEMBERS)))
            else:
                _add_acl(found, row)
    return found


def _add_acl(found: ImportedAccess, row: dict[str, Any]) -> None:
    _check_members(row, ("subject", "policies"))
    name = _subject(row["subject"])
    found.add_policies(name, Policies())
    for policy in row.get("policies") or ():
        _check_members(policy, ("policyType", "entries"))
        entries = []
        for one in policy.get("entries") or ():
            _check_members(one, ("resource", "actions", "sourceIps", "decision"))
            entries.append(_entry(one["resource"], one["actions"], one.get("sourceIps") or (), one["decision"]))
        found.add_policies(name, _policies(policy.get("policyType") or "Custom", entries))


def _check_members(row: dict[str, Any], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(row) - set(known)):
        raise ValueError(f"there is no member {unknown[0]!r:.100}; there are {', '.join(known)}")


def _imported_user(name: str | None, password: str | None, kind: str | None, status: str | None) -> User:
    """As RocketMQ, which takes a user without type as Normal, and one without status as enabled."""
    checked = check_name(name or "")
    if not isinstance(password, str) or not password.strip("*"):
        raise ValueError(f"user {checked} has no password, or one that is hidden by asterisks")
    try:
        return User(
            checked, Secret(password), _one_of(_TYPES, kind or "Normal"), _one_of(_STATUSES, status or "enable")
        )
    except ValueError as error:
        raise ValueError(f"user {checked}: {error}") from None


def _subject(text: str) -> str:
    kind, colon, name = text.partition(":")
    if not colon or kind.lower() != "user":
        raise ValueError(f"a subject is User:NAME, not {text!r:.200}")
    return check_name(name)


def _entry(resource: str, actions: Iterable[str], networks: Iterable[str], decision: str) -> PolicyEntry:
    return PolicyEntry(
        ResourcePattern.parse(resource),
        parse_actions(actions),
        tuple(parse_network(one) for one in networks),
        _one_of(_DECISIONS, decision),
    )


def _policies(kind: str, entries: Iterable[PolicyEntry]) -> Policies:
    if _one_of({"custom": True, "default": False}, kind):
        return Policies(custom=tuple(entries))
    return Policies(default=tuple(entries))


def _one_of(words: dict[str, bool], text: str) -> bool:
    found = words.get(text.lower())
    if found is None:
        # The text is not shown: in a line of the wrong shape it may be a part of a password.
        raise ValueError(f"{' or '.join(words)} must be there")
    return found
