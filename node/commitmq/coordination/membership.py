"""The members of one consumer group and their queues: sessions, average allocation, cooperative hand-over with fencing.

The module is pure: the caller brings the clock (milliseconds, monotonic) and the queues of a topic.

Two assignments decide. ``target`` says which member *should* have a queue: for each topic its queues in order are cut
into consecutive shares, as even as possible, for the subscribed members in the order of their names (RocketMQ's average
allocation). ``holders`` says which member *has* it: only the holder may commit, and a queue has at most one. They
differ during a rebalance:

* a queue without a holder is given to its target in the answer to the target's next join or heartbeat;
* a queue held by another member than its target is named in ``revoke`` of the holder's answers, and becomes free when
  the holder no longer lists it in ``owned``, leaves, or its session ends.

Answers cross requests on the wire: a heartbeat sent before the answer that gave a queue was read does not list that
queue, and must not count as giving it back. So every gift has the group's ``generation`` (which grows with each gift
and each new target), and members repeat the newest generation they have read. An absent queue is free only when that
generation is not older than the gift. A queue that was asked back and is meant for its holder again is given again:
the holder may have stopped reading it, and say so after this answer.

The cost of a request grows with the topics and queues of its member, not with the group: ``target`` is no stored table
but arithmetic on the sorted names of a topic's subscribers, and a heartbeat that changes nothing is answered with the
last answer.

After a restart of the coordinator the group has no members, yet consumers continue until they learn of it. They join
again and name the queues that they own (``owned``), which stay theirs as long as no other member holds them. The
members from before the restart are *awaited*: until they have all come back, left, or missed a session time-out, no
unclaimed queue is given away.

A member that joins after the end of its session is not ``kept``: its queues may have belonged to others, and an
operator may have reset their committed offsets, even to the same offset. Its claims do not count, and its queues are
given again.

Who should have each queue of a group whose strategy is not RocketMQ's average one (remoting 6.1).

The average strategy is arithmetic, and :mod:`commitmq.coordination.membership` has it. The others need all members and
queues of a topic: a table of the topic is made when a member asks first, and holds until members or queues change.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from commitmq.errors import ProtocolError
from commitmq.semantics.allocation import AVERAGE, MessageQueue, sorted_members, strategy_of

__all__ = ["AVERAGE", "MAX_STRATEGY_CHARACTERS", "AllocationTable"]

MAX_STRATEGY_CHARACTERS: Final = 8_192
"""Of the name of a strategy. The name of ``CONFIG`` has all members and their queues."""


class AllocationTable:
    """Who should have each queue of a group whose strategy is not RocketMQ's average one (remoting 6.1).

    The average strategy is arithmetic, see the module. The others need all members and queues of a topic: a table of the topic
    is made when a member asks first, and holds until members or queues change.

    The owners of queues by the strategy ``name``.
    """

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


Queue = tuple[str, int]  # topic, queue id
QueuesOf = Callable[[str], Sequence[int]]  # ids of a topic's readable queues, ascending; none for an unknown topic

_T = TypeVar("_T", str, int)

# Approximate memory of a member: for itself, for each topic name it subscribes to, for each queue it has or claims.
_MEMBER_BYTES: Final = 400
_NAME_BYTES: Final = 100
_QUEUE_BYTES: Final = 200
_NEVER_MS: Final = 1 << 62


class View(NamedTuple):
    """The answer for a member: it may consume ``assigned`` and must stop, commit and no longer list ``revoke``."""

    generation: int
    assigned: list[Queue]
    revoke: list[Queue]
    settled: bool  # False while this member has to give queues back or waits for some: it should come again soon
    kept: bool = True  # False: its session had ended; its queues may have been others' or reset in the meantime


class AwaitedMember(NamedTuple):
    """A member from before the restart that has not come back; it is given up at ``until_ms``."""

    until_ms: int
    session_timeout_ms: int


@dataclass(slots=True)
class Member:
    """One session."""

    name: str
    topics: frozenset[str]
    session_timeout_ms: int
    heard_ms: int
    ends_ms: int = _NEVER_MS  # its session ends then, unless it is heard again: its connection has ended
    held: dict[Queue, int] = field(default_factory=dict)  # queue -> generation of the answer that gave it
    claims: set[Queue] = field(default_factory=set)  # of held: queues that it had already, so no answer gave them
    asked: frozenset[Queue] = frozenset()  # of held: queues that its last answer did not assign
    owned: frozenset[Queue] = frozenset()  # as in its last request
    anew: dict[Queue, int] = field(default_factory=dict)  # see :mod:`commitmq.coordination.operations`
    instance: str = ""  # the instance of this name that joined last
    user: str = ""  # whose consumer it is
    since: int = 0  # the generation of the session's first answer; until the member has read it, its claims are older
    size_bytes: int = 0  # its approximate memory
    told: View | None = None  # its last answer
    told_at: int = -1  # the group's count of changes at that answer, which holds while the count is the same

    @property
    def due_ms(self) -> int:
        return min(self.heard_ms + self.session_timeout_ms, self.ends_ms)


class Membership:
    """The members of one group."""

    def __init__(self, group: str, queues_of: QueuesOf, *, generation: int = 0, max_members: int = 1_000) -> None:
        """``generation`` must exceed every generation that an earlier coordinator gave out for the group."""
        self.group = group
        self.generation = generation
        self.members: dict[str, Member] = {}
        self.holders: dict[Queue, str] = {}
        self.awaited: dict[str, AwaitedMember] = {}
        self.size_bytes = 0  # approximate memory of its members
        self._subscribers: dict[str, list[str]] = {}  # topic -> names, sorted
        self._changes = 0  # grows with every event that may change a member's answer
        self._queues_of = queues_of
        self._max_members = max_members
        self.strategy: str | None = None  # that a member named
        self.table: AllocationTable | None = None  # of another strategy than the average one

    @property
    def settled(self) -> bool:
        """True when every member has exactly the queues it should have."""
        return self.holders == self.target and not self.awaited

    @property
    def target(self) -> dict[Queue, str]:
        """The member that should have each queue."""
        return {
            (topic, queue): name
            for topic, names in self._subscribers.items()
            for name in names
            for queue in self._share(topic, name)
        }

    def has_subscriber(self, topic: str) -> bool:
        return topic in self._subscribers

    def wait_for(self, members: Mapping[str, int], now_ms: int) -> None:
        """Expect members of an earlier coordinator: name -> session time-out in ms."""
        for name, session_timeout_ms in members.items():
            if name not in self.members:
                self.awaited[name] = AwaitedMember(now_ms + session_timeout_ms, session_timeout_ms)

    def size_with(self, name: str, topics: Iterable[str], owned: int) -> int:
        """Approximate memory of member ``name`` with this subscription and this many owned queues."""
        names_bytes = share = 0
        for topic in topics:
            names_bytes += _NAME_BYTES + len(topic)
            subscribers = self._subscribers.get(topic, ())
            sharing = len(subscribers) + (_find(subscribers, name) < 0)
            share += -(-len(self._queues_of(topic)) // sharing)
        return _MEMBER_BYTES + names_bytes + _QUEUE_BYTES * max(share, owned)

    def join(
        self,
        name: str,
        topics: Iterable[str],
        owned: Iterable[Queue],
        session_timeout_ms: int,
        now_ms: int,
        generation: int = 0,
        instance: str = "",
    ) -> View:
        """Enter the group, or enter again with another subscription. ``owned`` has the queues that the member still
        consumes.

        A member's ``owned`` counts while its session lasts, and for one session more after a restart of the
        coordinator. Otherwise the answer says that the member is not ``kept``: it has to begin again with the queues it
        is given.

        ``topics`` must not be empty. ``generation`` is the newest that the member read, 0 for none. So a join that is
        sent again while the first one's answer is under way gives nothing back, just like a heartbeat. ``instance``
        distinguishes two consumers that use one name: the one that joins takes the place of the other, with its queues.
        Raises ProtocolError LIMIT_EXCEEDED when the group is full.
        """
        member = self.members.get(name)
        if member is None:
            if len(self.members) >= self._max_members:
                raise ProtocolError(
                    "LIMIT_EXCEEDED",
                    f"group {self.group} has {self._max_members} members, the most that are allowed"
                    " (groups.max_members_per_group)",
                )
            member = self.members[name] = Member(name, frozenset(), session_timeout_ms, now_ms)
            if self.awaited.pop(name, None) is not None:
                self._changes += 1
            else:
                self.generation += 1
                member.since = self.generation
        if member.instance != instance:
            if member.held or member.owned:
                # The new instance has not read the previous one's answers: it is given the queues again, and older
                # commits no longer count.
                self.generation += 1
                member.held = dict.fromkeys(member.held, self.generation)
            member.instance, member.owned, member.told = instance, frozenset(), None
            member.claims.clear()
        member.session_timeout_ms = session_timeout_ms
        wanted = frozenset(topics)
        if member.topics != wanted:
            self._subscribe(member, wanted)
        kept = generation >= member.since
        self._settle(member, owned, generation, now_ms, accept=kept)
        return self._view(member)._replace(kept=kept)

    def heartbeat(
        self, name: str, generation: int, owned: Iterable[Queue] | None, now_ms: int, instance: str = ""
    ) -> View:
        """Stay in the group. ``generation`` is the newest the member read, ``owned`` the queues that it consumes now: None
        for those of its last request. Raises ProtocolError UNKNOWN_MEMBER: the session ended or the coordinator restarted;
        join again with ``owned``. FENCED: another ``instance`` has joined under the name.
        """
        member = self.member(name, instance)
        self._settle(member, member.owned if owned is None else owned, generation, now_ms)
        return self._view(member)

    def leave(self, name: str, instance: str = "") -> None:
        """Leave; all queues of the member are free at once. To leave twice, or after another instance joined, is no error."""
        if name in self.members and self.members[name].instance != instance:
            return
        if self.awaited.pop(name, None) is not None:
            self._changes += 1
        if name in self.members:
            self._remove(name)

    def expire(self, now_ms: int, names: Iterable[str] | None = None) -> list[str]:
        """End the sessions that are over at ``now_ms``, of all members or of ``names``. Returns their names."""
        over = []
        for name in [*self.members, *self.awaited] if names is None else names:
            awaited, member = self.awaited.get(name), self.members.get(name)
            if awaited is not None and awaited.until_ms <= now_ms:
                del self.awaited[name]
                self._changes += 1
            if member is not None and member.due_ms <= now_ms:
                self._remove(name)
                over.append(name)
        return over

    def due_ms(self, name: str) -> int | None:
        """When the session of ``name`` ends, or when it is no longer awaited; None when it is neither."""
        awaited, member = self.awaited.get(name), self.members.get(name)
        if member is not None:
            return member.due_ms
        return None if awaited is None else awaited.until_ms

    def rebalance(self) -> None:
        """Share the queues again: a topic has appeared, gone or changed its number of queues."""
        if self.table is not None:
            self.table.forget()
        self.generation += 1
        self._changes += 1

    def check_member(self, name: str | None, instance: str = "") -> None:
        """Raise unless ``name`` may act for the group: ProtocolError UNKNOWN_MEMBER when it has no session, FENCED when it
        is another ``instance``. Without a name, FENCED while members from before a restart of the coordinator are awaited:
        they may still read, and would undo a change that they do not know.
        """
        if name is not None:
            self.member(name, instance)
        elif self.awaited:
            raise ProtocolError(
                "FENCED",
                f"group {self.group}: the coordinator was started again, and {len(self.awaited)} of the group's members of"
                " before have neither come back nor been away for as long as their sessions last",
            )

    def check_owner(self, name: str | None, queue: Queue, generation: int | None = None) -> None:
        """Raise unless ``name`` may commit offsets of ``queue``.

        Without a name (a tool, a consumer with explicit queues) the queue must have no holder. ``generation`` is the
        newest that the member read: a commit for a queue that it was given later is of an earlier time. ProtocolError
        FENCED when another member holds the queue, UNKNOWN_MEMBER when ``name`` has no session.
        """
        holder = self.holders.get(queue)
        where = f"queue {queue[1]} of topic {queue[0]} in group {self.group}"
        if name is not None:
            member = self.member_of(name)
            if generation is not None and queue not in member.claims and member.held.get(queue, -1) > generation:
                raise ProtocolError(
                    "FENCED", f"{where}: member {name!r} was given it again, and has not read that answer yet"
                )
        if holder != name:
            owner = f"member {holder!r} owns it" if holder else f"member {name!r} does not own it"
            raise ProtocolError("FENCED", f"{where}: {owner}")

    def member(self, name: str, instance: str = "") -> Member:
        """The session of ``name``; ProtocolError UNKNOWN_MEMBER when it has none, FENCED when it is another instance's."""
        found = self.member_of(name)
        if found.instance != instance:
            raise ProtocolError(
                "FENCED",
                f"another consumer has joined group {self.group} as member {name!r}: a name is for one at a time",
            )
        return found

    def member_of(self, name: str) -> Member:
        """The session of ``name``, of any instance; ProtocolError UNKNOWN_MEMBER when there is none."""
        if (member := self.members.get(name)) is not None:
            return member
        raise ProtocolError(
            "UNKNOWN_MEMBER", f"{name!r} has no session in group {self.group}: join again and name the queues you own"
        )

    def _subscribe(self, member: Member, wanted: frozenset[str]) -> None:
        for topic in member.topics - wanted:
            names = self._subscribers[topic]
            del names[bisect_left(names, member.name)]
            if not names:
                del self._subscribers[topic]
        for topic in wanted - member.topics:
            insort(self._subscribers.setdefault(topic, []), member.name)
        member.topics = wanted
        self.rebalance()

    def _remove(self, name: str) -> None:
        member = self.members[name]
        self._subscribe(member, frozenset())
        for queue in member.held:
            del self.holders[queue]
        del self.members[name]
        self.size_bytes -= member.size_bytes

    def _settle(
        self, member: Member, owned: Iterable[Queue], read_generation: int, now_ms: int, *, accept: bool = True
    ) -> None:
        """Note the queues of ``owned``: free those returned, and ``accept`` those that no other member holds."""
        member.heard_ms, member.ends_ms = now_ms, _NEVER_MS
        claimed = frozenset(owned)
        if claimed != member.owned:
            # Keep the old set when they are equal: a heartbeat every second must not leave new strings behind.
            member.owned = claimed
            member.told = None
        for queue in member.held.keys() - claimed:
            if read_generation >= member.held[queue] and self._owner(queue) != member.name:
                del member.held[queue]
                member.claims.discard(queue)
                del self.holders[queue]
                self._changes += 1
        if member.told is None or member.told_at != self._changes:
            for queue in claimed if accept else ():
                if queue not in self.holders:
                    self.holders[queue] = member.name
                    member.held[queue] = self.generation
                    member.claims.add(queue)
                    self._changes += 1
            size_bytes = self.size_with(member.name, member.topics, len(claimed))
            self.size_bytes += size_bytes - member.size_bytes
            member.size_bytes = size_bytes

    def _view(self, member: Member) -> View:
        if member.told is not None and member.told_at == self._changes:
            return member.told
        name = member.name
        assigned = [(topic, queue) for topic in member.topics for queue in self._share(topic, name)]
        free = [queue for queue in assigned if queue not in self.holders] if not self.awaited else []
        gifts = free + [queue for queue in assigned if queue in member.asked and queue in member.held]
        if gifts:
            self.generation += 1
            self._changes += 1
            for queue in gifts:
                self.holders[queue] = name
                member.held[queue] = self.generation
        ready = sorted(queue for queue in assigned if self.holders.get(queue) == name)
        member.asked = frozenset(member.held.keys() - set(ready))
        revoke = sorted(member.owned.difference(ready))
        member.told = View(self.generation, ready, revoke, not revoke and len(ready) == len(assigned))
        member.told_at = self._changes
        return member.told

    def _share(self, topic: str, name: str) -> Sequence[int]:
        """The queues of ``topic`` that are meant for ``name``."""
        names = self._subscribers.get(topic, ())
        if self.table is not None:
            return self.table.share(topic, self._queues_of(topic), names, name)
        number = _find(names, name)
        return () if number < 0 else share(self._queues_of(topic), len(names), number)

    def _owner(self, queue: Queue) -> str | None:
        """The member that should have ``queue``."""
        names = self._subscribers.get(queue[0])
        queues = self._queues_of(queue[0])
        if not names or (place := _find(queues, queue[1])) < 0:
            return None
        if self.table is not None:
            return self.table.owner(queue[0], queues, names, queue[1])
        least, extra = divmod(len(queues), len(names))
        ahead = extra * (least + 1)
        return names[place // (least + 1) if place < ahead else extra + (place - ahead) // least]


def share(queues: Sequence[int], members: int, number: int) -> Sequence[int]:
    """The share of member ``number`` (from 0) of ``members`` in a topic's ``queues``: consecutive queues, one more for
    the first members when the division leaves a remainder.
    """
    least, extra = divmod(len(queues), members)
    start = number * least + min(number, extra)
    return queues[start : start + least + (number < extra)]


def _find(ordered: Sequence[_T], one: _T) -> int:
    """The index of ``one`` in ``ordered``, -1 when it is absent."""
    place = bisect_left(ordered, one)
    return place if place < len(ordered) and ordered[place] == one else -1
