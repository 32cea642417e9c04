"""How many changes of each user go to the audit log in a second: nobody may fill it, and so roll others' lines out of it.

The first change of each kind by a user in a second is always written, however many others there are. A kind is an operation
and what became of it. Of the changes that are not written one line tells how many there were, by operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from commitmq.security.audit_line import Actor, Event


@dataclass(slots=True)
class _Changes:
    """Of one user in this second. ``untold``: those that were not written, by operation."""

    actor: Actor
    written: int = 0
    kinds: set[tuple[str, str]] = field(default_factory=set)
    untold: Counter[str] = field(default_factory=Counter)


class ChangesBound:
    """The changes of one second."""

    def __init__(self, most: int) -> None:
        """``most``: changes of one user that are written; further ones only if they are the first of a kind."""
        self._most = most
        self._users: dict[tuple[str, str], _Changes] = {}

    def admits(self, event: Event) -> bool:
        """Whether ``event`` is to be written. Where nobody is asked who they are, a user is an address."""
        actor = event.actor
        key = (actor.name, "") if actor.name else ("", actor.address)
        found = self._users.get(key)
        if found is None:
            found = self._users[key] = _Changes(actor)
        kind = event.operation, str(event.decision)
        if found.written < self._most or kind not in found.kinds:
            found.written += 1
            found.kinds.add(kind)
            return True
        found.untold[event.operation] += 1
        return False

    def take(self) -> list[tuple[Actor, Counter[str]]]:
        """Who made changes that were not written, and how many by operation. The next second begins."""
        users, self._users = self._users, {}
        return [(one.actor, one.untold) for one in users.values() if one.untold]

    @property
    def has_untold(self) -> bool:
        """Whether there is something that :meth:`take` would tell."""
        return any(one.untold for one in self._users.values())
