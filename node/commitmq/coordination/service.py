"""The coordinator's operations: headers in, fields of answers out, no sockets.

Requests are handled in turns. :meth:`Service.handle` changes the state in memory and stages the durable changes.
:meth:`Service.end_turn` writes them, with one sync for all group commits of the turn. Only then the answers are made
and sent. So many clients share the cost of a sync, and no client learns of a change that a crash could still take back.

A failed write refuses exactly the requests that depended on it (``SERVICE_NOT_AVAILABLE``); everything else goes on.
Work that must be finished (a decided deletion, a journal that failed) is tried again every RETRY_MS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.coordination import requests, topic_rules, topics
from commitmq.coordination.groups import Groups, check_name
from commitmq.coordination.listing import MAX_ENTRIES, Listing
from commitmq.coordination.membership import View
from commitmq.coordination.offsets import GroupOffsets
from commitmq.coordination.pace import Pace
from commitmq.coordination.queue_ends import QueueEnds
from commitmq.coordination.requests import Header
from commitmq.coordination.subscriptions import SQL, Subscriptions
from commitmq.coordination.topics import Topics
from commitmq.errors import ProtocolError, StoreError
from commitmq.files.disk import sync_folder
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.memory.memory_files import survives
from commitmq.store.memory.shared_memory import memory_folder
from commitmq.store.metadata.topic_config import STORAGE_MEMORY, STORAGE_TYPE
from commitmq.supervision.node_files import node_life

RETRY_MS = 500
_PUBLISH_MS = 100  # between two lists of SQL92 subscriptions for the other workers
_SESSION_TIMEOUT_MIN_MS = 200
_SESSION_TIMEOUT_MAX_MS = 30 * 60_000
_MIN_HEARTBEAT_MS = 50
# While queues change hands members come this much more often, so that a rebalance takes little more than one interval.
_REBALANCE_SPEEDUP = 10
_MAX_GENERATION = _MAX_INCARNATION = (1 << 63) - 1

Part = Literal["topics", "offsets"]
Fields = dict[str, Any]


class Answer(NamedTuple):
    """A positive answer. ``fields`` is called after the turn's writes, unless the part in ``needs`` failed.

    ``after``: a topic and its incarnation whose deletion must finish first, see :meth:`Service.is_ending`.
    """

    fields: Callable[[], Fields]
    needs: Part | None = None
    after: tuple[str, int] | None = None


class TopicNews(NamedTuple):
    """News for the other workers: changed topics as the protocol shows them; topics whose deletion was decided, with
    their incarnations; topics whose deletion is done, with their tombstones and incarnations.
    """

    topics: dict[str, Fields]
    ending: list[tuple[str, int]]
    deleted: list[tuple[str, int, int]]


class Service:
    """The operations of one coordinator."""

    def __init__(self, layout: StoreLayout, config: NodeConfig, control: ControlBlock, now_ms: int) -> None:
        """Load the store's files and finish work that a crash interrupted. Raises StoreError."""
        self._log = get_log("coordinator")
        self._config = config.groups
        self._memory_enabled = config.memory.enable
        self._control = control
        layout.own.mkdir(parents=True, exist_ok=True)
        layout.config.mkdir(parents=True, exist_ok=True)
        for folder in (layout.own, layout.config):
            # A predecessor may have renamed files and died before the sync. From now on answers treat them as durable.
            sync_folder(folder)
        self.offsets = GroupOffsets.open(layout)
        self.topics = Topics.load(
            layout,
            auto_create=config.topics.auto_create,
            default_queues=config.topics.default_queues,
            max_topics=config.topics.max_topics,
            max_deleted=config.topics.max_deleted,
            lmq=config.consume_queue.enable_lmq,
            snapshot_interval_ms=config.topics.snapshot_interval_ms,
        )
        if not survives(memory_folder(layout), node_life(layout)):
            self._begin_memory_topics()
        self.groups = Groups.load(
            layout,
            self.topics.readable_queues,
            config.groups,
            first_generation=time.time_ns() // 1_000_000,
            now_ms=now_ms,
            committed=self.offsets.table.groups(),
        )
        self._listing = Listing(self.topics, self.groups, self.offsets)
        self._ends = QueueEnds(layout, config, control)
        self.subscriptions = Subscriptions.load(
            layout,
            control,
            config.filter,
            publish_interval_ms=_PUBLISH_MS,
            file_interval_ms=config.groups.offsets_interval_ms,
        )
        self._faults: dict[Part, StoreError] = {}
        self._last_errors: dict[Part, StoreError] = {}
        self._retry_ms: dict[Part, int] = {"topics": now_ms, "offsets": now_ms}  # no attempt before this time
        self._mend_ms = now_ms
        self._unwritten: set[str] = set()  # files of the groups that wait for a working disk
        self._offsets_pace = Pace(config.groups.offsets_interval_ms)
        self._operations: dict[str, Callable[[Header, int], Answer]] = {
            "topic.route": self._topic_route,
            "topic.create": self._topic_create,
            "topic.list": self._topic_list,
            "topic.describe": self._topic_describe,
            "topic.delete": self._topic_delete,
            "group.join": self._group_join,
            "group.heartbeat": self._group_heartbeat,
            "group.leave": self._group_leave,
            "group.list": self._group_list,
            "group.describe": self._group_describe,
            "group.positions": self._group_positions,
            "offset.commit": self._offset_commit,
            "offset.fetch": self._offset_fetch,
        }

    def _begin_memory_topics(self) -> None:
        """Begin a new life of the node: the messages of memory topics are gone, and their queue offsets begin at 0
        again.

        So do the groups' offsets in them. A group that was at 500 would otherwise wait for message 500, or begin at the
        end, past messages that it has never seen. No message can be sent to these topics before this process is ready.
        """
        for (topic, group), queues in sorted(self.offsets.table.offsets.items()):
            if self._is_memory(topic):
                self.offsets.stage(group, [(topic, queue, 0) for queue in queues], reset=True)
        try:
            self.offsets.sync()
        except StoreError as error:
            # Probably a full disk. Readers send such a consumer to the first message of the queue.
            self._log.error("group offsets in memory topics could not be set to 0", error=str(error))

    # ------------------------------------------------------------ turns

    def handle(self, header: Header, now_ms: int) -> Answer:
        """Handle one request. Raises ProtocolError for the answer, StoreError when the disk refused."""
        operation = self._operations.get(header["op"])
        if operation is None:
            raise ProtocolError("UNKNOWN_OP", f"the coordinator has no operation {header['op']!r}")
        return operation(header, now_ms)

    def end_turn(self, now_ms: int) -> TopicNews | None:
        """Write the staged changes of the turn. Returns the news for the other workers. Never raises StoreError.

        Afterwards :meth:`fault` names the parts that failed, until the next call.
        """
        names = self._write_deletions(now_ms)
        if self.offsets.failed and now_ms >= self._retry_ms["offsets"]:
            self._recover_offsets(now_ms)
        for name in names:
            self.offsets.stage_drop(name)
        deleted: dict[str, int] = {}
        if self._sync_offsets(now_ms) and names:
            try:
                deleted = self.topics.deletions.finish(names)
            except StoreError as error:
                self._fail("topics", error, now_ms)
        elif names:
            self._fail("topics", self._faults["offsets"], now_ms)
        try:
            if "topics" in self._faults:
                self.topics.take_back()
            self.topics.write()
        except StoreError as error:
            self._fail("topics", error, now_ms)
        self._write_groups(now_ms)
        self.subscriptions.write(now_ms)
        return self._news(deleted)

    def _write_deletions(self, now_ms: int) -> list[str]:
        """Write tombstones and the topics file for confirmed deletions. Returns the names whose steps 3 and 4 are done."""
        deletions = self.topics.deletions
        names = deletions.heard(self._heard())
        if not names and not deletions.is_doubtful:
            return []
        if now_ms < self._retry_ms["topics"]:
            # The last attempt failed a moment ago: requests that depend on the files are refused for the same reason.
            self._faults["topics"] = self._last_errors["topics"]
            return []
        try:
            if deletions.is_doubtful:
                deletions.settle()
            if names:
                # Read the log's end after the other processes have confirmed that they append no more.
                self.topics.write_deletions(names, self._control.get(Word.WRITTEN))
        except StoreError as error:
            self._fail("topics", error, now_ms)
            return []
        self._last_errors.pop("topics", None)
        return names

    def _heard(self) -> int:
        """The TOPICS_VERSION that all processes that take sends have confirmed."""
        writer = self._control.get(Word.WRITER_TOPICS)
        return min(writer, self._control.get(Word.MEMORY_TOPICS)) if self._memory_enabled else writer

    def is_ending(self, topic: tuple[str, int]) -> bool:
        """Whether the deletion of this topic and incarnation is decided and not finished."""
        return self.topics.deletions.is_ending(*topic)

    @property
    def awaits_writer(self) -> bool:
        """True while a deletion waits for the processes that take sends."""
        return bool(self.topics.deletions.endings)

    def tell(self, version: int) -> None:
        """Other processes learn of all topic changes so far with this TOPICS_VERSION."""
        self.topics.deletions.tell(version)
        self.topics.next_version = version + 1

    def _sync_offsets(self, now_ms: int) -> bool:
        """Sync the staged changes. False when the disk refuses."""
        failed_before = self.offsets.failed
        try:
            self.offsets.sync()
        except StoreError as error:
            if failed_before:
                # This is no new failure: it must neither delay the next attempt nor fill the log.
                self._faults["offsets"] = self._last_errors.get("offsets", error)
            else:
                self._fail("offsets", error, now_ms)
            return False
        return True

    def fault(self, part: Part | None) -> StoreError | None:
        """Why the last turn's writes of ``part`` failed, or None."""
        return None if part is None else self._faults.get(part)

    def forget_faults(self) -> None:
        """Begin a new turn. Call it once the answers of the last one are made."""
        self._faults.clear()

    def tick(self, now_ms: int, *, expire_ms: int | None) -> None:
        """Do the work that is due by time: ended sessions, the snapshot of the offsets.

        ``expire_ms``: sessions that were over by then end. None: no session ends, because heartbeats that were sent
        while this process did not run may still be waiting.
        """
        for group, member in self.groups.expire(expire_ms) if expire_ms is not None else ():
            self._log.info("session ended", group=group, member=member)
        for group in self.groups.ended:
            if self.groups.membership(group) is None:
                self.subscriptions.group_ended(group)
        self.groups.ended.clear()
        self.subscriptions.look()

    def write_snapshots(self, now_ms: int) -> None:
        """Write ``consumerOffset.json`` and ``topics.json`` if it is time. Call it with nothing staged, between two
        turns.
        """
        if not self.offsets.failed and self._offsets_pace.is_due(now_ms):
            with self._offsets_pace:
                self.snapshot()
        try:
            self.topics.snapshot(now_ms)
        except StoreError as error:
            self._fail("topics", error, now_ms)
            self._log.error("topics.json could not be written", error=str(error))
            self._faults.pop("topics", None)

    def mend(self, now_ms: int) -> None:
        """Begin a turn: try again the files of a disk that failed."""
        # This has a clock of its own: requests that are refused meanwhile must not delay it.
        if self.topics.failed and now_ms >= self._mend_ms:
            self._mend_ms = now_ms + RETRY_MS
            try:
                self.topics.recover()
                self._last_errors.pop("topics", None)
                self._retry_ms["topics"] = now_ms  # deletions that waited for it go on at once
                self._log.info("topics can be changed again")
            except StoreError as error:
                self._fail("topics", error, now_ms)
                self._faults.pop("topics", None)

    def snapshot(self) -> None:
        """Write ``consumerOffset.json`` if needed. A failure is logged; the journal has everything."""
        try:
            self.offsets.snapshot()
        except StoreError as error:
            self._log.error("consumerOffset.json could not be written", error=str(error))

    def next_ms(self) -> int | None:
        """When work is due without a request; None: not soon."""
        times = [self.groups.next_expiry_ms(), self.groups.next_write_ms(), self.subscriptions.next_write_ms()]
        if self.offsets.dirty:
            times.append(self._offsets_pace.next_ms)
        times.append(self._mend_ms if self.topics.failed else self.topics.next_snapshot_ms())
        if self.offsets.failed:
            times.append(self._retry_ms["offsets"])
        if self.topics.deletions.is_doubtful or self.topics.deletions.heard(self._heard()):
            times.append(self._retry_ms["topics"])
        return min((one for one in times if one is not None), default=None)

    def close(self) -> None:
        """Leave the files as RocketMQ and the next coordinator expect them."""
        if self.offsets.failed:
            self._recover_offsets(0)
        else:
            self.snapshot()
        self._write_groups(0, at_once=True)
        self.subscriptions.write(at_once=True)
        try:
            self.topics.close()
        except StoreError as error:
            self._log.error("topics.json could not be written", error=str(error))
        self.groups.close()
        self.offsets.close()
        self._ends.close()

    def _recover_offsets(self, now_ms: int) -> None:
        try:
            self.offsets.recover()
            self._last_errors.pop("offsets", None)
            self._log.info("offsets can be committed again")
        except StoreError as error:
            self._fail("offsets", error, now_ms)

    def _write_groups(self, now_ms: int, *, at_once: bool = False) -> None:
        write_names = partial(self.groups.write, now_ms, at_once=at_once)
        for name, write in (("names", write_names), ("members", self.groups.write_members)):
            try:
                write()
                self._unwritten.discard(name)
            except StoreError as error:
                # No answer depends on these files; both are written in a later turn.
                if name not in self._unwritten:
                    self._log.error("groups could not be written", error=str(error))
                self._unwritten.add(name)

    def _fail(self, part: Part, error: StoreError, now_ms: int) -> None:
        last = self._last_errors.get(part)
        if last is None or str(last) != str(error):
            self._log.error(f"{part} could not be written", error=str(error))
        self._faults[part] = self._last_errors[part] = error
        self._retry_ms[part] = now_ms + RETRY_MS

    def _news(self, deleted: dict[str, int]) -> TopicNews | None:
        changed = list(dict.fromkeys(self.topics.changed))
        self.topics.changed.clear()
        ending = self.topics.deletions.untold()
        if not changed and not ending and not deleted:
            return None
        touched = [*changed, *(name for name, _ in ending), *deleted]
        self.groups.topics_changed(touched)
        self._listing.topics_changed(touched)
        for name in touched:
            self._ends.forget(name)
        known, tombstones = self.topics.table.topics, self.topics.deletions.tombstones
        return TopicNews(
            {name: topics.describe(known[name]) for name in changed if name in known},
            ending,
            [(name, tombstones[name], incarnation) for name, incarnation in deleted.items()],
        )

    # ------------------------------------------------------------ topics

    def _topic_route(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        topic = self.topics.route(name, create=requests.flag(header, "create"))
        return Answer(lambda: {"topic": topics.describe(topic)}, self._needed(name))

    def _needed(self, name: str) -> Part | None:
        return "topics" if self.topics.is_staged(name) else None

    def _topic_create(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        perm = requests.optional_integer(header, "perm", 0, 7)
        attributes = requests.mapping(header, "attributes")
        if attributes and attributes.get(STORAGE_TYPE) == STORAGE_MEMORY and not self._memory_enabled:
            raise ProtocolError("INVALID_PARAMETER", "this node serves no memory topics: memory.enable is off")
        created = self.topics.create(
            name,
            requests.optional_integer(header, "queues", 1, topic_rules.MAX_QUEUES),
            perm=6 if perm is None else perm,
            attributes=attributes,
            update=requests.flag(header, "update"),
            incarnation=requests.optional_integer(header, "incarnation", 0, _MAX_INCARNATION),
        )
        topic = self.topics.get(name)
        return Answer(lambda: {"created": created, "topic": topics.describe(topic)}, self._needed(name))

    def _topic_list(self, header: Header, now_ms: int) -> Answer:
        after = requests.optional_text(header, "after") or ""
        limit = requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.topics(after, limit))

    def _topic_describe(self, header: Header, now_ms: int) -> Answer:
        topic = self.topics.get(requests.text(header, "topic"))
        groups = sorted(self.offsets.table.groups_of(topic.name))
        return Answer(lambda: {"topic": {**topics.describe(topic), "groups": groups}}, self._needed(topic.name))

    def _topic_delete(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        incarnation = requests.optional_integer(header, "incarnation", 0, _MAX_INCARNATION)
        deletions = self.topics.deletions
        deletions.prune(self._control.get(Word.MIN_OFFSET), self._control.dispatcher(0, DispatcherWord.TOPICS))
        try:
            ending = self.topics.delete(name, incarnation)
        except StoreError as error:
            # Writing earlier staged changes may have failed: their requests must be refused too.
            self._fail("topics", error, now_ms)
            raise
        if ending is None:
            return Answer(lambda: {"deleted": name, "tombstone": deletions.tombstones.get(name)})
        return Answer(
            lambda: {"deleted": name, "incarnation": ending, "tombstone": deletions.tombstones.get(name)},
            "topics",
            (name, ending),
        )

    # ------------------------------------------------------------ groups

    def _group_join(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        wanted = requests.names(header, "topics")
        self.groups.check_topics(len(wanted))
        for name in wanted:
            topic_rules.check_name(name)
        timeout_ms = requests.optional_integer(
            header, "session_timeout_ms", _SESSION_TIMEOUT_MIN_MS, _SESSION_TIMEOUT_MAX_MS
        )
        timeout_ms = self._config.session_timeout_ms if timeout_ms is None else timeout_ms
        owned = requests.queues(header, "owned", optional=True)
        generation = requests.optional_integer(header, "generation", 0, _MAX_GENERATION) or 0
        kind, expression = requests.selector(header, "filter")
        instance = requests.optional_text(header, "instance") or ""
        view = self.groups.join(group, member, wanted, owned, timeout_ms, now_ms, generation, instance)
        self.subscriptions.join(group, wanted, expression if kind == SQL else None)
        self._log.info("member joined", group=group, member=member, topics=len(wanted))
        missing = sorted(name for name in wanted if not self.topics.exists(name))
        return Answer(lambda: {**self._view(view, timeout_ms), "kept": view.kept, "missing": missing})

    def _group_heartbeat(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        generation = requests.integer(header, "generation", 0, _MAX_GENERATION)
        instance = requests.optional_text(header, "instance") or ""
        view = self.groups.heartbeat(group, member, generation, requests.queues(header, "owned"), now_ms, instance)
        membership = self.groups.membership(group)
        timeout_ms = membership.member_of(member).session_timeout_ms if membership else self._config.session_timeout_ms
        return Answer(lambda: self._view(view, timeout_ms))

    def _view(self, view: View, session_timeout_ms: int) -> Fields:
        # Three heartbeats fit into a session, whatever the member chose, so that one lost heartbeat ends nothing.
        interval_ms = max(_MIN_HEARTBEAT_MS, min(self._config.heartbeat_interval_ms, session_timeout_ms // 3))
        soon_ms = max(_MIN_HEARTBEAT_MS, interval_ms // _REBALANCE_SPEEDUP)
        return {
            "generation": view.generation,
            "assigned": view.assigned,
            "incarnations": self.topics.incarnations({topic for topic, _ in view.assigned}),
            "revoke": view.revoke,
            "heartbeat_interval_ms": interval_ms,
            "next_heartbeat_ms": interval_ms if view.settled else soon_ms,
            "session_timeout_ms": session_timeout_ms,
        }

    def _group_leave(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        self.groups.leave(group, member, requests.optional_text(header, "instance") or "")
        self._log.info("member left", group=group, member=member)
        return Answer(dict)

    def _group_list(self, header: Header, now_ms: int) -> Answer:
        after, limit = requests.cursor(header, str, str), requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.groups(after, limit))

    def _group_positions(self, header: Header, now_ms: int) -> Answer:
        after, limit = requests.cursor(header, str, str, int), requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.positions(after, limit))

    def _group_describe(self, header: Header, now_ms: int) -> Answer:
        name, limit = requests.text(header, "group"), requests.limit(header, MAX_ENTRIES)
        after = requests.part_cursor(header)
        described = self._listing.describe_group(name, after, limit, now_ms)
        return Answer(lambda: described)

    # ------------------------------------------------------------ offsets

    def _offset_commit(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.optional_text(header, "member")
        generation = requests.optional_integer(header, "generation", 0, _MAX_GENERATION)
        offsets = requests.offsets(header, "offsets")
        reset, begin, partial_ = (requests.flag(header, name) for name in ("reset", "begin", "partial"))
        incarnations = requests.incarnations(header, "incarnations")
        known = requests.known_offsets(header, "known", len(offsets))
        self.groups.check_member(group, member, requests.optional_text(header, "instance") or "")
        wanted: list[tuple[str, int, int]] = []
        refused: list[tuple[str, int, str, str]] = []
        # All entries are checked before any is staged: a commit happens as a whole or not at all, except with
        # ``partial``.
        for number, (topic, queue, offset) in enumerate(offsets):
            try:
                # A commit for a deleted topic says nothing about the next topic of the same name.
                self.topics.check_incarnation(topic, incarnations.get(topic))
                self.topics.check_queue(topic, queue)
                if not begin or member is None:  # any member of the group may set where it begins
                    self.groups.check_owner(group, member, (topic, queue), generation)
                if known is not None:
                    self._check_known(group, topic, queue, known[number])
            except ProtocolError as error:
                if not partial_ or error.code == "UNKNOWN_MEMBER":
                    raise
                refused.append((topic, queue, error.code, error.message))
                continue
            wanted.append((topic, queue, self._within(topic, queue, offset)))
        self.groups.use(group)
        # Offsets may go back in three cases: when a reset asks for it; in memory topics, which begin again with the
        # node, so that a consumer that lived on is right; and when the committed offset lies behind the queue's end.
        free = [one for one in wanted if reset or self._is_memory(one[0]) or self._is_ahead(group, *one[:2])]
        stored = self.offsets.stage(group, wanted, lower=[one[:2] for one in free], only_new=begin)
        return Answer(lambda: {"stored": stored, **({"refused": refused} if partial_ else {})}, "offsets")

    def _check_known(self, group: str, topic: str, queue: int, known: int) -> None:
        """Raise FENCED when the group's offset lies below the one that the member knew: a person has reset it since,
        and messages that the member read after that must not undo the reset.
        """
        stored = self.offsets.staged_offset(group, topic, queue)
        if stored < known and not self._is_memory(topic):
            raise ProtocolError(
                "FENCED",
                f"queue {queue} of topic {topic} in group {group}: its offset was reset from {known} to {max(stored, 0)}",
            )

    def _within(self, name: str, queue: int, offset: int) -> int:
        """``offset``, or the queue's end when ``offset`` lies behind it."""
        topic = self.topics.get(name)
        end = self._ends.end(topic, queue, offset, self.topics.deletions.tombstones.get(name, 0))
        return offset if end is None else min(offset, end)

    def _is_ahead(self, group: str, topic: str, queue: int) -> bool:
        """Whether the committed offset lies behind the queue's end."""
        stored = self.offsets.staged_offset(group, topic, queue)
        return stored > 0 and self._within(topic, queue, stored) < stored

    def _is_memory(self, name: str) -> bool:
        topic = self.topics.table.topics.get(name)
        return topic is not None and topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY

    def _offset_fetch(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        check_name(group)
        queues = requests.queues(header, "queues")
        # Read after the turn's sync: a client that sends a commit and a fetch without waiting gets the committed
        # offset.
        return Answer(
            lambda: {
                "offsets": [(topic, queue, self.offsets.fetch(group, topic, queue)) for topic, queue in queues],
                "incarnations": self.topics.incarnations({topic for topic, _ in queues}),
            }
        )
