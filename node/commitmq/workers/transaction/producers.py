"""The live producers of each group, which can be asked about a transaction, and for which user each of them is.

A check shows a half message. So on a node with users it goes to producers alone whose user may send to the message's topic.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from commitmq.config.schema import TransactionConfig
from commitmq.coordination import requests
from commitmq.coordination.group_settings import check_name
from commitmq.errors import ProtocolError
from commitmq.network.router import Router
from commitmq.security.on_behalf import FIELD

NOBODY_TO_ASK: Final = (
    "no producer of the group can be asked about its transactions; they are given up after check_max rounds"
)
_MOST_UNHEARD: Final = 1_000
_MOST_SHOWN: Final = 10


class UnheardGroups:
    """Groups with open transactions and no producer to ask, so that people are told once of each."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    @property
    def shown(self) -> list[str]:
        """Some of them, for ``status``."""
        return sorted(self._groups)[:_MOST_SHOWN]

    def note(self, group: str) -> bool:
        """True when ``group`` is a new one."""
        if group in self._groups or len(self._groups) >= _MOST_UNHEARD:
            return False
        self._groups.add(group)
        return True

    def forget(self, group: str | None = None) -> bool:
        """A producer of ``group`` was asked; None: no transaction is open any more. True when that changes anything."""
        gone = set(self._groups) if group is None else self._groups & {group}
        self._groups -= gone
        return bool(gone)


class Registrant(NamedTuple):
    """Who has registered. ``user``: whose right to the messages is asked for; empty for the node's own account, and on a node
    without users. ``address``: from where; None where a gateway speaks for the user, which looks at the addresses itself.
    """

    peer: bytes
    user: str = ""
    address: str | None = None


def groups_of(header: dict[str, Any]) -> list[str]:
    """The groups that a request registers. Raises ProtocolError."""
    groups = requests.names(header, "groups") if "groups" in header else [requests.text(header, "group")]
    for group in groups:
        check_name(group)
    return groups


def registrant_of(router: Router, peer: bytes, header: dict[str, Any]) -> Registrant:
    """Who has sent the request that ``router`` just gave."""
    user = router.user_of(header) or ""
    return Registrant(peer, user, None if FIELD in header else router.actor(peer, header).address)


def may_be_asked(router: Router, who: Registrant, topic: str) -> bool:
    """Whether ``who`` is still connected, reads its answers, and may see a half message of ``topic``."""
    guard = router.guard
    if router.gate.has_left(who.peer) or router.unsent.is_over(who.peer):
        return False
    return guard is None or guard.may_send(who.user, who.address, topic)


class Producers:
    """Registrants by group. Each registers again and again; one that does not for ``timeout_ms`` is forgotten.

    A gateway of the node registers the groups of all its clients over one connection, those of each user for itself. A user
    has at most ``most_of_user`` of the ``most`` places, so that nobody's groups crowd out those of all others.
    """

    def __init__(self, *, timeout_ms: int, most: int, most_of_user: int) -> None:
        self.timeout_ms = timeout_ms
        self._most, self._most_of_user = most, most_of_user
        self._until: dict[tuple[Registrant, str], int] = {}
        self._turns: dict[str, deque[Registrant]] = {}
        """Whom to ask next in a group. It may name producers that have gone."""
        self._of_users: Counter[str] = Counter()

    @classmethod
    def of(cls, config: TransactionConfig) -> Producers:
        """With the bounds of the settings."""
        most, most_of_user = config.max_producers, config.max_producers_per_user
        return cls(timeout_ms=config.session_timeout_ms, most=most, most_of_user=most_of_user)

    def __len__(self) -> int:
        return len(self._until)

    def register(self, who: Registrant, groups: Iterable[str], now_ms: int) -> None:
        """``who`` is a live producer of ``groups``. Raises ProtocolError SYSTEM_BUSY for those that have no place; the others
        are registered all the same.
        """
        refused: ProtocolError | None = None
        for group in groups:
            if (who, group) not in self._until:
                if (why := self._is_full(who.user)) and refused is None and self.expire(now_ms):
                    why = self._is_full(who.user)
                if why:
                    refused = ProtocolError("SYSTEM_BUSY", why, retry_after_ms=self.timeout_ms)
                    continue
                self._turns.setdefault(group, deque()).append(who)
                self._of_users[who.user] += 1
            self._until[who, group] = now_ms + self.timeout_ms
        if refused is not None:
            raise refused

    def _is_full(self, user: str) -> str:
        """Why no producer of ``user`` has a place; empty when one has."""
        if len(self._until) >= self._most:
            return f"{self._most} producers are registered (transaction.max_producers)"
        if user and self._of_users[user] >= self._most_of_user:
            return f"{self._most_of_user} producers of user {user} are registered (transaction.max_producers_per_user)"
        return ""

    def leave(self, peer: bytes, group: str | None = None) -> None:
        """``peer`` is asked no more for ``group``; without one, for none of its groups."""
        if group is None:
            left = [key for key in self._until if key[0].peer == peer]
        else:
            left = [(who, group) for who in self._turns.get(group, ()) if who.peer == peer]
        for who, one in left:
            self._forget(who, one)

    def _forget(self, who: Registrant, group: str) -> None:
        del self._until[who, group]
        self._of_users[who.user] -= 1
        if not self._of_users[who.user]:
            del self._of_users[who.user]
        turn = self._turns[group]
        turn.remove(who)
        if not turn:
            del self._turns[group]

    def expire(self, now_ms: int) -> bool:
        """Forget those that did not register again. Whether there were any."""
        gone = [key for key, until_ms in self._until.items() if until_ms <= now_ms]
        for who, group in gone:
            self._forget(who, group)
        return bool(gone)

    def pick(self, group: str, now_ms: int, can_take: Callable[[Registrant], bool]) -> bytes | None:
        """The routing id of a live producer of ``group``, each in its turn; None when there is none. ``can_take``: it is still
        connected, and may see the message.
        """
        turn = self._turns.get(group)
        for _ in range(len(turn or ())):
            assert turn is not None
            who = turn[0]
            turn.rotate(-1)
            if self._until[who, group] > now_ms and can_take(who):
                return who.peer
        return None
