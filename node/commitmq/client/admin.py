"""The administrator's client: a node, its topics, its groups, its dispatchers and its open transactions."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from commitmq.client import checks
from commitmq.client.admin_clients import ClientAdmin
from commitmq.client.admin_config import ConfigAdmin
from commitmq.client.admin_dead_letters import DeadLetterAdmin
from commitmq.client.admin_delayed import DelayedAdmin
from commitmq.client.admin_groups import GroupAdmin
from commitmq.client.admin_results import (
    TopicCreated,
    TopicDescription,
    TopicInfo,
)
from commitmq.client.admin_topics import TopicAdmin
from commitmq.client.node_channels import NodeChannels
from commitmq.errors import CommitMQError, ProtocolError, TopicNotFoundError
from commitmq.format.message_id import parse_offset_message_id
from commitmq.protocol.channel import check_fork
from commitmq.protocol.directory import Directory

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message
    from commitmq.client.receiving.query import QueryResult
    from commitmq.client.transactions.administration import OpenTransaction

_LONG_WORK_S = 600.0  # the disk decides how long a stop and a deletion take


class Admin(TopicAdmin, GroupAdmin, DeadLetterAdmin, DelayedAdmin, ClientAdmin, ConfigAdmin):
    """Asks one node. Not thread-safe.

    Every method raises NodeUnavailableError without an answer within ``timeout_s``, and ProtocolError when the node refuses;
    its ``code`` says why. A method with a ``timeout_s`` of its own gives the node this longer time for its work. A node that
    cannot be reached is an error after the admin's ``timeout_s`` all the same.
    """

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

        ``begin`` and ``end`` are store times, in milliseconds or as datetimes, both inclusive. A query by key returns the
        newest ``max_messages``, a query by time alone the oldest. A call with ``result.next`` as ``continue_from``, and
        with the same other arguments, goes on behind them. Messages are in the order of the log.

        A query by key waits up to ``wait_s`` for the index to catch up with messages that were sent a moment ago. Otherwise
        ``result.complete`` is False. For a BatchCQ topic the index has no keys, and a tag only if all messages of an inner
        batch share it, as RocketMQ's index. An inner batch counts once for ``max_messages``.

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

    def _pages(self, op: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The pages of a list, one request each."""
        after: Any = None
        while True:
            page = self._ask("coordinator", op, fields if after is None else {**fields, "after": after})
            yield page
            after = page.get("next")
            if after is None:
                return

    # ------------------------------------------------------------ dispatchers

    def dispatchers(self) -> list[dict[str, Any]]:
        """For each dispatcher ``name``, ``plugin``, ``state``, ``restarts`` and where it is.

        ``position``, ``durable`` and ``lag_bytes`` are bytes of the log. ``skipped`` and ``gaps`` are parts of the log that
        the dispatcher left out or missed. ``parked`` is the record that it is parked at, or None.
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
        from commitmq.client.transactions.administration import open_transactions

        return list(open_transactions(self._ask_transactions))

    def transaction_resolve(self, unique_id: str, decision: str) -> dict[str, Any]:
        """End an open transaction, whatever its producers would say. ``decision`` is ``commit`` or ``rollback``.

        Returns the decision, and for a commit topic, queue and offsets. Raises ProtocolError TRANSACTION_ENDED when it is
        not open.
        """
        from commitmq.client.transactions.administration import resolve

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
