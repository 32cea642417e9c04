"""Allocation strategies by name, and the shares of all members at once (remoting 6.1).

A name is one of RocketMQ's, ``MACHINE_ROOM:a,b`` with rooms, or ``CONFIG:m=0,1;n=2`` with the queues of each member.
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

Shares = Callable[[Sequence[MessageQueue], Sequence[str]], dict[str, list[MessageQueue]]]
"""(all queues, all members in their order) to the queues of each member; a member without any may be left out."""

AVERAGE: Final = "AVG"
_ROOMS: Final = "MACHINE_ROOM:"
_CONFIGURED: Final = "CONFIG:"


def plan(
    name: str, broker_name: str, topic: str, queues: Sequence[int], members: Sequence[str]
) -> dict[str, list[int]]:
    """The queue ids of ``topic`` that each of ``members`` would get by strategy ``name``. Raises as :func:`strategy_of`."""
    found = [MessageQueue(topic, broker_name, queue) for queue in queues]
    shares = strategy_of(name)(found, sorted_members(members))
    return {member: [one.queue_id for one in shares.get(member, ())] for member in members}


def strategy_of(name: str) -> Shares:
    """The strategy with this name. ProtocolError INVALID_PARAMETER for one that does not exist, or says nothing whole."""
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
