"""The consumer groups of a node: their names and settings (``config/subscriptionGroup.json``, RocketMQ's) and their
members.

A group enters the file when it is first used. Members are in memory only: they send a heartbeat every second, and after
a restart of the coordinator they join again. Only the list of *previous members* must outlive the coordinator, so that
the queues of a consumer that has not come back yet are not given to another one (see
:mod:`commitmq.coordination.membership`); :mod:`commitmq.coordination.makers` keeps that list.

The file is written after the answers, and at most once in ``groups.offsets_interval_ms``: a group that a crash
removes from the file comes back with its members, its offsets or its next use.

An event in one group never starts work for all groups. Sessions end by a heap of times; a change of a topic looks up
its subscribers. Memory is bounded by the limits of the section ``[groups]``.
"""

from __future__ import annotations

import heapq
import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import orjson

from commitmq.config import GroupsConfig
from commitmq.coordination.makers import GROUP, MemberLog
from commitmq.coordination.membership import AVERAGE, AllocationTable, Membership, Queue, QueuesOf, View
from commitmq.errors import InvalidMessageError, ProtocolError, StoreError
from commitmq.format.constants import DEAD_LETTER_GROUP
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.group_config import GroupConfig, GroupTable
from commitmq.store.metadata.topic_config import validate_group


class UnwrittenSettings:
    """Groups whose settings were changed in a table and are not in its file yet, with their settings in the file, and the
    topics that they must not read there.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[GroupConfig | None, dict[str, Any] | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def note(self, table: GroupTable, name: str) -> None:
        """Call it before the group is changed."""
        if name not in self._before:
            forbidden = table.forbidden.get(name)
            self._before[name] = table.groups.get(name), None if forbidden is None else dict(forbidden)

    def remove(self, table: GroupTable, name: str) -> bool:
        """Forget the settings of a group; whoever uses it makes it again. False when there were none."""
        known = table.groups.get(name)
        if known is None:
            return False
        self.note(table, name)
        table.remove(name)
        return True

    def forbid(self, table: GroupTable, name: str, topic: str, *, readable: bool) -> int:
        """Say whether an existing group may read ``topic``. Returns its bits of ``forbiddenTable``."""
        self.note(table, name)
        return table.forbid(name, topic, readable=readable)

    def clear(self) -> None:
        """The file has them."""
        self._before.clear()

    def take_back(self, table: GroupTable) -> list[str]:
        """The file could not be written: nothing was changed. Returns the names of groups that do not exist then."""
        removed = []
        for name, (group, forbidden) in self._before.items():
            if group is not None:
                table.put(group)
            else:
                table.remove(name)
                removed.append(name)
            table.put_forbidden(name, forbidden)
        self._before.clear()
        return removed


def check_name(name: str) -> None:
    """ProtocolError INVALID_PARAMETER unless ``name`` is a legal group name."""
    try:
        validate_group(name)
    except InvalidMessageError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error


def check_enabled(name: str, group: GroupConfig | None) -> None:
    """ProtocolError NO_PERMISSION when an administrator has switched the group off."""
    if group is not None and not group.consume_enabled:
        raise ProtocolError(
            "NO_PERMISSION",
            f"group {name} may not consume: its consumeEnable is off"
            f" (`commitmq group config {name} --set consumeEnable=true` switches it on)",
        )


def check_size(table: GroupTable, known: GroupConfig | None, group: GroupConfig, config: GroupsConfig) -> None:
    """ProtocolError LIMIT_EXCEEDED when the settings of one group, or of all, would be too large. A smaller one passes."""
    before, size = 0 if known is None else known.object_bytes, group.object_bytes
    _check_room(table, group.name, size, max(0, size - before), config)


def check_forbidden_size(table: GroupTable, name: str, topic: str, config: GroupsConfig) -> None:
    """The same for one more topic that a group must not read."""
    known = table.forbidden.get(name) or {}
    if topic not in known:
        more = len(orjson.dumps(topic)) + 4
        _check_room(table, name, len(orjson.dumps(known)) + more, more, config)


def _check_room(table: GroupTable, name: str, size: int, more: int, config: GroupsConfig) -> None:
    if more and size > (most := config.max_group_settings_bytes):
        raise ProtocolError(
            "LIMIT_EXCEEDED",
            f"the settings of group {name} would have {size} bytes, at most {most} are allowed"
            " (groups.max_group_settings_bytes)",
        )
    if more and table.object_bytes + more > (most := config.max_settings_bytes):
        raise ProtocolError(
            "LIMIT_EXCEEDED",
            f"the settings of all groups would have {table.object_bytes + more} bytes, at most {most} are allowed"
            " (groups.max_settings_bytes)",
        )


def changed(name: str, known: GroupConfig | None, changes: dict[str, object]) -> GroupConfig:
    """The group with other settings. ProtocolError INVALID_PARAMETER for a setting or a value that is none."""
    try:
        return (known or GroupConfig(name)).changed(changes)
    except ValueError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error


SHARE: Final = 50  # of the time, at most one part in this number


class Pace:
    """Limits expensive work that is not urgent: not before an interval is over, and only for a small share of the time.

    ``with pace:`` around the work measures it. :attr:`next_ms` (monotonic) is when it may be done again.

    So the cost of a file does not grow with its size: a larger one is written less often.
    """

    def __init__(self, least_ms: int) -> None:
        """``least_ms``: the shortest time between the end of the work and its next beginning. 0: no pause at all."""
        self._least_ms = least_ms
        self._began_ms = 0
        self.next_ms = 0

    def is_due(self, now_ms: int) -> bool:
        return now_ms >= self.next_ms

    def __enter__(self) -> Self:
        self._began_ms = _monotonic_ms()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_ms = _monotonic_ms()
        if self._least_ms:
            self.next_ms = ended_ms + max(self._least_ms, SHARE * (ended_ms - self._began_ms))


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def use_strategy(group: Membership, strategy: AllocationTable | None) -> None:
    """Share the group's queues by ``strategy`` from now on. ProtocolError NO_PERMISSION when its members named another one."""
    if strategy is None or group.strategy == strategy.name:
        return
    if group.strategy is not None:
        raise ProtocolError(
            "NO_PERMISSION",
            f"the members of group {group.group} share queues by the strategy {group.strategy}, not {strategy.name}: name"
            " the same one, or none, or wait until they have left",
        )
    group.strategy = strategy.name
    group.table = None if strategy.name == AVERAGE else strategy
    group.rebalance()


