"""Who should have each queue of a group whose strategy is not RocketMQ's average one (remoting 6.1).

The average strategy is arithmetic, and :mod:`commitmq.coordination.membership` has it. The others need all members and queues
of a topic: a table of the topic is made when a member asks first, and holds until members or queues change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from commitmq.semantics.allocation import AVERAGE, MessageQueue, sorted_members, strategy_of

__all__ = ["AVERAGE", "MAX_STRATEGY_CHARACTERS", "AllocationTable"]

MAX_STRATEGY_CHARACTERS: Final = 8_192
"""Of the name of a strategy. The name of ``CONFIG`` has all members and their queues."""


class AllocationTable:
    """The owners of queues by the strategy ``name``."""

    def __init__(self, name: str, broker_name: str) -> None:
        """Raises ProtocolError INVALID_PARAMETER for a strategy that does not exist."""
        self.name = name
        self._strategy = strategy_of(name)
        self._broker_name = broker_name
        self._shares: dict[str, dict[str, list[int]]] = {}  # topic -> member -> queues
        self._owners: dict[str, dict[int, str]] = {}

    def forget(self) -> None:
        """Members or queues have changed."""
        self._shares.clear()
        self._owners.clear()

    def share(self, topic: str, queues: Sequence[int], members: Sequence[str], member: str) -> Sequence[int]:
        """The queues of ``topic`` that are meant for ``member``; ``members`` are its subscribers."""
        self._make(topic, queues, members)
        return self._shares[topic].get(member, ())

    def owner(self, topic: str, queues: Sequence[int], members: Sequence[str], queue: int) -> str | None:
        """The member that should have ``queue``; None when nobody should."""
        self._make(topic, queues, members)
        return self._owners[topic].get(queue)

    def _make(self, topic: str, queues: Sequence[int], members: Sequence[str]) -> None:
        if topic in self._shares:
            return
        ordered = sorted_members(members)
        found = [MessageQueue(topic, self._broker_name, queue) for queue in queues]
        shares = self._strategy(found, ordered)
        self._shares[topic] = {member: [one.queue_id for one in share] for member, share in shares.items()}
        self._owners[topic] = {one.queue_id: member for member, share in shares.items() for one in share}
