"""Who sends a request, and may they: the signatures of RocketMQ's clients (AK/SK) and the node's users.

A node without users asks nobody. There is no time and no number in a signature: who reads a request on the wire can repeat
it, so a network that others can read needs TLS too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from commitmq.log import Log
from commitmq.security.live_access import LiveAccess
from commitmq.security.needs import Actions, topic_need
from commitmq.security.signature import ACCESS_KEY, is_signed
from commitmq_plugins.rocketmq.broker.auditing import Auditing, name_of
from commitmq_plugins.rocketmq.broker.rights import needs_of, used_of
from commitmq_plugins.rocketmq.broker.user_limits import UserLimits
from commitmq_plugins.rocketmq.remoting.codes import V4_9_3, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.server import Connection

_UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
_NOBODY: Final = "a secret that nobody has"
_WRONG: Final = "check signature failed"
_MOST_TOLD: Final = 10
"""Refusals that the log has, of each second."""


class Access:
    """See the module."""

    def __init__(
        self,
        live: LiveAccess,
        cluster: str,
        log: Log,
        auditing: Auditing | None = None,
        limits: UserLimits | None = None,
    ) -> None:
        self._live, self._cluster, self._log, self._auditing, self._limits = live, cluster, log, auditing, limits
        self._second = self._told = self._untold = 0

    def refusal(self, connection: Connection, command: Command) -> Command | None:
        """The answer to a request that must not be handled. Raises BodyError."""
        table = self._live.table()
        if table.is_open:
            return None
        fields = command.ext_fields
        name = fields.get(ACCESS_KEY, "")
        user = table.users.get(name)
        # Clients up to 4.9.3 add this field after they have signed.
        without = _UNIQUE_KEY_QUERY if command.version <= V4_9_3 else ""
        secret = _NOBODY if user is None else user.secret.reveal()
        # An unknown user and a wrong signature look the same, and take the same time.
        if not is_signed(fields, command.body, secret, without=without) or user is None:
            return self._refuse(connection, command, name, _WRONG if name else "the request has no AccessKey")
        if not user.is_enabled:
            return self._refuse(connection, command, name, f"user {name} is disabled")
        if connection.user not in ("", name):
            # Its groups, and requests that still wait, would be judged by the rights of whoever signed last.
            reason = "this connection is another user's; a user needs a connection of its own"
            return self._refuse(connection, command, name, reason)
        needs = needs_of(command, self._cluster)
        if user.is_super:
            needs = needs or []
        elif needs is None:
            return self._refuse(connection, command, name, f"only super users may send request {command.code}")
        address = connection.peer[0]
        for resource, actions in () if user.is_super else needs:
            decision = table.decide(name, resource, actions, address)
            if not decision.allowed:
                reason = f"{decision.reason}; from {address}"
                return self._refuse(connection, command, name, reason, str(resource))
        if self._auditing is not None and (used := used_of(command, needs, self._cluster)) is not None:
            self._auditing.used(connection, command, name, used)
        if connection.user != name:
            connection.user = name
            connection.memo.clear()  # what is remembered of its sends has the user before
        limits = self._limits
        if limits is not None and limits.quotas.bounds_connections and (why := limits.refusal(connection, name)):
            return command.answer(ResponseCode.SYSTEM_BUSY, why)
        return None

    def asks(self, connection: Connection) -> bool:
        """Whether rights count for the user of ``connection``: there are users, and it is no super user that is enabled."""
        table = self._live.table()
        user = table.users.get(connection.user)
        return not table.is_open and (user is None or not (user.is_super and user.is_enabled))

    def may(self, connection: Connection, topic: str, actions: Actions) -> bool:
        """Whether the user of ``connection`` may do one of ``actions`` on ``topic``."""
        return self._denied(connection, (topic,), actions) is None

    def lacks(
        self, connection: Connection, command: Command, topics: Iterable[str], actions: Actions
    ) -> Command | None:
        """The answer to ``command`` when its user may do none of ``actions`` on one of ``topics``; None when it may.

        For messages that a request names by their place: what the client says of their topic proves nothing.
        """
        denied = self._denied(connection, topics, actions)
        return None if denied is None else self._refuse(connection, command, connection.user, *denied)

    def _denied(self, connection: Connection, topics: Iterable[str], actions: Actions) -> tuple[str, str] | None:
        """The reason and the resource."""
        if not self.asks(connection):
            return None
        table, address = self._live.table(), connection.peer[0]
        for topic in topics:
            resource, wanted = topic_need(topic, actions)
            decision = table.decide(connection.user, resource, wanted, address)
            if not decision.allowed:
                return f"{decision.reason}; from {address}", str(resource)
        return None

    def _refuse(self, connection: Connection, command: Command, name: str, reason: str, resource: str = "") -> Command:
        if self._auditing is not None:
            self._auditing.refused(connection, command, reason, resource)
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            if self._untold:
                self._log.warning("more requests were refused", count=self._untold)
            self._second, self._told, self._untold = second, 0, 0
        if self._told < _MOST_TOLD:
            self._told += 1
            code = name_of(command.code)
            self._log.warning(
                "a request was refused", user=name[:128], request=code, peer=connection.name, reason=reason
            )
        else:
            self._untold += 1
        return command.answer(ResponseCode.NO_PERMISSION, reason)
