"""What the clients of one user may have at this server: connections, and bytes of requests that have no answer yet.

These are the quotas of the node's own protocol (``[flow]`` user_connections and user_pending_bytes, and those of the file of
users). They hold for each process by itself, so also for this server.
"""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakSet

from commitmq.security.user_quotas import UserQuotas
from commitmq_plugins.rocketmq.remoting.server import Connection

_END_S: Final = 0.1
"""By then the answer has been sent."""


class UserLimits:
    """Ask while ``quotas.bounds_connections`` only. Connections that began before are counted at their next request."""

    def __init__(self, quotas: UserQuotas) -> None:
        self.quotas = quotas
        self._connections: dict[str, WeakSet[Connection]] = {}

    def refusal(self, connection: Connection, user: str) -> str:
        """Why a request that ``user`` has signed is refused; empty when it is not. A connection too many ends afterwards."""
        quota = self.quotas.of(user)
        known = self._connections.get(user)
        if known is None:
            self._forget_users()
            known = self._connections[user] = WeakSet()
        if connection not in known:
            count = sum(not one.is_closed for one in known)
            if quota.connections and count >= quota.connections:
                asyncio.get_running_loop().call_later(_END_S, connection.close)
                return f"user {user} has {count} connections here, the most ([flow] user_connections)"
            known.add(connection)
        most = quota.pending_bytes
        if most and sum(one.request_bytes for one in known) > most:
            return f"more than {most} bytes of user {user} wait to be handled ([flow] user_pending_bytes)"
        return ""

    def _forget_users(self) -> None:
        self._connections = {user: known for user, known in self._connections.items() if known}
