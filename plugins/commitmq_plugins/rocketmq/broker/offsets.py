"""Offsets of groups and queues: requests 14, 15, and 29 to 32 (remoting 1.5).

Clients commit with every pull and every five seconds, for one queue each. The newest offset of each queue is kept and
goes to the coordinator with all others every ``COMMIT_S``. Who asks for an offset first has those of its group
committed. So an offset that somebody read never goes back.

What groups may read, as every pull asks: kept here, and learned again when the coordinator has changed it.

RocketMQ's clients know no generation of the log (:mod:`commitmq.store.recovery.cut_history`), so a group may come back
with offsets from before a cut of it: :class:`Returning`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

from commitmq.control import Word, WorkerWord
from commitmq.errors import ProtocolError
from commitmq.format.units import UNIT_STRUCT
from commitmq.log import Log
from commitmq.plugin import WorkerContext
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH, is_system_group
from commitmq.store.recovery.cut_history import CutHistory
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.node import NodeClient
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.headers import (
    GetMaxOffsetRequestHeader,
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

AWAY_MS: Final = 3_600_000


class Returning:
    """Groups that may come back with offsets from before a cut of the log.

    A consumer that lived through the cut pulls at the offset that it had reached, and messages may be there again by then. So
    the first pull of each queue of a group with offsets is judged as if it came from a generation before a cut. A consumer
    whose offset lies behind the queue's end of then is sent back to it (PULL_OFFSET_MOVED), which RocketMQ's clients obey.
    Commits before that pull are judged as if they came from the generation in which the node served before.

    A consumer may stay away for longer than one start lasts. So the cuts of the last AWAY_MS count, the oldest first. A start
    lowers what a group has committed to the end at the cut. A group that has more now has come back since: the next cut
    counts.

    Used by pulls and offsets.
    """

    def __init__(self, context: WorkerContext, node: NodeClient) -> None:
        """Raises OSError."""
        history, now_ms = CutHistory.load(context.layout), time.time_ns() // 1_000_000
        is_first = not context.control.worker(context.slot, WorkerWord.RESTARTS)
        self._node = node
        self._served = history.served if history.served < history.generation and is_first else -1
        before = [0, *(cut.generation for cut in history.cuts)]
        self._generations = [
            one for one, cut in zip(before, history.cuts, strict=False) if abs(now_ms - cut.time_ms) < AWAY_MS
        ]
        self._awaited: dict[tuple[str, str, int], tuple[int, list[int]]] = {}
        """By queue: what the group has committed, and the generations that are left to judge by."""

    async def learn(self) -> None:
        """Ask which groups have offsets, before any of them is served. Raises ProtocolError."""
        after: list[Any] | None = None
        while self._generations:
            answer = await self._node.ask("coordinator", "group.positions", after=after)
            for group, topic, queue, offset in answer["positions"]:
                self._awaited[group, topic, queue] = offset, self._generations
            if (after := answer["next"]) is None:
                break

    def of_pull(self, group: str, topic: str, queue: int) -> int | None:
        """The generation by which a pull is judged; None when one of this queue was answered."""
        found = self._awaited.get((group, topic, queue)) if self._awaited else None
        return None if found is None else found[1][0]

    def of_commit(self, group: str, topic: str, queue: int) -> int:
        """The generation by which a commit is judged; -1 for none."""
        return self._served if (group, topic, queue) in self._awaited else -1

    def is_again(self, group: str, topic: str, queue: int, answer: dict[str, Any]) -> bool:
        """Whether the pull of the queue that is answered by ``answer`` is to be asked again: its group came back since the cut
        by which it was judged.
        """
        found = self._awaited.pop((group, topic, queue), None) if self._awaited else None
        if found is None or answer.get("status") != "OFFSET_OVERFLOW_BADLY" or int(answer["next_offset"]) >= found[0]:
            return False
        if found[1][1:]:
            self._awaited[group, topic, queue] = found[0], found[1][1:]
        return True


READ: Final = 1 << 2
"""The bit of forbiddenTable that takes the right to read."""
_GROUP_READS: Final = int(Word.GROUP_READS)  # a plain int for speed: each pull looks
_PAUSE_S: Final = 0.2
_WAIT_S: Final = 1.0
_FOUND_S: Final = 5.0
_MOST_FOUND: Final = 10_000


class GroupReads:
    """Whoever asks first finds out whether the coordinator has changed anything (:attr:`is_current`), and waits for it."""

    def __init__(self, node: NodeClient, log: Log) -> None:
        self._node, self._log = node, log
        self._version = -1
        self._learning = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._again_s = 0.0
        self._disabled: frozenset[str] = frozenset()
        self._forbidden: dict[str, frozenset[str]] = {}
        self._found: dict[str, float] = {}

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since it was learned."""
        return self._version == self._node.control.get(_GROUP_READS)

    async def refresh(self) -> None:
        """Learn what has changed. After ``_WAIT_S`` what was known holds: a coordinator that is away stops no consumer."""
        if self._task is None and not self.is_current and time.monotonic() >= self._again_s:
            self._task = asyncio.create_task(self._follow())
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_WAIT_S)

    def when_current(self, work: Callable[[], None]) -> None:
        """Call ``work`` after :meth:`refresh`."""
        task = asyncio.create_task(self.refresh())
        self._waiting.add(task)

        def done(_: object) -> None:
            self._waiting.discard(task)
            work()

        task.add_done_callback(done)

    def may_be_missing(self, group: str) -> bool:
        """Whether :meth:`is_missing` has to be asked. Where groups are made by themselves none is missing, and RocketMQ's own
        never are (spec 1.5).
        """
        if self._node.config.groups.auto_create or is_system_group(group):
            return False
        return time.monotonic() - self._found.get(group, -_FOUND_S) >= _FOUND_S

    async def is_missing(self, group: str) -> bool:
        """Whether there is no such group. One that was found counts as there for some seconds (spec 9.4), and as long as the
        coordinator is away. Raises ProtocolError when nobody knows.
        """
        try:
            await self._node.ask("coordinator", "group.config", group=group)
        except ProtocolError as error:
            if error.code in ("GROUP_NOT_EXIST", "INVALID_PARAMETER"):
                self.forget(group)
                return True
            if group not in self._found:
                raise
        if len(self._found) >= _MOST_FOUND:
            self._found.clear()
        self._found[group] = time.monotonic()
        return False

    def forget(self, group: str) -> None:
        """The settings of ``group`` were changed or deleted."""
        self._found.pop(group, None)

    def may_consume(self, group: str) -> bool:
        """Whether the group's consumeEnable is on."""
        return group not in self._disabled

    def may_read(self, group: str, topic: str) -> bool:
        """Whether the group is not forbidden to read ``topic`` (request 353)."""
        return topic not in self._forbidden.get(group, ())

    async def sync(self) -> None:
        """Learn what has changed, if anything has. Raises ProtocolError."""
        async with self._learning:
            version = self._node.control.get(_GROUP_READS)
            if version != self._version:
                groups, forbidden, _ = await all_settings(self._node, unreadable=True)
                self._disabled = frozenset(name for name, one in groups.items() if one.get("consumeEnable") is False)
                self._forbidden = {
                    group: frozenset(topic for topic, bits in topics.items() if bits & READ)
                    for group, topics in forbidden.items()
                }
                self._version = version

    async def _follow(self) -> None:
        try:
            await self.sync()
        except ProtocolError as error:
            self._again_s = time.monotonic() + _PAUSE_S
            self._log.warning("what groups may read is not known again", why=str(error))
        finally:
            self._task = None

    async def close(self) -> None:
        """End the questions that are under way."""
        tasks = [*self._waiting] if self._task is None else [self._task, *self._waiting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_settings(
    node: NodeClient, *, unreadable: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Settings of all groups by name, what they must not read, and the version of both; with ``unreadable`` of those that
    must not read everything. Raises ProtocolError.
    """
    groups: dict[str, dict[str, Any]] = {}
    forbidden: dict[str, Any] = {}
    after: str | None = None
    while True:
        answer = await node.ask("coordinator", "group.configs", after=after, unreadable=unreadable)
        groups |= {one["groupName"]: one for one in answer["configs"]}
        forbidden |= answer["forbidden"]
        if answer["next"] is None:
            return groups, forbidden, answer["version"]
        after = str(answer["next"])


COMMIT_S: Final = 0.2
_ROUNDS: Final = 3
_MEMORY_BYTES: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 40 // 100
"""How far behind the end of the log a message counts as in memory: RocketMQ's accessMessageInMemoryMaxRatio."""
_QUEUES_A_REQUEST: Final = 1_000
_MAX_QUEUES: Final = 1_000_000
_MAX_RESETS: Final = 100_000

Queue = tuple[str, int]
Owner = tuple[str, str | None]
"""A group, and the client that commits for it: None for a tool, or a consumer with queues of its own choice."""


class Offsets:
    """The requests on offsets of groups and queues."""

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        returning: Returning,
        loop: asyncio.AbstractEventLoop,
        log: Log,
    ) -> None:
        self._returning = returning
        self._node, self._topics, self._clients, self._loop, self._log = node, topics, clients, loop, log
        self._users: dict[str, str] = {}  # by group: whoever makes it by a commit, if it is not there
        self._noted: dict[Owner, dict[Queue, int]] = {}
        self._count = 0
        self._committing: asyncio.Task[None] | None = None
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._resets: dict[tuple[str, str, int], int] = {}
        clients.sessions.leaving = self.settle
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self.update,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.bound,
            RequestCode.GET_MIN_OFFSET: self.bound,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest,
        }

    # ------------------------------------------------------------ commits

    def note(self, connection: RemotingConnection, group: str, topic: str, queue: int, offset: int) -> None:
        """Remember an offset that a client committed; it is stored soon."""
        if (group, topic, queue) in self._resets or not self._may_commit(connection, group):
            return
        owner = group, self._clients.member_name(connection, group, topic)
        table = self._noted.setdefault(owner, {})
        if (topic, queue) not in table:
            if self._count >= _MAX_QUEUES:
                return
            self._count += 1
        table[topic, queue] = max(0, offset)
        if self._clients.is_leaving(connection, group):
            # At once: another consumer may take the queue in a moment, and begins where this one ended.
            if group not in self._settling:
                self._settling[group] = self._loop.create_task(self._settle_soon(group))
        else:
            self._commit_soon()

    def _may_commit(self, connection: RemotingConnection, group: str) -> bool:
        """Whether the group is there, or the connection may make one more."""
        try:
            self._clients.charge(connection, group)
        except ProtocolError as error:
            self._log.info("offsets are not stored", group=group, error=error.message)
            return False
        if connection.user and self._node.quotas.bounds_names:
            self._users[group] = connection.user
        return True

    def _commit_soon(self) -> None:
        if self._committing is None and self._noted:
            self._committing = self._loop.create_task(self._commit_all())

    async def _commit_all(self) -> None:
        await asyncio.sleep(COMMIT_S)
        try:
            for owner in list(self._noted):
                await self._commit(owner)
        finally:
            self._committing = None
            self._commit_soon()

    async def _commit(self, owner: Owner) -> None:
        """Store what is noted for ``owner``, after what is under way for its group."""
        lock = self._locks.get(owner[0])
        if lock is None:
            lock = self._locks[owner[0]] = asyncio.Lock()
        async with lock:
            await self._store(owner)

    async def _store(self, owner: Owner) -> None:
        """What the coordinator refuses is dropped: another member has the queue."""
        table = self._noted.pop(owner, None)
        if not table:
            return
        self._count -= len(table)
        group, member = owner
        more = self._node.on_behalf_of("offset.commit", self._users.pop(group, ""))
        entries: list[list[Any]] = [[topic, queue, offset] for (topic, queue), offset in table.items()]
        for at in range(0, len(entries), _QUEUES_A_REQUEST):
            fields: dict[str, Any] = {
                "group": group,
                "offsets": entries[at : at + _QUEUES_A_REQUEST],
                "log_generations": [
                    self._returning.of_commit(group, topic, queue)
                    for topic, queue, _ in entries[at : at + _QUEUES_A_REQUEST]
                ],
                "partial": True,
                "reset": True,
                **more,
            }
            if member is not None:
                fields["member"] = member
                fields["instance"] = self._clients.sessions.instance
            try:
                answer = await self._node.ask("coordinator", "offset.commit", **fields)
            except ProtocolError as error:
                if error.code == "SERVICE_NOT_AVAILABLE":
                    self._keep(owner, entries[at:])
                    return
                if (
                    error.code == "UNKNOWN_MEMBER" and member is not None
                ):  # it left in the meantime, or was too short a time there to join
                    self._keep((group, None), entries[at:])
                    await self._store((group, None))  # at once: the next consumer begins where this one ended
                    return
                self._log.debug("offsets are not stored", group=group, error=error.message)
                continue
            for topic, queue, code, sentence in answer.get("refused", ()):
                self._log.debug(
                    "an offset is not stored", group=group, topic=topic, queue=queue, code=code, error=sentence
                )

    def _keep(self, owner: Owner, entries: list[list[Any]]) -> None:
        """Keep what could not be sent for the next time, unless a newer offset is there."""
        table = self._noted.setdefault(owner, {})
        for topic, queue, offset in entries:
            if (topic, queue) not in table:
                self._count += 1
                table[topic, queue] = offset
        self._commit_soon()

    async def settle(self, group: str) -> None:
        """Store what is noted for ``group``."""
        if group in self._locks:
            async with self._locks[group]:
                pass
        for owner in [owner for owner in self._noted if owner[0] == group]:
            await self._commit(owner)

    async def _settle_soon(self, group: str) -> None:
        """Store what is noted for ``group``, and what is noted in the meantime; what the coordinator cannot take now
        comes later.
        """
        try:
            for _ in range(_ROUNDS):
                await self.settle(group)
                if not any(owner[0] == group for owner in self._noted):
                    return
        finally:
            del self._settling[group]
            self._commit_soon()

    async def close(self) -> None:
        """Store everything that is noted."""
        for owner in list(self._noted):
            await self._commit(owner)

    # ------------------------------------------------------------ resets by an administrator

    def set_reset(self, group: str, topic: str, queue: int, offset: int) -> None:
        """The next pull or pop of this queue begins at ``offset``; until then commits do not count (remoting 4.4)."""
        for owner in [owner for owner in self._noted if owner[0] == group]:
            if self._noted[owner].pop((topic, queue), None) is not None:
                self._count -= 1
        if len(self._resets) >= _MAX_RESETS:  # of groups that never came for theirs
            del self._resets[next(iter(self._resets))]
        self._resets[group, topic, queue] = offset

    @property
    def has_resets(self) -> bool:
        return bool(self._resets)

    def take_reset(self, group: str, topic: str, queue: int) -> int | None:
        """The offset of a reset that nobody has taken yet; it is taken now."""
        return self._resets.pop((group, topic, queue), None) if self._resets else None

    # ------------------------------------------------------------ requests

    async def fetch(self, group: str, queues: list[Queue]) -> dict[Queue, int]:
        """The committed offsets, -1 where there is none. Raises ProtocolError."""
        await self.settle(group)
        found: dict[Queue, int] = {}
        for at in range(0, len(queues), _QUEUES_A_REQUEST):
            part = [list(queue) for queue in queues[at : at + _QUEUES_A_REQUEST]]
            answer = await self._node.ask("coordinator", "offset.fetch", group=group, queues=part)
            found.update({(topic, queue): offset for topic, queue, offset in answer["offsets"]})
        return found

    async def query(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 14."""
        header = QueryConsumerOffsetRequestHeader.decode(command.ext_fields)
        pending = self._resets.get((header.consumer_group, header.topic, header.queue_id))
        if pending is not None:
            return command.answer(ext_fields={"offset": str(pending)})
        queue = header.topic, header.queue_id
        try:
            offset = (await self.fetch(header.consumer_group, [queue]))[queue]
            if offset >= 0:
                return command.answer(ext_fields={"offset": str(offset)})
            if header.set_zero_if_not_found is False:
                remark = "Not found, do not set to zero, maybe this group boot first"
                return command.answer(ResponseCode.QUERY_NOT_FOUND, remark)
            if await self._begins_in_memory(*queue):
                return command.answer(ext_fields={"offset": "0"})
        except ProtocolError as error:
            if error.code == "SERVICE_NOT_AVAILABLE":
                raise
        remark = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
        return command.answer(ResponseCode.QUERY_NOT_FOUND, remark)

    async def _begins_in_memory(self, topic: str, queue: int) -> bool:
        """Whether the queue's first message is there, and young enough for RocketMQ's measure of memory: a new group then
        begins with it, whatever its consumers say (spec 9.7). Raises ProtocolError.
        """
        fields = {"topic": topic, "queue": queue, "offset": 0, "max_messages": 1, "mode": "ranges"}
        answer, frames = await self._node.exchange(self._node.reader_of(topic, queue), "pull", fields)
        if answer["status"] != "FOUND" or answer["min_offset"] > 0:
            return False
        if answer.get("mode") == "bytes":
            return True
        place, _, _ = UNIT_STRUCT.unpack_from(frames[0])
        return bool(self._node.control.get(Word.WRITTEN) - place <= _MEMORY_BYTES)

    async def update(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 15."""
        header = UpdateConsumerOffsetRequestHeader.decode(command.ext_fields)
        group, topic, queue, offset = header.consumer_group, header.topic, header.queue_id, header.commit_offset
        # (Clients commit one-way, for groups that they are in.)
        if not command.is_oneway and not await self._has_group(group):
            return command.answer(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        if self._topics.get(topic) is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
        if queue is None:
            return command.answer(ResponseCode.INVALID_PARAMETER, f"QueueId is null, topic is {topic}")
        if offset is None:
            return command.answer(ResponseCode.INVALID_PARAMETER, f"Offset is null, topic is {topic}")
        if (group, topic, queue) in self._resets:
            return command.answer(remark="Offset has been previously reset")
        self.note(connection, group, topic, queue, offset)
        if not command.is_oneway:
            await self.settle(group)
        return command.answer()

    async def _has_group(self, group: str) -> bool:
        """Whether there is a group, as far as can be told."""
        if group in self._clients.registry.groups:
            return True
        try:
            await self._node.ask("coordinator", "group.config", group=group)
        except ProtocolError as error:
            return error.code not in ("GROUP_NOT_EXIST", "INVALID_PARAMETER")
        return True

    async def bounds(self, topic: str, queue: int, **fields: Any) -> tuple[int, int, int | None]:
        """Smallest offset, end, and the offset for a time, if one is given. Zeros for what there is not."""
        answer = await self._node.exchange(
            self._node.reader_of(topic, queue), "offsets", {"topic": topic, "queues": [queue], **fields}
        )
        for number, least, end, by_time in answer[0]["queues"]:
            if number == queue:
                return least, end, by_time
        return 0, 0, None

    async def search(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 29."""
        header = SearchOffsetRequestHeader.decode(command.ext_fields)
        fields: dict[str, Any] = {"timestamp": header.timestamp}
        if header.is_upper:
            fields["boundary"] = "upper"
        return await self._number(command, header.topic, header.queue_id, 2, **fields)

    async def bound(self, connection: RemotingConnection, command: Command) -> Command:
        """Requests 30 and 31."""
        header = GetMaxOffsetRequestHeader.decode(command.ext_fields)
        which = 1 if command.code == RequestCode.GET_MAX_OFFSET else 0
        return await self._number(command, header.topic, header.queue_id, which)

    async def _number(self, command: Command, topic: str, queue: int, which: int, **fields: Any) -> Command:
        """One of the bounds; 0 where there is no such topic or queue, as from RocketMQ.

        A queue of batches without a message has no smallest offset in RocketMQ: -1.
        """
        try:
            bounds = await self.bounds(topic, queue, **fields)
            found = bounds[which] or 0
            if which == 0 and not bounds[1] and self._is_batch(topic):
                found = -1
        except ProtocolError as error:
            if error.code == "SERVICE_NOT_AVAILABLE":
                raise
            found = 0
        return command.answer(ext_fields={"offset": str(found)})

    def _is_batch(self, name: str) -> bool:
        topic = self._topics.get(name)
        return topic is not None and topic.attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH

    async def earliest(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 32: when the first message of a queue was stored."""
        header = QueueRequestHeader.decode(command.ext_fields)
        return command.answer(ext_fields={"timestamp": str(await self.store_time(header.topic, header.queue_id))})

    async def store_time(self, topic: str, queue: int, offset: int | None = None) -> int:
        """When the message at ``offset``, by default the first one, was stored; -1 when there is none."""
        try:
            if offset is None:
                offset = (await self.bounds(topic, queue))[0]
            fields = {"topic": topic, "queue": queue, "offset": offset, "max_messages": 1}
            answer, frames = await self._node.exchange(self._node.reader_of(topic, queue), "pull", fields)
        except ProtocolError:
            return -1
        if answer["status"] != "FOUND":
            return -1
        record = b"".join(frames)
        width = 20 if record[39] & 0x10 else 8
        return int.from_bytes(record[48 + width : 56 + width], "big")
