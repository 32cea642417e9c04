"""Users and policies as RocketMQ's ACL 2.0 tells them: what ``mqadmin listUser`` and ``listAcl`` print, and their JSON.

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
from collections.abc import Iterable
from typing import Any, Final

import orjson

from commitmq.security.imported_access import ImportedAccess
from commitmq.security.policy import Entry, Policies, parse_actions, parse_network
from commitmq.security.resource import ResourcePattern
from commitmq.security.user import Secret, User, check_name

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
    """Whether the head of a table is in it."""
    return _HEAD.search(text) is not None


def read_tables(text: str) -> ImportedAccess:
    """What listUser and listAcl print, one or both. Lines before the first head are mqadmin's log.

    Raises ValueError that names the line; it shows no secret.
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
    found.add_user(_user(*(None if one == "null" else one for one in fields)))


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
        try:
            if type(row) is not dict:
                raise ValueError("it must be an object")
            if "username" in row:
                _check_members(row, _USER_MEMBERS)
                found.add_user(_user(*(row.get(one) for one in _USER_MEMBERS)))
            else:
                _add_acl(found, row)
        except KeyError as error:
            raise ValueError(f"[{number}]: {error} is missing") from None
        except (TypeError, AttributeError):
            raise ValueError(f"[{number}] has not the shape of RocketMQ's UserInfo or AclInfo") from None
        except ValueError as error:
            raise ValueError(f"[{number}]: {error}") from None
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


def _user(name: str | None, password: str | None, kind: str | None, status: str | None) -> User:
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


def _entry(resource: str, actions: Iterable[str], networks: Iterable[str], decision: str) -> Entry:
    return Entry(
        ResourcePattern.parse(resource),
        parse_actions(actions),
        tuple(parse_network(one) for one in networks),
        _one_of(_DECISIONS, decision),
    )


def _policies(kind: str, entries: Iterable[Entry]) -> Policies:
    if _one_of({"custom": True, "default": False}, kind):
        return Policies(custom=tuple(entries))
    return Policies(default=tuple(entries))


def _one_of(words: dict[str, bool], text: str) -> bool:
    found = words.get(text.lower())
    if found is None:
        # The text is not shown: in a line of the wrong shape it may be a part of a password.
        raise ValueError(f"{' or '.join(words)} must be there")
    return found
