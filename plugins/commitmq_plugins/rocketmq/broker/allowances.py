"""What one connection may make of what all share: groups, which have two topics each, and topics.

The node's limits (``topics.max_topics``, ``groups.max_groups``) are everyone's. So a connection has an allowance of its own:
it is charged for each name that is new, and gets the allowance back when it ends. All connections of an address share a rate,
so that a client gains nothing by connecting again. What exists already costs nothing, so a gateway that speaks for many groups
is not bounded by either.

Memory is bounded too: a connection is in so many groups, and has so many requests that wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final
from weakref import WeakKeyDictionary

from commitmq.errors import ProtocolError
from commitmq.semantics.rates import Rates
from commitmq_plugins.rocketmq.remoting.fastjson import MAX_NAME_CHARACTERS
from commitmq_plugins.rocketmq.remoting.places import place_of
from commitmq_plugins.rocketmq.remoting.server import Connection
from commitmq_plugins.rocketmq.settings import RocketMQSettings

_BURST_S: Final = 60.0
"""An address may make the names of a minute at once: clients of a new application begin together."""
_MOST_ADDRESSES: Final = 10_000


class Allowances:
    """See the module."""

    def __init__(self, settings: RocketMQSettings) -> None:
        self._most_groups = settings.max_groups_per_connection
        self._most_topics = settings.max_topics_per_connection
        self._most_memberships = settings.max_memberships_per_connection
        self._most_of_place = settings.max_memberships_per_address
        self._memberships: dict[Connection, int] = {}
        self._of_place: Counter[str] = Counter()
        self._per_s = settings.max_new_names_per_second
        self._rates = Rates("address", self._per_s, 0, _MOST_ADDRESSES, burst_s=_BURST_S)
        self._groups: WeakKeyDictionary[Connection, set[str]] = WeakKeyDictionary()
        self._topics: WeakKeyDictionary[Connection, set[str]] = WeakKeyDictionary()

    def groups(self, connection: Connection, new: Iterable[str]) -> None:
        """Charge for groups that the node does not know. Raises ProtocolError; nothing is charged then."""
        self._charge(self._groups, connection, set(new), self._most_groups, "groups", "max_groups_per_connection")

    def topic(self, connection: Connection, new: str) -> None:
        """Charge for a topic that the node does not know. Raises ProtocolError."""
        self._charge(self._topics, connection, {new}, self._most_topics, "topics", "max_topics_per_connection")

    def memberships(self, connection: Connection, groups: int) -> None:
        """A connection will be in so many groups, of consumers and of producers, until it has :meth:`left`.

        Raises ProtocolError.
        """
        place, known = place_of(connection.peer[0]), self._memberships.get(connection, 0)
        of_place = self._of_place[place] - known + groups
        limits = ((groups, self._most_memberships, "this connection", "max_memberships_per_connection"),
                  (of_place, self._most_of_place, f"the connections of {place}", "max_memberships_per_address"))  # fmt: skip
        for count, most, who, setting in limits:
            if count > most:
                raise ProtocolError(
                    "LIMIT_EXCEEDED",
                    f"{who} would be in {count} groups of consumers and producers, at most {most} are allowed"
                    f" (plugins.rocketmq.{setting})",
                )
        self._memberships[connection] = groups
        self._of_place[place] = of_place

    def left(self, connection: Connection) -> None:
        """The connection has ended."""
        place, known = place_of(connection.peer[0]), self._memberships.pop(connection, 0)
        self._of_place[place] -= known
        if not self._of_place[place]:
            del self._of_place[place]

    def _charge(
        self,
        table: WeakKeyDictionary[Connection, set[str]],
        connection: Connection,
        new: set[str],
        most: int,
        what: str,
        setting: str,
    ) -> None:
        if not new:
            return
        if long := next((name for name in new if len(name) > MAX_NAME_CHARACTERS), None):
            raise ProtocolError(
                "INVALID_PARAMETER", f"a name has at most {MAX_NAME_CHARACTERS} characters: {long:.100}…"
            )
        charged = table.get(connection, set())
        if charged.issuperset(new):
            return
        if len(charged | new) > most:
            raise ProtocolError(
                "LIMIT_EXCEEDED",
                f"this connection would have made {len(charged | new)} {what}, at most {most} are allowed"
                f" (plugins.rocketmq.{setting})",
            )
        if self._per_s:
            place, now_s = place_of(connection.peer[0]), time.monotonic()
            wait_ms = self._rates.wait_ms(place, now_s)
            if wait_ms:
                raise ProtocolError(
                    "SYSTEM_BUSY",
                    f"address {place} makes more than {self._per_s} new groups and topics a second"
                    " (plugins.rocketmq.max_new_names_per_second)",
                    retry_after_ms=wait_ms,
                )
            self._rates.take(place, len(new - charged), 0, now_s)
        table[connection] = charged | new
