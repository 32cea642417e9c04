"""How much of the audit log each user may cause: nobody may fill it, and so roll others' lines out of it.

A user causes at most so many lines in a second, and in the long run so many bytes in a second; what was not used in the last
ten minutes may be used at once. Where nobody is asked who they are, a user is an address. Of what is not written one line for
each user tells how much it was; that line's bytes count as the user's too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from commitmq.security.audit_line import MAX_NAME, Actor

SAVED_S: Final = 600
"""A user may cause the bytes of so many seconds at once."""
_MOST_TOLD: Final = 10
"""Users with a summary of their own in a second: a client may claim any name when it is refused."""


class Untold(NamedTuple):
    """What a user caused, that was not written, by operation; or ``users`` of them, who have no lines of their own."""

    actor: Actor
    operations: Counter[str]
    users: int = 1


@dataclass(slots=True)
class _Account:
    """``left``: bytes that may be written at ``at_s``. The rest is of this second."""

    actor: Actor
    left: float
    at_s: float
    written: int = 0
    kinds: set[str] = field(default_factory=set)
    untold: Counter[str] = field(default_factory=Counter)


class LinesBound:
    """The lines that users cause. ``shares``: all users together have the bytes of so many; 0 for no such bound."""

    def __init__(self, most_lines: int, bytes_per_second: int, shares: int = 0) -> None:
        self._most_lines, self._rate, self._shares = most_lines, bytes_per_second, shares
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._all = _Account(Actor(), float(bytes_per_second * SAVED_S * shares), 0.0)

    def admits(self, actor: Actor, operation: str, now_s: float, kind: str = "") -> bool:
        """Whether a line is to be written. The first one of each ``kind`` in a second may be one line more."""
        found = self._account(actor, now_s)
        operation, kind = operation[:MAX_NAME], kind[: 2 * MAX_NAME]
        is_first = bool(kind) and kind not in found.kinds
        if (
            (found.written < self._most_lines or is_first)
            and self._refilled(found, now_s, 1) > 0
            and (not self._shares or self._refilled(self._all, now_s, self._shares) > 0)
        ):
            found.written += 1
            found.kinds.add(kind)
            return True
        found.untold[operation] += 1
        return False

    def charge(self, actor: Actor, size_bytes: int, now_s: float) -> None:
        """So many bytes were written for a user."""
        for one in (self._account(actor, now_s), self._all):
            one.left = max(one.left - size_bytes, -float(self._rate * SAVED_S))

    def take(self, now_s: float) -> list[Untold]:
        """Who caused lines that were not written. The next second begins."""
        untold = [Untold(one.actor, one.untold) for one in self._accounts.values() if one.untold]
        kept = {}
        for key, one in self._accounts.items():
            if self._refilled(one, now_s, 1) < self._rate * SAVED_S:
                one.written, one.kinds, one.untold = 0, set(), Counter()
                kept[key] = one
        self._accounts = kept
        own, others = untold[:_MOST_TOLD], untold[_MOST_TOLD:]
        if others:
            count: Counter[str] = Counter()
            for each in others:
                count["others"] += each.operations.total()
            own.append(Untold(Actor(), count, len(others)))
        return own

    @property
    def has_untold(self) -> bool:
        """Whether there is something that :meth:`take` would tell."""
        return any(one.untold for one in self._accounts.values())

    def _account(self, actor: Actor, now_s: float) -> _Account:
        key = (actor.name[:MAX_NAME], "") if actor.name else ("", actor.address[:MAX_NAME])
        found = self._accounts.get(key)
        if found is None:
            found = self._accounts[key] = _Account(actor.cut(), float(self._rate * SAVED_S), now_s)
        return found

    def _refilled(self, one: _Account, now_s: float, shares: int) -> float:
        rate = self._rate * shares
        one.left = min(float(rate * SAVED_S), one.left + max(0.0, now_s - one.at_s) * rate)
        one.at_s = now_s
        return one.left
