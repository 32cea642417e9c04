"""What one connection may make of what all share: groups, which have two topics each, and topics.

The node's limits (``topics.max_topics``, ``groups.max_groups``) are everyone's. So a connection has an allowance of its own:
it is charged for each name that is new, and gets the allowance back when it ends. What exists already costs nothing, so a
gateway that speaks for many groups is not bounded by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from commitmq.errors import ProtocolError
from commitmq_plugins.rocketmq.remoting.fastjson import MAX_NAME_CHARACTERS
from commitmq_plugins.rocketmq.remoting.server import Connection
from commitmq_plugins.rocketmq.settings import RocketMQSettings


class Allowances:
    """See the module."""

    def __init__(self, settings: RocketMQSettings) -> None:
        self._most_groups = settings.max_groups_per_connection
        self._most_topics = settings.max_topics_per_connection
        self._groups: WeakKeyDictionary[Connection, set[str]] = WeakKeyDictionary()
        self._topics: WeakKeyDictionary[Connection, set[str]] = WeakKeyDictionary()

    def groups(self, connection: Connection, new: Iterable[str]) -> None:
        """Charge for groups that the node does not know. Raises ProtocolError; nothing is charged then."""
        self._charge(self._groups, connection, set(new), self._most_groups, "groups", "max_groups_per_connection")

    def topic(self, connection: Connection, new: str) -> None:
        """Charge for a topic that the node does not know. Raises ProtocolError."""
        self._charge(self._topics, connection, {new}, self._most_topics, "topics", "max_topics_per_connection")

    @staticmethod
    def _charge(
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
        if len(charged | new) > most:
            raise ProtocolError(
                "LIMIT_EXCEEDED",
                f"this connection would have made {len(charged | new)} {what}, at most {most} are allowed"
                f" (plugins.rocketmq.{setting})",
            )
        table[connection] = charged | new
