"""Who should have each queue of a group whose strategy is not RocketMQ's average one (remoting 6.1).

The average strategy is arithmetic, and :mod:`commitmq.coordination.membership` has it. The others need all members and queues
of a topic: a table of the topic is made when a member asks first, and holds until members or queues change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from commitmq.errors import ProtocolError
from commitmq.semantics.allocation import (
    STRATEGIES,
    MessageQueue,
    Strategy,
    all_by_consistent_hash,
    by_configuration,
    machine_room,
    sorted_members,
)

_Shares = Callable[[Sequence[MessageQueue], Sequence[str]], dict[str, list[MessageQueue]]]

AVERAGE: Final = "AVG"
MAX_STRATEGY_CHARACTERS: Final = 8_192
"""Of the name of a strategy. The name of ``CONFIG`` has all members and their queues."""
_ROOMS: Final = "MACHINE_ROOM:"
_CONFIGURED: Final = "CONFIG:"


class AllocationTable:
    """The owners of queues by the strategy ``name``."""

    def __init__(self, name: str, broker_name: str) -> None:
        """Raises ProtocolError INVALID_PARAMETER for a strategy that does not exist."""
        self.name = name
        self._strategy = _strategy(name)
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


def _strategy(name: str) -> _Shares:
    if name.startswith(_ROOMS):
        rooms = frozenset(room.strip() for room in name.removeprefix(_ROOMS).split(","))
        return partial(_each, machine_room(rooms))
    if name.startswith(_CONFIGURED):
        return partial(_as_configured, _configuration(name))
    if name == "CONSISTENT_HASH":
        return all_by_consistent_hash
    if name not in STRATEGIES:
        raise ProtocolError(
            "INVALID_PARAMETER",
            f"strategy {name!r:.100} is unknown; known are {', '.join(STRATEGIES)}, {_ROOMS}a,b"
            f" and {_CONFIGURED}member=0,1;other=2",
        )
    return partial(_each, STRATEGIES[name])


def _each(strategy: Strategy, queues: Sequence[MessageQueue], members: Sequence[str]) -> dict[str, list[MessageQueue]]:
    shares = ((member, strategy(member, queues, members)) for member in members)
    return {member: share for member, share in shares if share}


def _as_configured(
    wanted: Mapping[str, frozenset[int]], queues: Sequence[MessageQueue], members: Sequence[str]
) -> dict[str, list[MessageQueue]]:
    queues_of = {name: [one for one in queues if one.queue_id in ids] for name, ids in wanted.items()}
    return _each(by_configuration(queues_of), queues, members)


def _configuration(name: str) -> dict[str, frozenset[int]]:
    """The queue ids of each member. Raises ProtocolError INVALID_PARAMETER, also for a queue of two members."""
    wanted: dict[str, frozenset[int]] = {}
    owners: dict[int, str] = {}
    for part in name.removeprefix(_CONFIGURED).split(";"):
        member, equals, text = part.strip().rpartition("=")
        ids = [one.strip() for one in text.split(",")]
        if not (member and equals and all(one.isascii() and one.isdecimal() for one in ids)):
            raise ProtocolError(
                "INVALID_PARAMETER",
                f"strategy: {part!r:.100} must be a member and its queues, as in {_CONFIGURED}member=0,1;other=2",
            )
        if member in wanted:
            raise ProtocolError("INVALID_PARAMETER", f"strategy: member {member!r:.100} is named twice")
        wanted[member] = frozenset(map(int, ids))
        for queue in wanted[member]:
            if (other := owners.setdefault(queue, member)) != member:
                raise ProtocolError(
                    "INVALID_PARAMETER", f"strategy: queue {queue} is given to {other!r:.100} and to {member!r:.100}"
                )
    return wanted
