"""Users and policies that come from another system, and what an import of them changes.

All of it is taken or nothing. A user that is there already is a conflict, unless it is the same: an import replaces no secret
and no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from commitmq.security.access_table import AccessTable
from commitmq.security.policy import Policies
from commitmq.security.user import User


@dataclass(frozen=True, slots=True)
class AccessChange:
    """What an import makes: the user ``name`` (``user`` is None where only entries are new) and its entries."""

    name: str
    user: User | None
    policies: Policies

    def shown(self) -> dict[str, Any]:
        """Without the secret."""
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
