"""All users and their policies, and decisions about them, which are made once each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.security.decide import Decision, decide
from commitmq.security.policy import Action, Policies, parse_address
from commitmq.security.resource import Resource
from commitmq.security.user import User

_MOST_DECISIONS: Final = 100_000
_NONE: Final = Policies()


@dataclass(slots=True)
class AccessTable:
    """One state of the file of users. It does not change once it is asked; a change makes another table.

    ``version`` grows by one with each change.
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
        """The user with that public key."""
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
                with _place(f"user {name!r:.200}"):
                    table.users[name] = User.from_json(name, one)
            keys = [one for user in table.users.values() for one in user.keys]
            if len(set(keys)) < len(keys):
                raise ValueError("two users have the same key")
            for name, one in policies.items():
                with _place(f"the policies of {name!r:.200}"):
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


class _place:
    """Turns every error of a member into a ValueError that names the member; never shows its value's secrets."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError):
            raise ValueError(f"{self._name}: {error} is missing") from None
        if isinstance(error, ValueError | TypeError | AttributeError):
            raise ValueError(f"{self._name}: {error}") from None
