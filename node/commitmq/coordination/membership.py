"""Who consumes which queue of a group: sessions, average allocation, cooperative hand-over with fencing.

Pure: the caller brings the clock (milliseconds, monotonic) and the queues of a topic.

Two tables decide. ``target`` says who *should* have a queue: for each topic its queues in order are cut into
consecutive shares, as even as possible, for the members subscribed to it in the order of their names (RocketMQ's
average allocation). ``holders`` says who *has* it: only the holder may commit, and a queue has at most one. They
differ during a rebalance:

* a queue without a holder is given to its target in the answer to the target's next join or heartbeat;
* a queue held by another than its target is named in ``revoke`` of the holder's answers, and becomes free when the
  holder no longer lists it in ``owned``, leaves, or its session ends.

Answers cross requests on the wire: a heartbeat sent before the answer that gave a queue was read does not list that
queue, and must not count as giving it back. So every gift has the group's ``generation`` (which grows with each gift
and each new target), members repeat the newest generation they read, and an absent queue is free only when that is
not older than the gift.

After a restart of the coordinator nobody is a member, yet consumers go on consuming until they hear so. They join
again and name what they own (``owned``), which is theirs as long as nobody else holds it. Those who were members
before the restart are *awaited*: until they have all come back, left, or missed a session time-out, no queue that
nobody claims is given away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from commitmq.errors import ProtocolError

Queue = tuple[str, int]  # topic, queue id
QueuesOf = Callable[[str], Iterable[int]]  # ids of a topic's readable queues; none for an unknown topic


class View(NamedTuple):
    """What a member is told: it may consume ``assigned`` and must stop, commit and no longer list ``revoke``."""

    generation: int
    assigned: list[Queue]
    revoke: list[Queue]
    settled: bool  # False while this member has to give queues back or waits for some: it should come again soon


class Awaited(NamedTuple):
    """A member of before the restart that has not come back; given up at ``until_ms``."""

    until_ms: int
    session_timeout_ms: int


@dataclass(slots=True)
class Member:
    """One session."""

    name: str
    topics: frozenset[str]
    session_timeout_ms: int
    heard_ms: int
    held: dict[Queue, int] = field(default_factory=dict)  # queue -> generation of the answer that gave it
    owned: frozenset[Queue] = frozenset()  # as its last request said


class Membership:
    """The members of one group."""

    def __init__(self, group: str, queues_of: QueuesOf, *, generation: int = 0, max_members: int = 1_000) -> None:
        """``generation`` must exceed every one an earlier coordinator gave out for the group."""
        self.group = group
        self.generation = generation
        self.members: dict[str, Member] = {}
        self.holders: dict[Queue, str] = {}
        self.target: dict[Queue, str] = {}
        self.awaited: dict[str, Awaited] = {}
        self._queues_of = queues_of
        self._max_members = max_members

    @property
    def settled(self) -> bool:
        """True when everyone has exactly what it should have."""
        return self.holders == self.target and not self.awaited

    def wait_for(self, members: Mapping[str, int], now_ms: int) -> None:
        """Expect members of an earlier coordinator: name -> session time-out in ms."""
        for name, session_timeout_ms in members.items():
            if name not in self.members:
                self.awaited[name] = Awaited(now_ms + session_timeout_ms, session_timeout_ms)

    def join(
        self,
        name: str,
        topics: Iterable[str],
        owned: Iterable[Queue],
        session_timeout_ms: int,
        now_ms: int,
        generation: int = 0,
    ) -> View:
        """Enter, or enter anew with another subscription. ``owned`` is what the member still consumes.

        ``topics`` must not be empty. ``generation`` is the newest that the member read, 0 for none: a join that is sent
        again while the first one's answer is under way gives nothing back, just like a heartbeat.
        Raises ProtocolError LIMIT_EXCEEDED when the group is full.
        """
        member = self.members.get(name)
        if member is None:
            if len(self.members) >= self._max_members:
                raise ProtocolError(
                    "LIMIT_EXCEEDED", f"group {self.group} has {self._max_members} members, the most that are allowed"
                )
            member = self.members[name] = Member(name, frozenset(), session_timeout_ms, now_ms)
            self.awaited.pop(name, None)
        member.session_timeout_ms = session_timeout_ms
        wanted = frozenset(topics)
        changed = member.topics != wanted
        member.topics = wanted
        self._settle(member, frozenset(owned), generation, now_ms)
        if changed:
            self.rebalance()
        return self._view(member)

    def heartbeat(self, name: str, generation: int, owned: Iterable[Queue], now_ms: int) -> View:
        """Stay in. ``generation`` is the newest the member read, ``owned`` what it consumes now.

        Raises ProtocolError UNKNOWN_MEMBER: the session ended or the coordinator restarted; join again with ``owned``.
        """
        member = self.member(name)
        self._settle(member, frozenset(owned), generation, now_ms)
        return self._view(member)

    def leave(self, name: str) -> None:
        """Go; everything the member held is free at once. Leaving twice is no error."""
        self.awaited.pop(name, None)
        if name in self.members:
            self._remove(name)
            self.rebalance()

    def expire(self, now_ms: int) -> list[str]:
        """End the sessions that are over at ``now_ms``; returns their names."""
        for name in [name for name, one in self.awaited.items() if one.until_ms <= now_ms]:
            del self.awaited[name]
        over = [
            member.name for member in self.members.values() if member.heard_ms + member.session_timeout_ms <= now_ms
        ]
        for name in over:
            self._remove(name)
        if over:
            self.rebalance()
        return over

    def next_expiry_ms(self) -> int | None:
        """When :meth:`expire` may next have something to do."""
        times = [member.heard_ms + member.session_timeout_ms for member in self.members.values()]
        return min([*times, *(one.until_ms for one in self.awaited.values())], default=None)

    def rebalance(self) -> None:
        """Compute the target anew: after a change of members, subscriptions, topics or numbers of queues."""
        subscribers: dict[str, list[str]] = {}
        for name in sorted(self.members):
            for topic in self.members[name].topics:
                subscribers.setdefault(topic, []).append(name)
        target: dict[Queue, str] = {}
        for topic, names in subscribers.items():
            target.update(allocate(topic, self._queues_of(topic), names))
        if target != self.target:
            self.target = target
            self.generation += 1

    def check_owner(self, name: str | None, queue: Queue) -> None:
        """Raise unless ``name`` may commit offsets of ``queue``.

        Without a name (a tool, a consumer with explicit queues) the queue must have no holder. ProtocolError FENCED
        when another holds the queue, UNKNOWN_MEMBER when ``name`` has no session.
        """
        if name is not None:
            self.member(name)
        holder = self.holders.get(queue)
        if holder != name:
            owner = f"member {holder!r} owns it" if holder else f"member {name!r} does not own it"
            raise ProtocolError("FENCED", f"queue {queue[1]} of topic {queue[0]} in group {self.group}: {owner}")

    def member(self, name: str) -> Member:
        """The session of ``name``; ProtocolError UNKNOWN_MEMBER when it has none."""
        try:
            return self.members[name]
        except KeyError:
            raise ProtocolError(
                "UNKNOWN_MEMBER", f"{name!r} has no session in group {self.group}: join again and name what you own"
            ) from None

    def _remove(self, name: str) -> None:
        for queue in self.members.pop(name).held:
            del self.holders[queue]

    def _settle(self, member: Member, owned: frozenset[Queue], read_generation: int, now_ms: int) -> None:
        """Take note of what ``member`` says it owns: free what it gave back, accept what nobody else holds."""
        member.heard_ms = now_ms
        member.owned = owned
        for queue, given in list(member.held.items()):
            if queue not in owned and read_generation >= given and self.target.get(queue) != member.name:
                del member.held[queue]
                del self.holders[queue]
        for queue in owned:
            if queue not in self.holders:
                self.holders[queue] = member.name
                member.held[queue] = self.generation

    def _view(self, member: Member) -> View:
        name = member.name
        assigned = [queue for queue, owner in self.target.items() if owner == name]
        gifts = [queue for queue in assigned if queue not in self.holders] if not self.awaited else []
        if gifts:
            self.generation += 1
            for queue in gifts:
                self.holders[queue] = name
                member.held[queue] = self.generation
        ready = sorted(queue for queue in assigned if self.holders.get(queue) == name)
        revoke = sorted(member.owned.difference(ready))
        return View(self.generation, ready, revoke, not revoke and len(ready) == len(assigned))


def allocate(topic: str, queues: Iterable[int], members: list[str]) -> dict[Queue, str]:
    """Consecutive shares of a topic's queues, as even as possible, the first members taking one more."""
    ordered = sorted(queues)
    share, extra = divmod(len(ordered), len(members))
    shares: dict[Queue, str] = {}
    start = 0
    for number, name in enumerate(members):
        end = start + share + (number < extra)
        shares.update({(topic, queue): name for queue in ordered[start:end]})
        start = end
    return shares
