"""The consumer groups of a node: their names (``config/subscriptionGroup.json``, RocketMQ's) and who is in them.

A group enters the file when it is first used. Members are in memory only: they tell every second that they live, and
after a restart of the coordinator they join again. What must outlive the coordinator is only *who was there*, so that
the queues of a consumer that has not come back yet are not given to another one (see
:mod:`commitmq.coordination.membership`): ``commitmq/group_members.json`` has ``{group: {member: session time-out in
ms}}``, written without a sync at the end of each turn that changed it. It survives the death of the process; after a
power cut it may be missing or old, which costs at most a rebalance that waits for one session time-out, or a queue
that two consumers read until one of them hears that it is fenced. Commits are fenced in any case.

The file of names is written behind the answers: a group that a crash takes out of it comes back with its next use,
and its offsets do not depend on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import orjson

from commitmq import failpoints
from commitmq.coordination.membership import Membership, Queue, QueuesOf, View
from commitmq.errors import InvalidMessageError, ProtocolError, StoreError
from commitmq.store.group_config import GroupConfig, GroupTable
from commitmq.store.layout import StoreLayout
from commitmq.store.topic_name import validate_group


class Groups:
    """All groups. Times are monotonic milliseconds."""

    def __init__(
        self,
        layout: StoreLayout,
        table: GroupTable,
        queues_of: QueuesOf,
        *,
        auto_create: bool,
        max_groups: int,
        max_members: int,
        first_generation: int,
    ) -> None:
        """Use :meth:`load`."""
        self._path = layout.config / "subscriptionGroup.json"
        self._members_path = layout.own / "group_members.json"
        self.table = table
        self._queues_of = queues_of
        self._auto_create = auto_create
        self._max_groups = max_groups
        self._max_members = max_members
        self._first_generation = first_generation
        self._live: dict[str, Membership] = {}
        self._written_version = replace(table.version)
        self._written_members: dict[str, dict[str, int]] = {}
        self._members_changed = False

    @classmethod
    def load(
        cls,
        layout: StoreLayout,
        queues_of: QueuesOf,
        *,
        auto_create: bool,
        max_groups: int,
        max_members: int,
        first_generation: int,
        now_ms: int,
    ) -> Groups:
        """Load a store's groups and expect the members of the last coordinator.

        ``first_generation`` must grow with every start (a wall clock in ms does): members repeat generations over a
        restart. Raises StoreError when ``subscriptionGroup.json`` cannot be read in either generation.
        """
        table = GroupTable.load(layout.config / "subscriptionGroup.json")
        groups = cls(
            layout,
            table,
            queues_of,
            auto_create=auto_create,
            max_groups=max_groups,
            max_members=max_members,
            first_generation=first_generation,
        )
        groups._written_members = _read_members(groups._members_path)
        for name, members in groups._written_members.items():
            groups._membership(name).wait_for(members, now_ms)
        return groups

    # ------------------------------------------------------------ names

    def names(self) -> list[str]:
        """All groups of the file and all with members, sorted."""
        return sorted({*self.table.groups, *self._live})

    def exists(self, name: str) -> bool:
        return name in self.table.groups or name in self._live

    def use(self, name: str) -> None:
        """Make sure that the group exists and may consume.

        ProtocolError INVALID_PARAMETER (bad name), GROUP_NOT_EXIST (``groups.auto_create`` is off), LIMIT_EXCEEDED,
        NO_PERMISSION (its ``consumeEnable`` is off).
        """
        group = self.table.groups.get(name)
        if group is None:
            check_name(name)
            if not self._auto_create:
                raise ProtocolError("GROUP_NOT_EXIST", f"there is no group {name!r}, and groups.auto_create is off")
            if len(self.table.groups) >= self._max_groups:
                raise ProtocolError("LIMIT_EXCEEDED", f"the node has {self._max_groups} groups (groups.max_groups)")
            group = GroupConfig(name)
            self.table.put(group)
        if not group.consume_enabled:
            raise ProtocolError("NO_PERMISSION", f"group {name} may not consume: its consumeEnable is off")

    # ------------------------------------------------------------ members

    def membership(self, name: str) -> Membership | None:
        """The members of a group, None when it has none and expects none."""
        return self._live.get(name)

    def join(
        self,
        name: str,
        member: str,
        topics: Iterable[str],
        owned: Iterable[Queue],
        session_timeout_ms: int,
        now_ms: int,
        generation: int = 0,
    ) -> View:
        """See :meth:`Membership.join`; the group is created on first use."""
        self.use(name)
        self._members_changed = True
        return self._membership(name).join(member, topics, owned, session_timeout_ms, now_ms, generation)

    def heartbeat(self, name: str, member: str, generation: int, owned: Iterable[Queue], now_ms: int) -> View:
        """See :meth:`Membership.heartbeat`."""
        return self._known(name, member).heartbeat(member, generation, owned, now_ms)

    def leave(self, name: str, member: str) -> None:
        """See :meth:`Membership.leave`."""
        group = self._live.get(name)
        if group is not None:
            group.leave(member)
            self._forget_if_empty(name)
            self._members_changed = True

    def check_owner(self, name: str, member: str | None, queue: Queue) -> None:
        """See :meth:`Membership.check_owner`."""
        if member is not None:
            self._known(name, member).check_owner(member, queue)
        elif (group := self._live.get(name)) is not None:
            group.check_owner(None, queue)

    def expire(self, now_ms: int) -> list[tuple[str, str]]:
        """End the sessions that are over; returns ``(group, member)`` of each."""
        over: list[tuple[str, str]] = []
        for name, group in list(self._live.items()):
            until = group.next_expiry_ms()
            if until is not None and until <= now_ms:
                over += [(name, member) for member in group.expire(now_ms)]
                self._forget_if_empty(name)
                self._members_changed = True
        return over

    def next_expiry_ms(self) -> int | None:
        """When :meth:`expire` may next have something to do."""
        times = [until for group in self._live.values() if (until := group.next_expiry_ms()) is not None]
        return min(times, default=None)

    def topics_changed(self, names: Iterable[str]) -> None:
        """Share the queues of these topics anew: created, deleted, or with another number of queues."""
        changed = frozenset(names)
        for group in self._live.values():
            if any(member.topics & changed for member in group.members.values()):
                group.rebalance()

    # ------------------------------------------------------------ files

    def write(self) -> None:
        """Write the names if groups were added. Raises StoreError; they are written with the next call then."""
        if self._written_version != self.table.version:
            self.table.persist(self._path)
            self._written_version = replace(self.table.version)

    def write_members(self) -> None:
        """Note who is there, for the next coordinator; does nothing when nobody came or went. Raises StoreError."""
        if not self._members_changed:
            return
        current = {
            name: {
                **{member: one.session_timeout_ms for member, one in group.awaited.items()},
                **{member: one.session_timeout_ms for member, one in group.members.items()},
            }
            for name, group in self._live.items()
        }
        if current != self._written_members:
            fresh = self._members_path.with_name(self._members_path.name + ".new")
            try:
                fresh.write_bytes(orjson.dumps(current))
                if failpoints.ACTIVE:
                    failpoints.hit("members.before_replace")
                os.replace(fresh, self._members_path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    fresh.unlink()
                raise StoreError(f"cannot write the members: {error.strerror}", path=self._members_path) from error
            self._written_members = current
        self._members_changed = False

    def _membership(self, name: str) -> Membership:
        group = self._live.get(name)
        if group is None:
            group = self._live[name] = Membership(
                name, self._queues_of, generation=self._first_generation, max_members=self._max_members
            )
        return group

    def _known(self, name: str, member: str) -> Membership:
        group = self._live.get(name)
        if group is None:
            raise ProtocolError(
                "UNKNOWN_MEMBER", f"{member!r} has no session in group {name}: join again and name what you own"
            )
        return group

    def _forget_if_empty(self, name: str) -> None:
        group = self._live[name]
        if not group.members and not group.awaited:
            # The next one starts above every generation that a member of this one may still repeat.
            self._first_generation = max(self._first_generation, group.generation + 1)
            del self._live[name]


def check_name(name: str) -> None:
    """ProtocolError INVALID_PARAMETER unless ``name`` is a legal group name."""
    try:
        validate_group(name)
    except InvalidMessageError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error


def _read_members(path: Path) -> dict[str, dict[str, int]]:
    """What :meth:`Groups.write_members` wrote; nothing when the file is missing or torn."""
    try:
        data = orjson.loads(path.read_bytes())
        return {
            str(group): {str(member): min(int(timeout), 3_600_000) for member, timeout in members.items()}
            for group, members in data.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