_T = TypeVar("_T")

# The next look at a session comes within this time, so that a member that joins again and again with other time-outs
# leaves no more than a few looks behind.
_LOOK_MS = 5_000
# Sessions end at most this much late: thousands of members must not wake the coordinator a thousand times a second.
_GRAIN_MS = 50
_PREPARED_AT_ONCE = 200


class GroupCoordinator:
    """All groups. Times are monotonic milliseconds."""

    def __init__(
        self,
        layout: StoreLayout,
        table: GroupTable,
        queues_of: QueuesOf,
        config: GroupsConfig,
        first_generation: int,
        committed: Iterable[str],
    ) -> None:
        """Use :meth:`load`."""
        self._path = layout.config / "subscriptionGroup.json"
        self._log = MemberLog(layout.own / "group_members.log")
        self.table, self._queues_of, self.config = table, queues_of, config
        self._first_generation = first_generation
        self._names = sorted({*table.groups, *committed})
        self._live: dict[str, Membership] = {}
        self._looks: list[tuple[int, str, str]] = []  # heap: when to look at which group's member
        self._next_look: dict[tuple[str, str], int] = {}
        self._subscribed: dict[str, set[str]] = {}  # topic -> groups
        self._size_bytes = 0
        self.ended: list[str] = []  # groups without members, since the caller last emptied this list
        self._written_version = replace(table.version)
        self._unprepared = iter(list(table.groups.items()))
        self._pace, self.unwritten = Pace(config.offsets_interval_ms), UnwrittenSettings()
        self.makes: Callable[[str, str], None] = lambda kind, name: None  # may refuse

    @classmethod
    def load(
        cls,
        layout: StoreLayout,
        queues_of: QueuesOf,
        config: GroupsConfig,
        *,
        first_generation: int,
        now_ms: int,
        committed: Iterable[str] = (),
    ) -> GroupCoordinator:
        """Load a store's groups and expect the members of the last coordinator. ``committed``: groups with offsets.

        ``first_generation`` must grow with every start (a wall clock in ms does), because members repeat generations
        over a restart. Raises StoreError when ``subscriptionGroup.json`` cannot be read in either generation.
        """
        table = GroupTable.load(layout.config / "subscriptionGroup.json")
        groups = cls(layout, table, queues_of, config, first_generation, committed)
        for name, members in groups._log.members.items():
            if name not in table.groups:
                groups._add(GroupConfig(name))
            groups._membership(name).wait_for(members, now_ms)
            for member, timeout_ms in members.items():
                groups._look_at(name, member, now_ms + timeout_ms, now_ms)
        return groups

    # ------------------------------------------------------------ names

    def names_from(self, first: str) -> Iterator[str]:
        """All known groups, in order, from ``first`` on. They must not change in the meantime."""
        return itertools.islice(self._names, bisect_left(self._names, first), None)

    def exists(self, name: str) -> bool:
        return name in self.table.groups or name in self._live

    def use(self, name: str, *, consuming: bool = True) -> None:
        """Make sure that the group exists and, when it is ``consuming``, may do so.

        ProtocolError INVALID_PARAMETER (bad name), GROUP_NOT_EXIST (``groups.auto_create`` is off), LIMIT_EXCEEDED,
        NO_PERMISSION (its ``consumeEnable`` is off).
        """
        if name not in self.table.groups:
            check_name(name)
            if not self.config.auto_create and name != DEAD_LETTER_GROUP:
                raise ProtocolError("GROUP_NOT_EXIST", f"there is no group {name!r}, and groups.auto_create is off")
            self._put(GroupConfig(name))
        if consuming:
            self.check_enabled(name)

    def check_enabled(self, name: str) -> None:
        """See :func:`commitmq.coordination.groups.check_enabled`."""
        check_enabled(name, self.table.groups.get(name))

    def configure(self, name: str, changes: dict[str, Any]) -> None:
        """Change settings of the group, which is made when it does not exist. The next :meth:`write` writes them at
        once. ProtocolError INVALID_PARAMETER for a wrong setting, LIMIT_EXCEEDED.
        """
        known = self.table.groups.get(name)
        group = changed(name, known, changes)
        check_size(self.table, known, group, self.config)
        if group != known:
            self.unwritten.note(self.table, name)
            self._put(group)

    @property
    def is_configured(self) -> bool:
        """Whether settings wait for :meth:`write`."""
        return bool(self.unwritten)

    def config_of(self, name: str) -> GroupConfig:
        """The settings of a group that is in use; see :meth:`use`."""
        return self.table.groups[name]

    def _put(self, group: GroupConfig) -> None:
        """Add or replace a group. ProtocolError LIMIT_EXCEEDED."""
        if group.name not in self.table.groups:
            if len(self.table.groups) >= (most := self.config.max_groups):
                raise ProtocolError("LIMIT_EXCEEDED", f"the node has {most} groups, the most (groups.max_groups)")
            self.makes(GROUP, group.name)
        self._add(group)

    def _add(self, group: GroupConfig) -> None:
        self.table.put(group)
        place = bisect_left(self._names, group.name)
        if place == len(self._names) or self._names[place] != group.name:
            self._names.insert(place, group.name)

    # ------------------------------------------------------------ members

    def membership(self, name: str) -> Membership | None:
        """The members of a group; None when it has none and expects none."""
        return self._live.get(name)

    def check_topics(self, count: int) -> None:
        """ProtocolError LIMIT_EXCEEDED when a member must not subscribe to so many topics."""
        if count > (most := self.config.max_topics_per_member):
            raise ProtocolError(
                "LIMIT_EXCEEDED",
                f"a subscription may have {most} topics at most, not {count} (groups.max_topics_per_member)",
            )

    def join(
        self,
        name: str,
        member: str,
        topics: Collection[str],
        owned: Collection[Queue],
        session_timeout_ms: int,
        now_ms: int,
        generation: int = 0,
        instance: str = "",
        strategy: AllocationTable | None = None,
    ) -> View:
        """See :meth:`Membership.join`; the group is created on first use. The first member that names a ``strategy`` sets the
        group's. Also raises ProtocolError LIMIT_EXCEEDED, and NO_PERMISSION for another strategy than the group's.
        """
        self.use(name)
        group = self._membership(name)
        known = group.members.get(member)
        wanted = frozenset(topics)
        before = known.topics if known is not None else frozenset()
        table, named = group.table, group.strategy
        try:
            self._check_size(group, member, wanted, owned)
            use_strategy(group, strategy)
            view = self._counted(
                group, lambda: group.join(member, wanted, owned, session_timeout_ms, now_ms, generation, instance)
            )
        except ProtocolError:
            if group.strategy != named:
                group.table, group.strategy = table, named
                group.rebalance()
            self._forget_if_empty(name)
            raise
        self._subscription_changed(group, before, wanted)
        self._log.note(name, member, session_timeout_ms)
        self._look_at(name, member, now_ms + session_timeout_ms, now_ms)
        return view

    def heartbeat(
        self, name: str, member: str, generation: int, owned: Collection[Queue] | None, now_ms: int, instance: str = ""
    ) -> View:
        """See :meth:`Membership.heartbeat`. Raises ProtocolError LIMIT_EXCEEDED for a claim of too many queues."""
        group = self._known(name, member)
        known = group.member(member, instance)
        if owned is not None and len(owned) > len(known.owned) and len(owned) > len(known.held):
            self._check_size(group, member, known.topics, owned)
        return self._counted(group, lambda: group.heartbeat(member, generation, owned, now_ms, instance))

    def leave(self, name: str, member: str, instance: str = "") -> None:
        """See :meth:`Membership.leave`."""
        group = self._live.get(name)
        if group is not None:
            known = group.members.get(member)
            before = known.topics if known is not None else frozenset()
            self._counted(group, lambda: group.leave(member, instance))
            self._gone(group, member, before)

    def check_member(self, name: str, member: str | None, instance: str = "") -> None:
        """See :meth:`Membership.check_member`."""
        if member is not None:
            self._known(name, member).check_member(member, instance)
        elif (group := self._live.get(name)) is not None:
            group.check_member(None)

    def check_owner(self, name: str, member: str | None, queue: Queue, generation: int | None = None) -> None:
        """See :meth:`Membership.check_owner`."""
        if member is not None:
            self._known(name, member).check_owner(member, queue, generation)
        elif (group := self._live.get(name)) is not None:
            group.check_owner(None, queue)

    def connection_ended(self, name: str, member: str, now_ms: int, grace_ms: int) -> None:
        """End the session of ``member`` after ``grace_ms``, unless it is heard before that."""
        known = group.members.get(member) if (group := self._live.get(name)) is not None else None
        if known is not None:
            known.ends_ms = now_ms + grace_ms
            self._look_at(name, member, known.due_ms, now_ms)

    def expire(self, now_ms: int) -> list[tuple[str, str]]:
        """End the sessions that timed out. Returns ``(group, member)`` of each."""
        over: list[tuple[str, str]] = []
        while self._looks and self._looks[0][0] <= now_ms:
            at_ms, name, member = heapq.heappop(self._looks)
            if self._next_look.get((name, member)) != at_ms:
                continue  # an earlier look exists, or one came and found no member
            del self._next_look[name, member]
            group = self._live.get(name)
            due_ms = group.due_ms(member) if group is not None else None
            if group is None or due_ms is None:
                continue
            if due_ms > now_ms:
                self._look_at(name, member, due_ms, now_ms)
                continue
            known = group.members.get(member)
            before = known.topics if known is not None else frozenset()
            ended = self._counted(group, lambda: group.expire(now_ms, [member]))  # noqa: B023
            over += [(name, one) for one in ended]
            self._gone(group, member, before)
        return over

    def next_expiry_ms(self) -> int | None:
        """The earliest time at which :meth:`expire` may have something to do."""
        return -(-self._looks[0][0] // _GRAIN_MS) * _GRAIN_MS if self._looks else None

    def topics_changed(self, names: Iterable[str]) -> None:
        """Share the queues of these topics again: topics that were created, deleted, or got another number of queues."""
        for group in {group for name in names for group in self._subscribed.get(name, ())}:
            self._live[group].rebalance()

    # ------------------------------------------------------------ files

    def write(self, now_ms: int, *, at_once: bool = False) -> None:
        """Write the names if groups were added, but not too often. Raises StoreError; a later call tries again."""
        if self._written_version == self.table.version:
            return
        # After a start all texts have to be encoded, which would take half a second at 10,000 groups: each call encodes
        # some, and the first file waits for the last of them.
        some = list(itertools.islice(self._unprepared, _PREPARED_AT_ONCE))
        self.table.prepare(some)
        if not at_once and not self.unwritten and (some or not self._pace.is_due(now_ms)):
            return
        try:
            with self._pace:
                self.table.persist(self._path)
        except StoreError:
            for name in self.unwritten.take_back(self.table):
                self._names.remove(name)
            raise
        self.unwritten.clear()
        self._written_version = replace(self.table.version)

    def write_members(self) -> None:
        """Write the present members for the next coordinator; nothing when no member came or left. Raises StoreError."""
        self._log.write()

    def next_write_ms(self) -> int | None:
        """When :meth:`write` has something to do; None: not before something changes."""
        return None if self._written_version == self.table.version else self._pace.next_ms

    def close(self) -> None:
        self._log.close()

    # ------------------------------------------------------------ totals over all groups

    def _membership(self, name: str) -> Membership:
        group = self._live.get(name)
        if group is None:
            group = self._live[name] = Membership(
                name,
                self._queues_of,
                generation=self._first_generation,
                max_members=self.config.max_members_per_group,
            )
        return group

    def _check_size(self, group: Membership, member: str, topics: Collection[str], owned: Collection[Queue]) -> None:
        """ProtocolError LIMIT_EXCEEDED when the member, or all members of the node, would take too much memory."""
        size = group.size_with(member, topics, len(owned))
        if size > (most := self.config.max_member_bytes):
            raise ProtocolError(
                "LIMIT_EXCEEDED",
                f"member {member!r} would take {size} bytes with {len(topics)} topics and their queues, or {len(owned)}"
                f" queues it claims; at most {most} are allowed (groups.max_member_bytes)",
            )
        known = group.members.get(member)
        if self._size_bytes - (known.size_bytes if known is not None else 0) + size > (
            most := self.config.max_membership_bytes
        ):
            raise ProtocolError(
                "LIMIT_EXCEEDED",
                f"the members of all groups take {self._size_bytes} of {most} bytes (groups.max_membership_bytes)",
            )

    def _counted(self, group: Membership, change: Callable[[], _T]) -> _T:
        """Do ``change``, which may make ``group`` larger or smaller, and update the totals."""
        before = group.size_bytes
        try:
            return change()
        finally:
            self._size_bytes += group.size_bytes - before

    def _subscription_changed(self, group: Membership, before: frozenset[str], after: frozenset[str]) -> None:
        for topic in after - before:
            self._subscribed.setdefault(topic, set()).add(group.group)
        for topic in before - after:
            if not group.has_subscriber(topic):
                groups = self._subscribed[topic]
                groups.discard(group.group)
                if not groups:
                    del self._subscribed[topic]

    def _gone(self, group: Membership, member: str, topics: frozenset[str]) -> None:
        if member not in group.members:
            self._subscription_changed(group, topics, frozenset())
            self._log.note(group.group, member, None)
            self._next_look.pop((group.group, member), None)
        self._forget_if_empty(group.group)

    def _look_at(self, name: str, member: str, due_ms: int, now_ms: int) -> None:
        """Look at the member's session at ``due_ms``, unless an earlier look is planned."""
        at_ms = min(due_ms, now_ms + _LOOK_MS)
        if self._next_look.get((name, member), at_ms + 1) > at_ms:
            self._next_look[name, member] = at_ms
            heapq.heappush(self._looks, (at_ms, name, member))

    def _known(self, name: str, member: str) -> Membership:
        group = self._live.get(name)
        if group is None:
            raise ProtocolError(
                "UNKNOWN_MEMBER", f"{member!r} has no session in group {name}: join again and name the queues you own"
            )
        return group

    def _forget_if_empty(self, name: str) -> None:
        group = self._live[name]
        if not group.members and not group.awaited:
            # The group's next members start above every generation that an earlier member may still repeat.
            self._first_generation = max(self._first_generation, group.generation + 1)
            del self._live[name]
            self.ended.append(name)


Seat = tuple[str, str]
"""Group and member."""


class Seats:
    """The connection through which each group member speaks, so that the end of a connection shortens the member's session.

    A program that is killed closes its connections at that moment, long before its session would end. A connection can also
    end while its program lives. So the member keeps its queues for ``groups.disconnect_grace_ms`` more: its next heartbeat,
    over a new connection, makes its session as long as before. RocketMQ ends a client's membership when its channel closes.

    A connection counts for one member, the last that spoke through it; clients have one for each. A list of members shows who
    is at the other end.

    Members by connection. As many as there are connections of members.
    """

    def __init__(self, groups: GroupCoordinator, grace_ms: int) -> None:
        """``grace_ms``: 0 for no effect of an ended connection."""
        self._groups, self.grace_ms = groups, grace_ms
        self._who_of: dict[Seat, tuple[str, str]] = {}
        self._seat_of: dict[bytes, Seat] = {}
        self._peer_of: dict[Seat, bytes] = {}

    def __len__(self) -> int:
        return len(self._seat_of)

    def who(self, group: str, member: str) -> tuple[str, str]:
        """User and address of the member's connection, empty where nothing is known of it."""
        return self._who_of.get((group, member), ("", ""))

    def take(self, peer: bytes, group: str, member: str, who: Callable[[], tuple[str, str]] = lambda: ("", "")) -> None:
        """``member`` spoke through the connection ``peer``, which lives; ``who`` says user and address of the peer. A
        first request can be here before its connection is known: then ``who`` has no address, and is asked again.
        """
        seat = (group, member)
        if self._peer_of.get(seat) == peer:
            if not self._who_of[seat][1]:
                self._who_of[seat] = who()
            return
        former = self._seat_of.get(peer)
        if former is not None:
            del self._peer_of[former], self._who_of[former]
        other = self._peer_of.get(seat)
        if other is not None:
            del self._seat_of[other]
        self._seat_of[peer], self._peer_of[seat], self._who_of[seat] = seat, peer, who()

    def ended(self, peers: Iterable[bytes], now_ms: int) -> None:
        """These connections ended."""
        for peer in peers:
            seat = self._seat_of.pop(peer, None)
            if seat is None:
                continue
            del self._peer_of[seat], self._who_of[seat]
            if self.grace_ms:
                self._groups.connection_ended(*seat, now_ms, self.grace_ms)
