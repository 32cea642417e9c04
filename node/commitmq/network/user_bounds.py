"""What the clients of one user may have at one port: connections, and bytes that wait to be handled.

The receiving thread tells each connection's user once it knows it, from the first request that the guard let pass. The gate's
thread adds up what the connections of a user hold, at each of its looks while any connection holds bytes. Then requests of
a user with more than the quota are refused, which frees their bytes at once, until a look finds less. At twice the quota,
which a request without an end may reach, the user's connection with the most is ended. What it sent still waits, and counts.
So no connection is ended that holds no more than its share of the quota: those of its user that send little live on.

Both quotas hold for each process of the node by itself. Without any the receiving thread asks nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from commitmq.network.connection import Connection
from commitmq.network.endings import Ending
from commitmq.security.user_quotas import UserQuotas

_RETRY_CONNECT_MS: Final = 1_000
_RETRY_PENDING_MS: Final = 50
CONNECTIONS: Final = "user_connections"
PENDING: Final = "user_pending_bytes"


class Refused(NamedTuple):
    """``bound``: CONNECTIONS, which ends the connection too, or PENDING."""

    bound: str
    sentence: str
    retry_after_ms: int


class UserBounds:
    """See the module. ``quotas`` is looked at anew each time; ``refused`` is called for each refusal."""

    def __init__(self, quotas: UserQuotas, refused: Callable[[], object]) -> None:
        self.quotas, self._refused = quotas, refused
        self._connections: Counter[str] = Counter()
        self._counting = threading.Lock()  # both threads count
        self._over: frozenset[str] = frozenset()

    # ------------------------------------------------------------ the receiving thread

    def refusal(self, connection: Connection, user: str) -> Refused | None:
        """Why a request of ``user`` over ``connection`` is refused; None when it is not."""
        found = None
        if connection.user != user:
            found = self._meet(connection, user)
        if found is None and user in self._over:
            most = self.quotas.of(user).pending_bytes
            sentence = f"more than {most} bytes of user {user} wait to be handled ([flow] {PENDING})"
            found = Refused(PENDING, sentence, _RETRY_PENDING_MS)
        if found is not None:
            self._refused()
        return found

    def _meet(self, connection: Connection, user: str) -> Refused | None:
        most = self.quotas.of(user).connections
        with self._counting:
            if connection.closed:
                return None
            if most and self._connections[user] >= most:
                sentence = (
                    f"user {user} has {self._connections[user]} connections here, the most ([flow] {CONNECTIONS})"
                )
                return Refused(CONNECTIONS, sentence, _RETRY_CONNECT_MS)
            self._leave(connection)
            connection.user = user
            self._connections[user] += 1
        return None

    def _leave(self, connection: Connection) -> None:
        user = connection.user
        if user:
            self._connections[user] -= 1
            if not self._connections[user]:
                del self._connections[user]

    # ------------------------------------------------------------ the gate's thread

    def forget(self, connection: Connection) -> None:
        """``connection`` is closed, and whatever user it had: the receiving thread may just be about to tell. Its bytes are
        still the user's.
        """
        with self._counting:
            self._leave(connection)

    def look(self, held: Collection[Connection]) -> Ending | None:
        """Count what ``held``, all connections with bytes that wait, hold for each user. Returns the connection to end."""
        sizes: Counter[str] = Counter()
        for one in held:
            if one.user:
                sizes[one.user] += one.pending
        bounds = {user: self.quotas.of(user).pending_bytes for user in sizes}
        over = {user for user, most in bounds.items() if most and sizes[user] > most}
        self._over = frozenset(over)
        far_over = {user for user in over if sizes[user] > 2 * bounds[user]}
        shares = {user: bounds[user] // max(1, self._connections[user]) for user in far_over}
        worst = [one for one in held if one.user in far_over and not one.ended and one.pending > shares[one.user]]
        if not worst:
            return None
        one = max(worst, key=lambda one: (one.unfinished, one.pending))
        why = (
            f"{sizes[one.user]} bytes of user {one.user} wait to be handled, twice the quota is {2 * bounds[one.user]}"
        )
        return Ending(one, PENDING, why)
