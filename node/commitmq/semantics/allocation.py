"""Allocation strategies: which queues of a topic a member of a group gets (remoting 6.1).

Every member computes its own share from the same two lists, so they must be sorted in the same way by all: queues by
topic, node and queue id, members as plain text. The shares of all members together are then each queue once.

Allocation strategies by name, and the shares of all members at once (remoting 6.1).

A name is one of RocketMQ's, ``MACHINE_ROOM:a,b`` with rooms, or ``CONFIG:m=0,1;n=2`` with the queues of each member.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from commitmq.errors import InvalidMessageError, ProtocolError


class MessageQueue(NamedTuple):
    """One queue of a topic on one node. Its order is the order of the queues."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        """RocketMQ's text of a MessageQueue, which consistent hash places on its ring."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.queue_id}]"


Strategy = Callable[[str, Sequence[MessageQueue], Sequence[str]], list[MessageQueue]]
"""(own member id, all queues, all member ids) to the own queues; nothing when the member is not in the list."""

VIRTUAL_NODES: Final = 10

_Item = TypeVar("_Item")


def sorted_members(members: Collection[str]) -> list[str]:
    """``members`` in Java's order of text: by UTF-16 units."""
    return sorted(members, key=lambda member: member.encode("utf-16-be", "surrogatepass"))


def averagely(me: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """AVG: a contiguous share each; the first members get one queue more when they do not divide evenly."""
    if not _may_share(me, queues, members):
        return []
    index = members.index(me)
    size, rest = divmod(len(queues), len(members))
    if len(queues) <= len(members):
        size, start = 1, index
    elif index < rest:
        size, start = size + 1, index * (size + 1)
    else:
        start = index * size + rest
    return list(queues[start : start + size])


def averagely_by_circle(me: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
    """AVG_BY_CIRCLE: the queues are dealt out one by one."""
    if not _may_share(me, queues, members):
        return []
    return list(queues[members.index(me) :: len(members)])


def consistent_hash(
    me: str, queues: Sequence[MessageQueue], members: Sequence[str], *, virtual_nodes: int = VIRTUAL_NODES
) -> list[MessageQueue]:
    """CONSISTENT_HASH: few queues move when a member comes or goes. Each member has ``virtual_nodes`` places on a ring
    of 32 bits, and a queue belongs to the first place from its own on.
    """
    if not _may_share(me, queues, members):
        return []
    return all_by_consistent_hash(queues, members, virtual_nodes=virtual_nodes).get(me, [])


def all_by_consistent_hash(
    queues: Sequence[MessageQueue], members: Sequence[str], *, virtual_nodes: int = VIRTUAL_NODES
) -> dict[str, list[MessageQueue]]:
    """The shares of all members, from one ring."""
    ring: dict[int, str] = {}
    for member in members:
        for number in range(virtual_nodes):
            ring[ring_place(f"{member}-{number}")] = member
    places = sorted(ring)
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues if places else ():
        at = bisect_left(places, ring_place(str(queue)))
        found.setdefault(ring[places[at % len(places)]], []).append(queue)
    return found


def ring_place(text: str) -> int:
    """RocketMQ's hash of consistent hash: the first four bytes of the text's MD5."""
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:4], "big")


def machine_room(rooms: Collection[str]) -> Strategy:
    """MACHINE_ROOM: only queues of nodes named ``room@name`` with a room of ``rooms``, in even shares."""

    def allocate(me: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        if not _may_share(me, queues, members):
            return []
        ours = [queue for queue in queues if _room_of_name(queue.broker_name) in rooms]
        index = members.index(me)
        size, rest = divmod(len(ours), len(members))
        share = ours[size * index : size * (index + 1)]
        return share + ours[size * len(members) + index :][:1] if index < rest else share

    return allocate


def machine_room_nearby(
    inner: Strategy, room_of_queue: Callable[[MessageQueue], str], room_of_member: Callable[[str], str]
) -> Strategy:
    """MACHINE_ROOM_NEARBY: ``inner`` shares a room's queues among the members of that room. Queues of rooms without a
    member are shared among all. Raises InvalidMessageError when a room is unknown (empty).
    """

    def allocate(me: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        if not _may_share(me, queues, members):
            return []
        queues_in = _by_room(queues, room_of_queue)
        members_in = _by_room(members, room_of_member)
        own_room = room_of_member(me)
        found = inner(me, queues_in.pop(own_room, []), members_in[own_room])
        for room in sorted(queues_in):
            if room not in members_in:
                found += inner(me, queues_in[room], members)
        return found

    return allocate


def by_configuration(queues_of: Mapping[str, Sequence[MessageQueue]]) -> Strategy:
    """CONFIG: a fixed list for each member; RocketMQ configures each client with its own."""

    def allocate(me: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        return list(queues_of.get(me, ()))

    return allocate


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "AVG": averagely,
    "AVG_BY_CIRCLE": averagely_by_circle,
    "CONSISTENT_HASH": consistent_hash,
}
"""The strategies without a setting, by RocketMQ's name."""


def _may_share(me: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> bool:
    return bool(queues) and me in members


def _room_of_name(broker_name: str) -> str | None:
    room, at, name = broker_name.partition("@")
    return room if at and name and "@" not in name else None


def _by_room(items: Sequence[_Item], room_of: Callable[[_Item], str]) -> dict[str, list[_Item]]:
    found: dict[str, list[_Item]] = {}
    for item in items:
        room = room_of(item)
        if not room:
            raise InvalidMessageError(f"the machine room of {item} is unknown")
        found.setdefault(room, []).append(item)
    return found


Shares = Callable[[Sequence[MessageQueue], Sequence[str]], dict[str, list[MessageQueue]]]
"""(all queues, all members in their order) to the queues of each member; a member without any may be omitted."""

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
