"""The methods of an administrator's client for the groups of a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from commitmq.client.admin_results import GroupOffset, Lag, QueueBounds
from commitmq.client.group_offsets import check_target, hidden_lag, is_of_failures, lag_of, reset_targets
from commitmq.errors import GroupNotFoundError, ProtocolError, TopicNotFoundError

_MOST_PLANNED: Final = 10_000


class GroupAdmin:
    """A part of :class:`commitmq.Admin`."""

    def groups(self) -> list[dict[str, Any]]:
        """For each group ``name``, ``members`` (their number) and ``topics`` (those with offsets)."""
        groups: dict[str, dict[str, Any]] = {}
        for page in self._pages("group.list", {}):
            for row in page["groups"]:
                known = groups.setdefault(row["name"], row)
                if known is not row:
                    known["topics"] += row["topics"]
        return list(groups.values())

    def group(self, name: str) -> dict[str, Any]:
        """One group: its state, its members, the queues of each member, and the committed offsets."""
        first, *more = (page["group"] for page in self._pages("group.describe", {"group": name}))
        for page in more:
            for part in ("members", "queues", "offsets"):
                first[part] += page[part]
        return dict(first)

    def group_config(self, name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings of a group, under RocketMQ's names. With ``changes`` they are changed first, durably.

        A group that does not exist is made when ``changes`` are given. Raises GroupNotFoundError, and ProtocolError
        INVALID_PARAMETER for a setting or a value that does not exist.
        """
        fields = {"group": name} if changes is None else {"group": name, "set": dict(changes)}
        return dict(self._ask("coordinator", "group.config", fields)["config"])

    def group_create(self, name: str, settings: Mapping[str, Any] | None = None) -> bool:
        """Make a group, with ``settings`` under RocketMQ's names. Returns False if it existed, with the same settings.

        Raises ProtocolError INVALID_PARAMETER for a group that exists with other settings, as for a wrong setting.
        """
        try:
            known = self.group_config(name)
        except GroupNotFoundError:
            self.group_config(name, settings or {})
            return True
        for setting, value in (settings or {}).items():
            if known.get(setting) != value:
                sentence = (
                    f"group {name} exists, and its {setting} is {known.get(setting)!r:.100}; group_config changes it"
                )
                raise ProtocolError("INVALID_PARAMETER", sentence)
        return False

    def group_delete(self, name: str, *, offsets: bool = False, force: bool = False) -> None:
        """Delete a group's settings, and with ``offsets`` its committed offsets too. Its retry and dead-letter topics stay.

        Without ``offsets`` a group of that name goes on at them later. Raises ProtocolError NO_PERMISSION while the group has
        consumers, unless ``force`` is given: these make the group again. Raises GroupNotFoundError for an unknown group.
        """
        self._ask("coordinator", "group.describe", {"group": name, "limit": 1})
        self._ask("coordinator", "group.delete", {"group": name} if force else {"group": name, "unused": True})
        if offsets:
            self._ask("coordinator", "offset.forget", {"group": name})

    def group_plan(self, name: str, members: int) -> dict[str, Any]:
        """How so many members would share the queues of the group's topics, by its strategy. Nothing changes.

        The first members are those that the group has, by name; further ones are called ``new-1`` and so on. Returns
        ``strategy`` and ``shares``, a list of ``[member, topic, queues]``. Raises GroupNotFoundError, and ValueError for less
        than one member or more than 10,000.
        """
        from commitmq.semantics.allocation import plan

        if not 1 <= members <= _MOST_PLANNED:
            raise ValueError(f"a plan has 1 to {_MOST_PLANNED} members, not {members}")
        described = self.group(name)
        known = sorted(one["member"] for one in described["members"])[:members]
        names = [*known, *(f"new-{number}" for number in range(1, members - len(known) + 1))]
        shares = []
        topics = {topic for one in described["members"] for topic in one["topics"]}
        topics.update(topic for part in ("queues", "offsets") for topic, _, _ in described[part])
        for topic in sorted(one for one in topics if not is_of_failures(one)):
            try:
                queues = range(self.topic(topic).read_queues)
            except TopicNotFoundError:
                continue  # the topic was deleted meanwhile
            planned = plan(described["strategy"], described["broker"], topic, queues, names)
            shares += [[member, topic, planned[member]] for member in names]
        return {"strategy": described["strategy"], "shares": sorted(shares, key=lambda one: one[:2])}

    def group_in_flight(self, name: str) -> dict[str, Any]:
        """What the consumers of a group that share queues (ShareConsumer, POP) have received and not acknowledged.

        ``messages``: how many. ``queues``: ``[topic, stored topic, queue, messages]``; the stored topic of a message that came
        back is the group's retry topic. ``revive``: how far the node is with messages that nobody acknowledged, for all
        groups: ``unread`` records of its ``topic``, ``waiting`` check points, ``late_ms`` of the first that is due.
        """
        self._start_mover("pop")
        found: dict[str, Any] = {}
        after: Any = None
        while not found or after is not None:
            fields = {"group": name} if after is None else {"group": name, "after": after}
            page = self._ask("pop", "in_flight", fields)
            after = page.pop("next")
            found = {**page, "queues": [*found.get("queues", ()), *page["queues"]]}
        return found

    def group_lag(self, name: str) -> list[Lag]:
        """How far the group is behind in each queue of its topics: those with offsets and those that a member reads.

        A queue beyond the topic's read queues is there, with a ``problem``, while it has messages that the group did not read.
        """
        described = self.group(name)
        committed = {(topic, queue): offset for topic, queue, offset in described["offsets"]}
        holders = {(topic, queue): member for topic, queue, member in described["queues"]}
        rows = []
        for topic in sorted({topic for topic, _ in {*committed, *holders}}):
            try:
                bounds, hidden = self._bounds(topic, hidden=True)
            except TopicNotFoundError:
                continue  # the topic was deleted meanwhile
            for one in bounds:
                key = (topic, one.queue)
                rows.append(lag_of(topic, one, committed.get(key), holders.get(key)))
            lags = [lag_of(topic, one, committed.get((topic, one.queue)), None) for one in hidden]
            rows += [hidden_lag(one, len(bounds)) for one in lags if one.lag]
        return rows

    def commit_offsets(
        self,
        group: str,
        offsets: Iterable[tuple[str, int, int]],
        *,
        incarnations: Mapping[str, int] | None = None,
        copied_from: str | None = None,
    ) -> list[GroupOffset]:
        """Commit offsets for a group whose members are not at this node: ``(topic, queue, next offset)`` each.

        An offset never goes back. Returns the stored offsets. Raises FencedError for a queue that a member of the group reads,
        and ProtocolError for another topic than the one of these ``incarnations``, by topic.
        ``copied_from``: the group that was there; the audit log then has a line ``group.clone``.
        """
        fields = {
            "group": group,
            "offsets": [list(one) for one in offsets],
            "incarnations": dict(incarnations or {}),
            **_source(copied_from),
        }
        answer = self._ask("coordinator", "offset.commit", fields)
        return [GroupOffset(*one[:3]) for one in answer["stored"]]

    def reset_offsets(
        self,
        group: str,
        topic: str | Iterable[str] | None,
        to: str | int | datetime,
        *,
        queues: Iterable[int] | None = None,
        running: bool = False,
        dry_run: bool = False,
    ) -> list[GroupOffset]:
        """Move a group's committed offsets, back or ahead, to ``earliest``, ``latest``, a datetime, or a queue offset.

        ``topic``: one topic, several, or None for all that the group reads (without its retries and dead letters). All of
        them move, or none. With ``running`` members may read the queues: each goes on at the new offset with its next
        heartbeat, and no commit of what it read before counts. Without it FencedError is raised while a member reads one.

        Returns the stored offsets; with ``dry_run`` those that would be stored, and nothing changes.
        """
        check_target(to)
        topics = self._topics_of(group) if topic is None else [topic] if isinstance(topic, str) else list(topic)
        wanted = None if queues is None else list(queues)
        offsets = []
        for name in topics:
            bounds = self.offsets(name, to if isinstance(to, datetime) else None)
            offsets += reset_targets(name, bounds, to, wanted)
        return self._reset(group, offsets, running=running, dry_run=dry_run)

    def set_offsets(
        self,
        group: str,
        offsets: Iterable[tuple[str, int, int]],
        *,
        running: bool = False,
        dry_run: bool = False,
        copied_from: str | None = None,
    ) -> list[GroupOffset]:
        """Move a group, back or ahead, to ``offsets``: ``(topic, queue, next offset)`` each.

        An offset outside its queue becomes the nearest one in it. All of them move, or none. ``running``, ``dry_run`` and the
        result are those of :meth:`reset_offsets`. ``copied_from``: the group that was there, for the audit log.

        Raises ValueError for a queue that does not exist, TopicNotFoundError.
        """
        wanted: dict[str, dict[int, int]] = {}
        for topic, queue, offset in offsets:
            wanted.setdefault(topic, {})[queue] = offset
        targets = []
        for topic, of_queue in sorted(wanted.items()):
            bounds = {one.queue: [one] for one in self.offsets(topic)}
            for queue, offset in sorted(of_queue.items()):
                targets += reset_targets(topic, bounds.get(queue, ()), offset, [queue])
        return self._reset(group, targets, running=running, dry_run=dry_run, copied_from=copied_from)

    def _reset(
        self,
        group: str,
        offsets: list[tuple[str, int, int]],
        *,
        running: bool,
        dry_run: bool,
        copied_from: str | None = None,
    ) -> list[GroupOffset]:
        if dry_run:
            return [GroupOffset(*one) for one in offsets]
        fields = {"group": group, "offsets": offsets, "reset": True, "running": running, **_source(copied_from)}
        answer = self._ask("coordinator", "offset.commit", fields)
        return [GroupOffset(*one[:3]) for one in answer["stored"]]

    def _topics_of(self, group: str) -> list[str]:
        described = self.group(group)
        names = {topic for part in ("queues", "offsets") for topic, _, _ in described[part]}
        return sorted(name for name in names if not is_of_failures(name))

    def topic(self, name: str) -> Any:
        raise NotImplementedError

    def offsets(self, topic: str, timestamp: int | datetime | None = None) -> list[QueueBounds]:
        raise NotImplementedError

    def _bounds(
        self, topic: str, timestamp: int | datetime | None = None, *, hidden: bool = False
    ) -> tuple[list[QueueBounds], list[QueueBounds]]:
        raise NotImplementedError

    def _start_mover(self, role: str) -> None:
        raise NotImplementedError

    def _pages(self, op: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _ask(self, role: str, op: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        raise NotImplementedError


def _source(copied_from: str | None) -> dict[str, str]:
    return {} if copied_from is None else {"copied_from": copied_from}
