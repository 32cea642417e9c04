"""The member ``users`` of the document of ``commitmq export config``: users and what they may do, without their secrets.

    "users": [{"name": "shop", "type": "Normal", "status": "enable", "keys": ["…"], "quotas": {"connections": 20},
               "policies": {"custom": [{"resource": "Topic:orders", "actions": ["Pub"], "decision": "Allow"}]}}]

``keys`` are public keys. An import changes no credential: a user that is there keeps its secret and its keys, so that an old
file cannot let a key in again that was taken away. A user that is new has the keys of the document, and a secret that nobody
knows: ``commitmq user alter NAME --new-secret`` gives it another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from commitmq.security.access_table import AccessTable
from commitmq.security.policy import Policies
from commitmq.security.user import MAX_KEYS, Secret, User

_MEMBERS: Final = ("name", "type", "status", "keys", "quotas", "policies")


@dataclass(frozen=True, slots=True)
class UserChange:
    """What an import changes of the user ``name``: the members that differ; ``before`` is None for a new user."""

    name: str
    before: dict[str, Any] | None
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UserImport:
    """``conflicts``: what can never be, a sentence each. ``keys_kept``: users whose keys differ from those of the document and
    stay.
    """

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
            try:
                user, policies = _user(row)
                if user.name in found.users:
                    raise ValueError(f"{user.name} is there twice; leave one out")
            except KeyError as error:
                raise ValueError(f"users[{number}]: {error} is missing") from None
            except (TypeError, AttributeError):
                raise ValueError(f"users[{number}] has not the shape of a user that was exported") from None
            except ValueError as error:
                raise ValueError(f"users[{number}]: {error}") from None
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
