"""The administrator's client: a node, its topics, its groups, its dispatchers and its open transactions.

It has one connection to each process of the node that it asks, made at the first request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from commitmq.client import checks
from commitmq.client.admin_results import (
    ClientInfo,
    ConnectedClients,
    GroupOffset,
    Lag,
    QueueBounds,
    TopicCreated,
    TopicDescription,
    TopicInfo,
    check_target,
    hidden_lag,
    is_of_failures,
    lag_of,
    reset_targets,
)
from commitmq.client.checks import KINDS, kind_of
from commitmq.client.closing import OwnClient
from commitmq.errors import GroupNotFoundError, NodeUnavailableError, ProtocolError, TopicNotFoundError
from commitmq.format.constants import DLQ_PREFIX
from commitmq.format.message_id import parse_offset_message_id
from commitmq.protocol.channel import Channel, ConnectionLost
from commitmq.protocol.directory import Directory

if TYPE_CHECKING:
    import zmq

    from commitmq.client.admin_config import ConfigImport, ConfigTransfer
    from commitmq.client.dead_letters import (
        DeadLetter,
        DeadLetterCount,
        DeadLetterFilter,
        DeadLetterQueue,
        Progress,
        PurgeResult,
        ResendResult,
    )
    from commitmq.client.delayed import DelayedMessages
    from commitmq.client.message import Message
    from commitmq.client.receiving.query import QueryResult
    from commitmq.client.transactions.transaction import OpenTransaction


_LOOK_S: Final = 0.05
_LONG_WORK_S: Final = 600.0  # the disk decides how long a stop and a deletion take
_MOST_PLANNED: Final = 10_000
_MOST_READ: Final = 100_000
_MOST_BYTES: Final = 256 << 20


class NodeChannels:
    """``directory`` says where the processes are. ``timeout_s`` bounds the wait for a process that does not answer at all."""

    def __init__(self, directory: Directory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._channels: dict[str, Channel] = {}

    def request(
        self,
        role: str,
        op: str,
        fields: dict[str, Any],
        *,
        payload: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        """Send a request to the process of ``role``, and again after a lost connection. Returns the answer and its frames.

        ``timeout_s`` bounds the work of a process that has the request.
        """
        began = time.monotonic()
        deadline = began + (self._timeout_s if timeout_s is None else timeout_s)
        reached_by = min(deadline, began + self._timeout_s)
        while True:
            channel = self._channels.get(role)
            if channel is not None and channel.lost():
                self._drop(role)
                channel = None
            if channel is None:
                channel, _ = self._directory.connect(role, reached_by)
                self._channels[role] = channel
            try:
                return channel.request(op, fields, payload, timeout_s=max(deadline - time.monotonic(), 0.01))
            except NodeUnavailableError as error:
                # An admin may repeat every request, because each one names the wanted state and not a change.
                self._drop(role)
                now = time.monotonic()
                if isinstance(error, ConnectionLost):  # the process was there, and may be back in a moment
                    reached_by = min(deadline, now + self._timeout_s)
                if now >= reached_by:
                    raise

    def _drop(self, role: str) -> None:
        self._channels.pop(role).close()

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


class Admin(OwnClient):
    """Asks one node. Not thread-safe.

    Every method raises NodeUnavailableError without an answer within ``timeout_s``, and ProtocolError when the node refuses;
    its ``code`` says why. A method with a ``timeout_s`` of its own gives the node this longer time for its work. A node that
    cannot be reached is an error after the admin's ``timeout_s`` all the same.
    """

    _kind = "admin"

    def __init__(self, node: str | None = None, *, timeout_s: float = 10.0) -> None:
        """Does not connect yet. ``node`` is the admin address (default: COMMITMQ_NODE, else tcp://127.0.0.1:7310)."""
        self._closed = True
        self._timeout_s = checks.seconds("timeout_s", timeout_s)
        self._directory = Directory(node)
        self._channels = NodeChannels(self._directory, self._timeout_s)
        self._pid = os.getpid()
        self._closed = False

    # ------------------------------------------------------------ the node

    def metadata(self) -> dict[str, Any]:
        """The node's name, epoch, store folder, sizes, limits and the addresses of its processes."""
        self._check_usable()
        return _without_envelope(self._directory.metadata(timeout_s=self._timeout_s, refresh=True).raw)

    def status(self) -> dict[str, Any]:
        """For each process pid, state, restarts, CPU, memory, position and lag; and the positions of the log."""
        self._check_usable()
        return _without_envelope(self._directory.request("status", timeout_s=self._timeout_s))

    def set_aside(self) -> list[dict[str, Any]]:
        """The last messages that the node's processes have set aside, the oldest first: of which not even a dead letter fits.

        Each is still where it lies: ``topic``, ``queue``, ``queue_offset``, ``physical_offset``, as far as that can be told.
        ``process`` passed it ``at`` a time (ms) because of ``why``; ``group`` is the one that lacks it.
        """
        self._check_usable()
        found: list[dict[str, Any]] = self._directory.request("set_aside", timeout_s=self._timeout_s)["messages"]
        return found

    def stop(self, *, timeout_s: float = _LONG_WORK_S) -> dict[str, Any]:
        """Stop the node. Returns when everything is flushed."""
        self._check_usable()
        self._directory.request("status", timeout_s=min(timeout_s, self._timeout_s))  # is the node there?
        return _without_envelope(self._directory.request("stop", timeout_s=timeout_s))

    def expire(
        self,
        *,
        before: int | datetime | None = None,
        keep_bytes: int | None = None,
        dry_run: bool = False,
        timeout_s: float = _LONG_WORK_S,
    ) -> dict[str, Any]:
        """Delete the oldest segments of the CommitLog.

        With ``before`` (milliseconds or a datetime) a segment goes if every message in it was stored before that time. With
        ``keep_bytes`` a segment goes if it lies further behind the log's end. With both, both must apply. With neither, a
        segment goes that is expired by age, at any hour of the day.

        Returns ``segments`` (names), ``disk_bytes``, ``min_offset``, ``kept`` (why the next segment stays) and ``dry_run``.
        """
        fields: dict[str, Any] = {"dry_run": dry_run, "keep_bytes": keep_bytes}
        fields["before"] = int(before.timestamp() * 1000) if isinstance(before, datetime) else before
        return self._ask("cleanup", "expire", {k: v for k, v in fields.items() if v is not None}, timeout_s=timeout_s)

    # ------------------------------------------------------------ topics

    def topic_create(
        self,
        name: str,
        queues: int | None = None,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int | None = None,
        attributes: dict[str, str] | None = None,
    ) -> TopicCreated:
        """Create a topic; the node has a default for ``queues``. A topic with the same settings may exist already.

        ``read_queues`` and ``write_queues`` are for a topic whose consumers read other queues than producers write to.
        """
        fields: dict[str, Any] = {"topic": name, "queues": queues, "perm": perm, "attributes": attributes}
        fields |= {"read_queues": read_queues, "write_queues": write_queues}
        answer = self._ask("coordinator", "topic.create", {k: v for k, v in fields.items() if v is not None})
        return TopicCreated(answer["created"], TopicInfo.of(answer["topic"]))

    def topic_update(
        self,
        name: str,
        queues: int | None = None,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int | None = None,
        attributes: dict[str, str] | None = None,
        force: bool = False,
    ) -> TopicInfo:
        """Change the settings of a topic, and return all its settings. A setting that is None here stays.

        ``queues`` sets both numbers, ``read_queues`` and ``write_queues`` one of them. Consumers read new queues from the
        beginning. Nobody reads the messages of queues beyond the read queues. So a smaller number is refused while a group of
        the topic has unread messages there (ProtocolError INVALID_PARAMETER), unless ``force`` is given. ``attributes`` are
        added to those of the topic; its kind of storage cannot change. Raises TopicNotFoundError.
        """
        now = self.topic(name)
        both = (now.read_queues, now.write_queues) if queues is None else (queues, queues)
        reads = both[0] if read_queues is None else read_queues
        if reads < now.read_queues and not force:
            self._check_all_read(now, reads)
        fields: dict[str, Any] = {
            "topic": name,
            "read_queues": reads,
            "write_queues": both[1] if write_queues is None else write_queues,
            "perm": now.perm if perm is None else perm,
            "attributes": {**now.attributes, **(attributes or {})},
            "update": True,
            "incarnation": now.incarnation,
        }
        return TopicInfo.of(self._ask("coordinator", "topic.create", fields)["topic"])

    def topics(self) -> list[TopicInfo]:
        """All topics with their settings."""
        return [TopicInfo.of(one) for page in self._pages("topic.list", {}) for one in page["topics"]]

    def topic(self, name: str) -> TopicDescription:
        """The settings of one topic, and the groups with offsets in it. Raises TopicNotFoundError."""
        return TopicDescription.of(self._ask("coordinator", "topic.describe", {"topic": name})["topic"])

    def memory_use(self, topic: str | None = None) -> dict[str, int]:
        """The memory that memory topics use of ``memory.budget_bytes``; with ``topic`` also the memory of this topic."""
        return dict(self._ask("reader", "memory", {} if topic is None else {"topic": topic}))

    def topic_delete(self, name: str) -> None:
        """Delete a topic. Nobody can read its messages afterwards, and its groups lose their offsets in it.

        This deletes the topic that exists at the time of the call. It never deletes a later topic of the same name, however
        often the request is repeated. While the writer restarts, the deletion can end with ProtocolError
        SERVICE_NOT_AVAILABLE. The topic does not exist any more then, and the node finishes by itself. A second call waits.
        """
        try:
            incarnation = self.topic(name).incarnation
        except TopicNotFoundError:
            incarnation = None  # an unfinished deletion may be under way: the request waits for its end
        fields = {"topic": name} if incarnation is None else {"topic": name, "incarnation": incarnation}
        self._ask("coordinator", "topic.delete", fields)

    def view(self, where: int | str, topic: str | None = None) -> Message:
        """One message by its physical offset or its offset message id. Raises ProtocolError if no message begins there.

        A message of a memory topic needs ``topic`` too, because each memory topic has offsets of its own. The messages of an
        inner batch share one offset and one id, and this returns the first of them.
        """
        from commitmq.client.receiving.query import batch_of
        from commitmq.format.record import decode_record

        offset = parse_offset_message_id(where)[1] if isinstance(where, str) else where
        fields = {"physical_offset": offset} if topic is None else {"physical_offset": offset, "topic": topic}
        _, frames = self._request("reader", "view", fields)
        data = frames[0].buffer
        record = decode_record(data, expected_physical_offset=offset)
        return batch_of(record.topic, [data])[0]  # type: ignore[no-any-return]

    def message(self, message_id: str) -> Message:
        """One message by its offset message id (:attr:`Message.msg_id`).

        Raises ValueError for another kind of id, ProtocolError if no message has this id.
        """
        return self.view(message_id)

    def query(
        self,
        topic: str,
        *,
        key: str | None = None,
        unique_key: str | None = None,
        tag: str | None = None,
        begin: int | datetime | None = None,
        end: int | datetime | None = None,
        max_messages: int = 64,
        continue_from: str | None = None,
        wait_s: float = 1.0,
    ) -> QueryResult:
        """Messages by ``key`` (one of a message's keys), by ``unique_key``, by ``tag``, or by time alone.

        ``begin`` and ``end`` are store times, in milliseconds or as datetimes, both inclusive. A query by key returns
        the newest ``max_messages``, a query by time alone the oldest. A call with ``result.next`` as ``continue_from``,
        and with the same other arguments, continues behind them. Messages are in the order of the log.

        A query by key waits up to ``wait_s`` for the index to catch up with messages that were sent a moment ago.
        Otherwise ``result.complete`` is False. For a BatchCQ topic the index has no keys, and a tag only if all
        messages of an inner batch share it, as RocketMQ's index. An inner batch counts once for ``max_messages``.

        Raises ValueError for arguments that do not go together.
        """
        from commitmq.client.receiving import query

        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        fields = query.fields_of(topic, key, unique_key, tag, begin, end)
        if fields is None:
            times = (query.milliseconds(begin), query.milliseconds(end))
            return query.by_time(self._request, topic, *times, max_messages, continue_from)
        return query.by_key(
            self._request, fields, max_messages, continue_from, wait_s=wait_s, timeout_s=self._timeout_s
        )

    # ------------------------------------------------------------ queues and messages

    def offsets(
        self, topic: str, timestamp: int | datetime | None = None, *, incarnation: int | None = None
    ) -> list[QueueBounds]:
        """For each queue the offset of its first message and the offset that the next message will get.

        With ``timestamp`` (milliseconds or a datetime) ``by_time`` is the first message that was stored then or later. With
        an ``incarnation`` raises ProtocolError TOPIC_NOT_EXIST for another topic of that name.
        """
        return self._bounds(topic, timestamp, incarnation=incarnation)[0]

    def hidden_queues(self, topic: str) -> list[QueueBounds]:
        """The bounds of queues that have messages and lie beyond the topic's read queues, so that nobody reads them."""
        return self._bounds(topic, hidden=True)[1]

    def _bounds(
        self,
        topic: str,
        timestamp: int | datetime | None = None,
        *,
        hidden: bool = False,
        incarnation: int | None = None,
    ) -> tuple[list[QueueBounds], list[QueueBounds]]:
        """The bounds of the queues that are read, and with ``hidden`` of those beyond that have messages."""
        fields: dict[str, Any] = {"topic": topic, **({"hidden": True} if hidden else {})}
        if incarnation is not None:
            fields["incarnation"] = incarnation
        if timestamp is not None:
            fields["timestamp"] = int(timestamp.timestamp() * 1000) if isinstance(timestamp, datetime) else timestamp
        answer = self._ask("reader", "offsets", fields)
        read, beyond = ([QueueBounds(*row[:4]) for row in answer.get(part, ())] for part in ("queues", "hidden"))
        return read, beyond

    def _check_all_read(self, topic: TopicDescription, reads: int) -> None:
        """Raise ProtocolError INVALID_PARAMETER if with so many read queues a group would miss messages."""
        lost = [one for part in self._bounds(topic.name, hidden=True) for one in part if one.queue >= reads]
        lost = [one for one in lost if one.max > one.min]
        queues = [[topic.name, one.queue] for one in lost]
        for group in topic.groups if lost else ():
            answer = self._ask("coordinator", "offset.fetch", {"group": group, "queues": queues})
            at = {queue: offset for _, queue, offset in answer["offsets"]}
            for one in lost:
                if (unread := one.max - max(one.min, at.get(one.queue, 0))) > 0:
                    sentence = (
                        f"group {group} has not read {unread} messages in queue {one.queue} of topic {topic.name}, and with"
                        f" {reads} read queues nobody reads them: lower the write queues first and wait, or force it"
                    )
                    raise ProtocolError("INVALID_PARAMETER", sentence)

    def topics_idle(
        self,
        before: int | datetime,
        kinds: Iterable[str] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[TopicInfo]:
        """The topics whose last message was stored before ``before`` (milliseconds or a datetime), one request for each topic.

        ``kinds``: only topics of these (:data:`commitmq.client.checks.KINDS`); by default all but ``system``. A topic
        without messages is idle if it was made before that time. ``on_progress`` is called with the number of topics that
        were looked at, and of all. Raises ValueError for an unknown kind.
        """
        wanted = set(KINDS) - {"system"} if kinds is None else set(kinds)
        if unknown := wanted - set(KINDS):
            raise ValueError(f"a kind of topics is one of {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
        asked = [one for one in self.topics() if kind_of(one) in wanted]
        found = []
        for number, one in enumerate(asked, 1):
            try:
                if self._is_idle(one, before):
                    found.append(one)
            except TopicNotFoundError:
                pass  # it was deleted in the meantime
            if on_progress is not None:
                on_progress(number, len(asked))
        return found

    def topic_delete_idle(self, name: str, before: int | datetime) -> bool:
        """Delete a topic if its last message was stored before ``before``; False if it is in use, or does not exist any
        more.

        The ConsumeQueues first reach what the log had at the call, so that no message of before is overlooked. A topic
        of the same name that was made in the meantime stays. A system topic stays. Raises ProtocolError
        SERVICE_NOT_AVAILABLE when the ConsumeQueues stay behind.
        """
        self._wait_until_dispatched()
        try:
            known = self.topic(name)
            if kind_of(known) == "system" or not self._is_idle(known, before):
                return False
            self._ask("coordinator", "topic.delete", {"topic": name, "incarnation": known.incarnation})
        except TopicNotFoundError:
            return False
        return True

    def message_at(self, topic: str, queue: int, offset: int) -> Message:
        """The message at a queue offset.

        Raises ProtocolError INVALID_PARAMETER if the queue has none there, and TopicNotFoundError.
        """
        from commitmq.client.receiving.query import messages_of_pull

        fields = {"topic": topic, "queue": queue, "offset": offset, "max_messages": 1}
        answer, frames = self._request("reader", "pull", fields)
        for message in messages_of_pull(topic, queue, [frame.buffer for frame in frames], offset):
            if message.queue_offset == offset:
                return message
        first, end = answer["min_offset"], answer["max_offset"]
        has = f"it has offsets {first} to {end - 1}" if end > first else "it is empty"
        raise ProtocolError(
            "INVALID_PARAMETER", f"queue {queue} of topic {topic} has no message at offset {offset}: {has}"
        )

    def _is_idle(self, topic: TopicInfo, before: int | datetime) -> bool:
        limit_ms = int(before.timestamp() * 1000) if isinstance(before, datetime) else before
        if topic.incarnation >= limit_ms:  # the time at which it was made, in ms; 0 for a topic of RocketMQ
            return False
        parts = self._bounds(topic.name, limit_ms, hidden=True)
        return all(one.by_time is None or one.by_time >= one.max for part in parts for one in part)

    def _wait_until_dispatched(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        now = self.status()["positions"]
        written = now["written"]
        while now["dispatched"] < written:
            if time.monotonic() >= deadline:
                sentence = f"the ConsumeQueues are {written - now['dispatched']} bytes behind the log; try again later"
                raise ProtocolError("SERVICE_NOT_AVAILABLE", sentence)
            time.sleep(_LOOK_S)
            now = self.status()["positions"]

    # ------------------------------------------------------------ groups

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
        """Delete a group's settings, and with ``offsets`` its committed offsets too. Its retry and dead-letter topics
        stay.

        Without ``offsets`` a group of that name continues at them later. Raises ProtocolError NO_PERMISSION while the
        group has consumers, unless ``force`` is given: these make the group again. Raises GroupNotFoundError for an
        unknown group.
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
                continue  # the topic was deleted in the meantime
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
                continue  # the topic was deleted in the meantime
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

        ``topic``: one topic, several, or None for all that the group reads (without its retries and dead letters). All
        of them move, or none. With ``running`` members may read the queues: each continues at the new offset with its
        next heartbeat, and no commit of what it read before counts. Without it FencedError is raised while a member
        reads one.

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

    # ------------------------------------------------------------ clients

    def clients(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        user: str | None = None,
        client_id: str | None = None,
        gateway: str | None = None,
        text: str | None = None,
        max_clients: int | None = None,
    ) -> ConnectedClients:
        """Who is connected: clients of gateways, producers too, and the members of groups. Each argument leaves out others.

        ``topic``: who subscribes to it. ``group``: who consumes or produces in it. ``text``: a part of an id, a
        group, a user or an address. ``max_clients``: no more than these. The node does not know producers of its own protocol.
        """
        wanted: dict[str, Any] = {
            "topic": topic,
            "group": group,
            "user": user,
            "client_id": client_id,
            "gateway": gateway,
        }
        wanted |= {"text": text, "limit": max_clients}
        fields = {name: value for name, value in wanted.items() if value is not None}
        found: list[ClientInfo] = []
        complete = True
        for page in self._pages("client.list", fields):
            found += map(ClientInfo.of, page["clients"])
            complete = complete and page["complete"]
            if max_clients is not None and (len(found) > max_clients or (len(found) == max_clients and page["next"])):
                return ConnectedClients(found[:max_clients], False)
        return ConnectedClients(found, complete)

    # ------------------------------------------------------------ dead letters

    def dlq_groups(self, *, after: str = "", max_groups: int = 200) -> tuple[list[DeadLetterCount], str | None]:
        """The groups with dead letters, by name, and where the next call continues (``after``), else None.

        A call looks at ``max_groups`` dead-letter topics, with two requests each.
        """
        from commitmq.client.dead_letters import DeadLetterCount

        if max_groups < 1:
            raise ValueError("max_groups must be at least 1")
        topics = [one.name for one in self.topics() if one.name.startswith(DLQ_PREFIX)]
        names = sorted(name for topic in topics if (name := topic.removeprefix(DLQ_PREFIX)) > after)
        found = []
        for name in names[:max_groups]:
            try:
                dead = self._dead_letters(name).dead()
            except TopicNotFoundError:
                continue  # it was deleted in the meantime
            if dead:
                found.append(DeadLetterCount(name, dead))
        return found, names[max_groups - 1] if len(names) > max_groups else None

    def dlq_list(
        self,
        group: str,
        selected: DeadLetterFilter | None = None,
        *,
        max_messages: int = 64,
        all_states: bool = False,
    ) -> list[DeadLetter]:
        """The oldest dead letters of ``group``, at most ``max_messages``: those that a resend would send.

        ``all_states``: also those that were resent or purged. Raises TopicNotFoundError when the group never had one.
        """
        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        return self._dead_letters(group).oldest(max_messages, selected, all_states=all_states)

    def dlq_show(self, group: str, offset: int, *, queue: int = 0) -> DeadLetter:
        """One dead letter of ``group`` by its queue offset. Raises ProtocolError when there is none."""
        return self._dead_letters(group).show(queue, offset)

    def dlq_resend(
        self,
        group: str,
        selected: DeadLetterFilter | None = None,
        *,
        rate: float = 500.0,
        max_messages: int | None = None,
        dry_run: bool = False,
        timeout_s: float = 30.0,
        on_progress: Progress | None = None,
    ) -> ResendResult:
        """Send the dead letters of ``group`` to their original topics again, each once, at most ``rate`` a second.

        An interrupted call can be repeated: it leaves out what was resent already. ``max_messages`` ends the call after
        so many. With ``dry_run`` it only counts. ``timeout_s`` bounds the wait for one message that the node cannot take now.
        ``on_progress`` is called with the number of dead letters that were looked at, and with how many there are.
        """
        from commitmq.client.dead_letters import ResendPass

        if not 0 < rate <= 1_000_000:
            raise ValueError(f"rate must be between 0 and 1,000,000 messages a second, not {rate}")
        if max_messages is not None and max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        return ResendPass(
            self._request,
            self._dead_letters(group),
            selected,
            rate=rate,
            max_messages=max_messages,
            dry_run=dry_run,
            timeout_s=timeout_s,
            on_progress=on_progress,
        ).run()

    def dlq_purge(self, group: str, *, until: int | datetime | None = None, dry_run: bool = False) -> PurgeResult:
        """Give up the dead letters of ``group``: a resend begins behind them. ``until`` spares those that died later.

        The messages stay in the log until they expire, and the dead-letter topic can still be read. A second call does
        nothing. Dead letters that were resent are not counted, as far as the index can tell.
        """
        return self._dead_letters(group).purge(until, dry_run=dry_run)

    def _dead_letters(self, group: str) -> DeadLetterQueue:
        from commitmq.client.dead_letters import DeadLetterQueue

        return DeadLetterQueue(self._request, group)

    # ------------------------------------------------------------ messages that wait for their time

    def delayed(
        self,
        topic: str | None = None,
        *,
        max_messages: int = 64,
        most_read: int = _MOST_READ,
        most_bytes: int = _MOST_BYTES,
        most_s: float | None = None,
    ) -> DelayedMessages:
        """The ``max_messages`` messages that are due first among those that wait; with ``topic`` only those for it.

        The call reads at most ``most_read`` messages and about ``most_bytes`` of the topics in which messages wait, and begins
        no further request after ``most_s`` seconds; ``complete`` of the result says whether that was everything. The list is a
        look at a moving thing: a message that was delivered or cancelled in the last seconds may be in it, and one that was
        sent a moment ago may be missing.
        """
        from commitmq.client.delayed import DelayPositions, ReadBounds, WaitingMessages

        if max_messages < 1 or most_read < 1 or most_bytes < 1:
            raise ValueError("max_messages, most_read and most_bytes must be at least 1")
        bounds = ReadBounds.of(most_read, most_bytes, most_s)
        return WaitingMessages(self._request, DelayPositions.of(self.status()), topic, bounds).first(max_messages)

    def delayed_recall(self, which: str) -> str:
        """Cancel a waiting message: no consumer will get it. Returns its recall handle.

        ``which`` is the recall handle, or the unique id of a message that was sent with ``delay`` or ``deliver_at``. A second
        call does no harm. Raises ProtocolError: ILLEGAL_OPERATION when it is due in less than half a second, or was delivered;
        INVALID_PARAMETER when no message waits with this id. Raises InvalidMessageError for a message at a delay level.
        """
        from commitmq.client.delayed import DelayPositions, handle_for
        from commitmq.client.sending.options import cancel_fields

        handle = handle_for(which, self._with_unique_key, DelayPositions.of(self.status()).broker)
        fields = {name: value for name, value in cancel_fields(handle).items() if name not in ("v", "op")}
        self._request("writer", "recall", {**fields, "by_person": True}, payload=[b"0"])
        return handle

    def _with_unique_key(self, topic: str, unique_key: str) -> list[Message]:
        try:
            return list(self.query(topic, unique_key=unique_key))
        except TopicNotFoundError:
            return []

    # ------------------------------------------------------------ settings of another node

    def export_config(self, *, offsets: bool = False) -> dict[str, Any]:
        """The settings of all topics and groups, as a JSON document, with ``offsets`` also what groups have committed.

        Topics and groups of the system, and topics of retries and dead letters, are not in it; see
        :mod:`commitmq.client.admin_config`. Users are added by ``commitmq export config --users``, on the node's machine.
        """
        return self._config().exported(self.metadata()["node"], offsets=offsets)

    def import_config(self, document: object, *, offsets: bool = False, dry_run: bool = False) -> ConfigImport:
        """Give the node the topics and groups of ``document``, with ``offsets`` also what groups have committed.

        What the document does not name stays as it is, and so do users, which only ``commitmq import config`` takes. An offset
        moves ahead only. With ``dry_run`` nothing changes. Raises ValueError, which names the place, for what is no such
        document.
        """
        return self._config().imported(document, offsets=offsets, dry_run=dry_run)

    def _config(self) -> ConfigTransfer:
        from commitmq.client.admin_config import ConfigTransfer

        return ConfigTransfer(self._ask, self._pages)

    # ------------------------------------------------------------ dispatchers

    def dispatchers(self) -> list[dict[str, Any]]:
        """For each dispatcher ``name``, ``plugin``, ``state``, ``restarts`` and where it is.

        ``position``, ``durable`` and ``lag_bytes`` are bytes of the log. ``skipped`` and ``gaps`` are parts of the log
        that the dispatcher omitted or missed. ``parked`` is the record that it is parked at, or None.
        """
        return list(self.status()["dispatchers"])

    def dispatcher_query(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of dispatcher ``name`` to ``request``. Both are JSON values."""
        return dict(self._ask(self._dispatcher(name), "query", {"request": request})["result"])

    def dispatcher_retry(self, name: str) -> None:
        """Let a parked dispatcher try its record again, in a new process that imports its code again."""
        self._ask(self._dispatcher(name), "retry", {})

    def dispatcher_restart(self, name: str) -> None:
        """Stop a dispatcher in order and start it in a new process, which imports its code again.

        This is for a plugin that was replaced by another version.
        """
        self._ask(self._dispatcher(name), "restart", {})

    def dispatcher_skip(self, name: str, at: int) -> dict[str, Any]:
        """Let a dispatcher that is parked at physical offset ``at`` skip that record for ever. Returns the record."""
        return dict(self._ask(self._dispatcher(name), "skip", {"at": at})["skipped"])

    def dispatcher_reset(self, name: str, to: str | int | datetime) -> dict[str, Any]:
        """Move a dispatcher to ``begin``, ``end``, a record's physical offset, or the first record stored at a datetime.

        A move ahead leaves records out. A move back needs a dispatcher that can forget. Returns ``position`` and ``before``.
        """
        if isinstance(to, datetime):
            return self._ask(self._dispatcher(name), "reset", {"timestamp": int(to.timestamp() * 1000)})
        return self._ask(self._dispatcher(name), "reset", {"to": to})

    def _dispatcher(self, name: str) -> str:
        role = f"dispatcher-{name}"
        endpoints = self.metadata()["endpoints"]
        if role not in endpoints:
            known = ", ".join(one.removeprefix("dispatcher-") for one in endpoints if one.startswith("dispatcher-"))
            raise ProtocolError("INVALID_PARAMETER", f"there is no dispatcher {name!r:.100}; there are {known}")
        if not endpoints[role]:
            raise ProtocolError(
                "SERVICE_NOT_AVAILABLE", f"dispatcher {name} has not started; `dispatcher list` says why"
            )
        return role

    # ------------------------------------------------------------ transactions

    def transactions(self) -> list[OpenTransaction]:
        """The transactions without an end, oldest first."""
        from commitmq.client.transactions.transaction import open_transactions

        return list(open_transactions(self._ask_transactions))

    def transaction_resolve(self, unique_id: str, decision: str) -> dict[str, Any]:
        """End an open transaction, whatever its producers would say. ``decision`` is ``commit`` or ``rollback``.

        Returns the decision, and for a commit topic, queue and offsets. Raises ProtocolError TRANSACTION_ENDED when it is
        not open.
        """
        from commitmq.client.transactions.transaction import resolve

        return resolve(self._ask_transactions, unique_id, decision)

    def _ask_transactions(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._start_mover("transaction")
        return self._ask("transaction", op, fields)

    def _start_mover(self, role: str) -> None:
        self._check_usable()
        self._directory.request("mover.start", {"role": role}, timeout_s=self._timeout_s)

    # ------------------------------------------------------------ the rest

    def close(self) -> None:
        """Close every connection; closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        self._channels.close()
        self._directory.close()

    def _forgotten(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Admin({self._directory.address!r})"

    def _pages(self, op: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The pages of a list, one request each."""
        after: Any = None
        while True:
            page = self._ask("coordinator", op, fields if after is None else {**fields, "after": after})
            yield page
            after = page.get("next")
            if after is None:
                return

    def _ask(self, role: str, op: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        return _without_envelope(self._request(role, op, fields, timeout_s=timeout_s)[0])

    def _request(
        self,
        role: str,
        op: str,
        fields: dict[str, Any],
        *,
        payload: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        self._check_usable()
        return self._channels.request(role, op, fields, payload=payload, timeout_s=timeout_s)


def _without_envelope(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("v", "id", "ok")}


def _source(copied_from: str | None) -> dict[str, str]:
    return {} if copied_from is None else {"copied_from": copied_from}
