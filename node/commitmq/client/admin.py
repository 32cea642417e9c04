"""The administrator's client: what a node knows of itself, its topics and its groups.

It has more than 400 lines because it has a public method with its text for each request, and little else.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from commitmq.client import checks
from commitmq.client.admin_results import (
    GroupOffset,
    Lag,
    QueueBounds,
    TopicCreated,
    TopicDescription,
    TopicInfo,
)
from commitmq.errors import CommitMQError, NodeUnavailableError, ProtocolError, TopicNotFoundError
from commitmq.format.message_id import parse_offset_message_id
from commitmq.protocol.connection import Channel, ConnectionLost, Directory, check_fork

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message
    from commitmq.client.receiving.query import QueryResult

_LONG_WORK_S = 600.0  # stopping and deleting take as long as the disk needs


class Admin:
    """Asks one node. Not thread-safe. Every method raises NodeUnavailableError without an answer within ``timeout_s``,
    and ProtocolError, whose ``code`` says why, when the node refuses. Where a method has a longer ``timeout_s`` of its own,
    that is for the work of a node that is there: one that cannot be reached is an error after the admin's.
    """

    def __init__(self, node: str | None = None, *, timeout_s: float = 10.0) -> None:
        """Connects at the first request. ``node``: admin address, default COMMITMQ_NODE, else tcp://127.0.0.1:7310."""
        self._closed = True
        self._timeout_s = checks.seconds("timeout_s", timeout_s)
        self._directory = Directory(node)
        self._channels: dict[str, Channel] = {}
        self._pid = os.getpid()
        self._closed = False

    # ------------------------------------------------------------ the node

    def metadata(self) -> dict[str, Any]:
        """The node's name, epoch, store folder, sizes, limits and the addresses of its processes."""
        self._check_usable()
        return _without_envelope(self._directory.metadata(timeout_s=self._timeout_s, refresh=True).raw)

    def status(self) -> dict[str, Any]:
        """Per process: pid, state, restarts, CPU, memory, position, lag; and the log's positions."""
        self._check_usable()
        return _without_envelope(self._directory.request("status", timeout_s=self._timeout_s))

    def stop(self, *, timeout_s: float = _LONG_WORK_S) -> dict[str, Any]:
        """Stop the node; returns when everything is flushed."""
        self._check_usable()
        self._directory.request("status", timeout_s=min(timeout_s, self._timeout_s))  # is it there?
        return _without_envelope(self._directory.request("stop", timeout_s=timeout_s))

    def expire(
        self,
        *,
        before: int | datetime | None = None,
        keep_bytes: int | None = None,
        dry_run: bool = False,
        timeout_s: float = _LONG_WORK_S,
    ) -> dict[str, Any]:
        """Delete the oldest segments of the CommitLog: those of which every message was stored before ``before``
        (milliseconds or a datetime), or that lie further than ``keep_bytes`` behind the log's end; with both, those to
        which both apply; with neither, those that are expired by age, whatever the hour.

        Returns ``segments`` (names), ``disk_bytes``, ``min_offset``, ``kept`` (why the next one stays) and ``dry_run``.
        """
        fields: dict[str, Any] = {"dry_run": dry_run, "keep_bytes": keep_bytes}
        fields["before"] = int(before.timestamp() * 1000) if isinstance(before, datetime) else before
        return self._ask("cleanup", "expire", {k: v for k, v in fields.items() if v is not None}, timeout_s=timeout_s)

    # ------------------------------------------------------------ topics

    def topic_create(
        self, name: str, queues: int | None = None, *, perm: int | None = None, attributes: dict[str, str] | None = None
    ) -> TopicCreated:
        """Create a topic (``queues`` default: the node's). One that exists with the same settings is no error."""
        fields: dict[str, Any] = {"topic": name, "queues": queues, "perm": perm, "attributes": attributes}
        answer = self._ask("coordinator", "topic.create", {k: v for k, v in fields.items() if v is not None})
        return TopicCreated(answer["created"], TopicInfo.of(answer["topic"]))

    def topic_update(
        self, name: str, queues: int | None = None, *, perm: int | None = None, attributes: dict[str, str] | None = None
    ) -> TopicInfo:
        """Change settings of a topic that exists; what is None stays. Returns its settings.

        More ``queues`` are read from their beginning; fewer leave the messages of the others unread. ``attributes`` are set
        beside those it has; what its messages are kept in cannot change. Raises ProtocolError TOPIC_NOT_EXIST without one.
        """
        now = self.topic(name)
        fields: dict[str, Any] = {
            "topic": name,
            "queues": now.write_queues if queues is None else queues,
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
        """One topic's settings, and the groups that have offsets in it. Raises TopicNotFoundError."""
        return TopicDescription.of(self._ask("coordinator", "topic.describe", {"topic": name})["topic"])

    def memory_use(self, topic: str | None = None) -> dict[str, int]:
        """What memory topics use of ``memory.budget_bytes``, in bytes; with ``topic`` also what that one uses."""
        return dict(self._ask("reader", "memory", {} if topic is None else {"topic": topic}))

    def topic_delete(self, name: str) -> None:
        """Delete a topic: its messages cannot be read any more, its groups' offsets are dropped.

        Deletes the topic that is there when this is called, and never one that is made of the same name since, however often
        the request has to be repeated. A topic whose deletion was not finished (ProtocolError SERVICE_NOT_AVAILABLE: the
        writer is being restarted) does not exist any more; the node finishes it by itself, and calling this again waits.
        """
        try:
            incarnation = self.topic(name).incarnation
        except TopicNotFoundError:
            incarnation = None  # it may be ending: this waits for that
        fields = {"topic": name} if incarnation is None else {"topic": name, "incarnation": incarnation}
        self._ask("coordinator", "topic.delete", fields)

    def offsets(self, topic: str, timestamp: int | datetime | None = None) -> list[QueueBounds]:
        """For each queue its first offset and the one the next message will get.

        ``by_time``: the first message stored at ``timestamp`` (milliseconds or a datetime) or later; None without it.
        """
        fields: dict[str, Any] = {"topic": topic}
        if timestamp is not None:
            fields["timestamp"] = int(timestamp.timestamp() * 1000) if isinstance(timestamp, datetime) else timestamp
        return [QueueBounds(*row[:4]) for row in self._ask("reader", "offsets", fields)["queues"]]

    def view(self, where: int | str, topic: str | None = None) -> Message:
        """One message by its physical offset or its offset message id. Raises ProtocolError when none begins there.

        ``topic`` is needed for a message of a memory topic, whose offsets are its own. The messages of an inner batch have
        one place and one id; this is the first of them.
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

        Raises ValueError for what is no such id, ProtocolError when no message has it.
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
        """Messages by one of ``key`` (any of a message's keys), ``unique_key`` and ``tag``, or by time alone.

        ``begin`` and ``end`` are store times, both inclusive: milliseconds or datetimes. A query by key returns the
        newest ``max_messages``, one by time alone the oldest; ``result.next`` as ``continue_from`` (and the same other
        arguments) goes on behind them. Messages are in the order of the log. What was sent a moment ago is found too: the
        index is given ``wait_s`` to catch up, after which ``result.complete`` is False.
        Of a topic with ``queue.type=BatchCQ`` the index has one tag for a batch, if all its messages share it, and none of
        their keys (as RocketMQ's); a batch that is found by its tag counts once for ``max_messages``.
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

    # ------------------------------------------------------------ groups

    def groups(self) -> list[dict[str, Any]]:
        """All groups: ``name``, ``members`` (number), ``topics`` (with offsets)."""
        groups: dict[str, dict[str, Any]] = {}
        for page in self._pages("group.list", {}):
            for row in page["groups"]:
                known = groups.setdefault(row["name"], row)
                if known is not row:
                    known["topics"] += row["topics"]
        return list(groups.values())

    def group(self, name: str) -> dict[str, Any]:
        """One group: state, members, which of them has which queue, committed offsets."""
        first, *more = (page["group"] for page in self._pages("group.describe", {"group": name}))
        for page in more:
            for part in ("members", "queues", "offsets"):
                first[part] += page[part]
        return dict(first)

    def group_lag(self, name: str) -> list[Lag]:
        """How far the group is behind in each queue of the topics that it has consumed or consumes."""
        described = self.group(name)
        committed = {(topic, queue): offset for topic, queue, offset in described["offsets"]}
        holders = {(topic, queue): member for topic, queue, member in described["queues"]}
        rows = []
        for topic in sorted({topic for topic, _ in {*committed, *holders}}):
            try:
                bounds = self.offsets(topic)
            except TopicNotFoundError:
                continue  # deleted since
            for queue, low, high, _ in bounds:
                at = committed.get((topic, queue))
                # What expired cannot be consumed any more, so it is no lag.
                reached = max(low, at or 0)
                rows.append(
                    Lag(
                        topic=topic,
                        queue=queue,
                        committed=at,
                        end=high,
                        lag=max(high - reached, 0),
                        member=holders.get((topic, queue)),
                        problem=None
                        if at is None or at <= high
                        else f"offset {at} is committed, and the queue ends at {high}: reset the group's offset",
                    )
                )
        return rows

    def commit_offsets(self, group: str, offsets: Iterable[tuple[str, int, int]]) -> list[GroupOffset]:
        """Say how far a group has come whose members are not this node's: ``(topic, queue, next offset)`` each.

        Never goes back. Returns what is stored now. Refused (FENCED) for queues that a member of the group reads.
        """
        fields = {"group": group, "offsets": [list(one) for one in offsets]}
        answer = self._ask("coordinator", "offset.commit", fields)
        return [GroupOffset(*one[:3]) for one in answer["stored"]]

    def reset_offsets(
        self, group: str, topic: str, to: str | int | datetime, *, queues: Iterable[int] | None = None
    ) -> list[GroupOffset]:
        """Set a group's committed offsets, back or ahead: ``earliest``, ``latest``, a datetime, or a queue offset.

        Returns what is stored now. Refused (FENCED) while a member reads a queue.
        """
        if isinstance(to, str) and to not in ("earliest", "latest"):
            raise ValueError(f"to must be 'earliest', 'latest', a datetime or an offset, not {to!r}")
        wanted = None if queues is None else set(queues)
        offsets = []
        for queue, low, high, by_time in self.offsets(topic, to if isinstance(to, datetime) else None):
            if wanted is not None and queue not in wanted:
                continue
            if isinstance(to, datetime):
                offset = low if by_time is None else by_time
            elif isinstance(to, int):
                offset = min(max(to, low), high)
            else:
                offset = low if to == "earliest" else high
            offsets.append([topic, queue, offset])
        if wanted is not None and len(offsets) != len(wanted):
            raise ValueError(f"topic {topic!r} does not have all of the queues {sorted(wanted)}")
        answer = self._ask("coordinator", "offset.commit", {"group": group, "offsets": offsets, "reset": True})
        return [GroupOffset(*one[:3]) for one in answer["stored"]]

    def _pages(self, op: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The pages of a listing, one request each."""
        after: Any = None
        while True:
            page = self._ask("coordinator", op, fields if after is None else {**fields, "after": after})
            yield page
            after = page.get("next")
            if after is None:
                return

    # ------------------------------------------------------------ dispatchers

    def dispatchers(self) -> list[dict[str, Any]]:
        """For each dispatcher ``name``, ``plugin``, ``state``, ``position``, ``durable`` and ``lag_bytes`` (bytes of the log),
        ``restarts``, ``skipped`` and ``gaps`` (stretches of the log it left out or missed), and ``parked``: the record it is
        parked at, or None.
        """
        return list(self.status()["dispatchers"])

    def dispatcher_query(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """What the dispatcher ``name`` answers to ``request``; JSON values both ways."""
        return dict(self._ask(self._dispatcher(name), "query", {"request": request})["result"])

    def dispatcher_retry(self, name: str) -> None:
        """Have a parked dispatcher try its record again, in a new process that imports its code again."""
        self._ask(self._dispatcher(name), "retry", {})

    def dispatcher_restart(self, name: str) -> None:
        """Have a dispatcher end in order and begin again in a new process, which imports its code again: after its plugin was
        replaced by another version.
        """
        self._ask(self._dispatcher(name), "restart", {})

    def dispatcher_skip(self, name: str, at: int) -> dict[str, Any]:
        """Have a dispatcher that is parked at physical offset ``at`` leave that record out, for ever. Returns the record."""
        return dict(self._ask(self._dispatcher(name), "skip", {"at": at})["skipped"])

    def dispatcher_reset(self, name: str, to: str | int | datetime) -> dict[str, Any]:
        """Move a dispatcher to ``begin``, ``end``, a record's physical offset, or the first record stored at a datetime.

        Forwards leaves records out; backwards needs a dispatcher that can forget. Returns ``position`` and ``before``.
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

    # ------------------------------------------------------------ the rest

    def close(self) -> None:
        """Close every connection; closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            warnings.warn(f"unclosed admin {self!r}", ResourceWarning, source=self, stacklevel=2)
            if not sys.is_finalizing():
                self.close()

    def __repr__(self) -> str:
        return f"Admin({self._directory.address!r})"

    def _check_usable(self) -> None:
        check_fork(self._pid, "admin")
        if self._closed:
            raise CommitMQError("the admin is closed")

    def _ask(self, role: str, op: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        return _without_envelope(self._request(role, op, fields, timeout_s=timeout_s)[0])

    def _request(
        self, role: str, op: str, fields: dict[str, Any], *, timeout_s: float | None = None
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        self._check_usable()
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
                return channel.request(op, fields, timeout_s=max(deadline - time.monotonic(), 0.01))
            except NodeUnavailableError as error:
                # All of these requests may be repeated: they say what should be, not what should change.
                self._drop(role)
                now = time.monotonic()
                if isinstance(error, ConnectionLost):  # it was there, and may be back in a moment
                    reached_by = min(deadline, now + self._timeout_s)
                if now >= reached_by:
                    raise

    def _drop(self, role: str) -> None:
        self._channels.pop(role).close()


def _without_envelope(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("v", "id", "ok")}
