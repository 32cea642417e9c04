"""The coordinator's operations: headers in, fields of answers out, no sockets.

Requests are handled in turns. :meth:`Service.handle` changes what is in memory and stages what must be durable;
:meth:`Service.end_turn` writes it, one sync for all group commits of the turn, and only then the answers are made and
sent. So many clients share the cost of a sync, and nobody hears of anything that a crash could still take back.

A failed write refuses exactly the requests that depended on it (``SERVICE_NOT_AVAILABLE``); everything else goes on.
What must be finished (a decided deletion, a journal that failed) is tried again every RETRY_MS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, Word
from commitmq.coordination import requests, topics
from commitmq.coordination.groups import Groups, check_name
from commitmq.coordination.membership import View
from commitmq.coordination.offsets import GroupOffsets
from commitmq.coordination.requests import Header
from commitmq.coordination.subscriptions import SQL, Subscriptions
from commitmq.coordination.topics import Topics
from commitmq.errors import ProtocolError, StoreError
from commitmq.log import get_log
from commitmq.node_files import node_life
from commitmq.store.json_config import sync_folder
from commitmq.store.layout import StoreLayout
from commitmq.store.memory_files import survives
from commitmq.store.shared_memory import memory_folder
from commitmq.store.topic_config import STORAGE_MEMORY, STORAGE_TYPE

RETRY_MS = 500
_SESSION_TIMEOUT_MIN_MS = 200
_SESSION_TIMEOUT_MAX_MS = 30 * 60_000
_MIN_HEARTBEAT_MS = 50
# While queues change hands members come this much more often, so that a rebalance costs little over one interval.
_REBALANCE_SPEEDUP = 10
_MAX_GENERATION = (1 << 63) - 1

Part = Literal["topics", "offsets"]
Fields = dict[str, Any]


class Answer(NamedTuple):
    """A positive answer; ``fields`` is called after the turn's writes, unless the part it ``needs`` failed."""

    fields: Callable[[], Fields]
    needs: Part | None = None


class TopicNews(NamedTuple):
    """What other workers must hear: changed topics as the protocol shows them, deleted ones and their tombstones."""

    topics: dict[str, Fields]
    deleted: list[tuple[str, int]]


class Service:
    """One a coordinator."""

    def __init__(self, layout: StoreLayout, config: NodeConfig, control: ControlBlock, now_ms: int) -> None:
        """Load the store's files and finish what a crash interrupted. Raises StoreError."""
        self._log = get_log("coordinator")
        self._config = config.groups
        self._memory_enabled = config.memory.enable
        self._control = control
        layout.own.mkdir(parents=True, exist_ok=True)
        layout.config.mkdir(parents=True, exist_ok=True)
        for folder in (layout.own, layout.config):
            # What a predecessor renamed and did not live to sync is answered from now on as if it were durable.
            sync_folder(folder)
        self.offsets = GroupOffsets.open(layout)
        self.topics = Topics.load(
            layout,
            auto_create=config.topics.auto_create,
            default_queues=config.topics.default_queues,
            max_topics=config.topics.max_topics,
            lmq=config.consume_queue.enable_lmq,
        )
        if not survives(memory_folder(layout, config.memory.folder), node_life(layout)):
            self._begin_memory_topics()
        self.groups = Groups.load(
            layout,
            self.topics.readable_queues,
            auto_create=config.groups.auto_create,
            max_groups=config.groups.max_groups,
            max_members=config.groups.max_members_per_group,
            first_generation=time.time_ns() // 1_000_000,
            now_ms=now_ms,
        )
        self.subscriptions = Subscriptions.load(layout, control)
        self._faults: dict[Part, StoreError] = {}
        self._last_errors: dict[Part, StoreError] = {}
        self._retry_ms: dict[Part, int] = {"topics": now_ms, "offsets": now_ms}  # no attempt before
        self._unwritten: set[str] = set()  # what of the groups' files waits for a disk that works
        self._next_snapshot_ms = now_ms + config.groups.offsets_interval_ms
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
            "offset.commit": self._offset_commit,
            "offset.fetch": self._offset_fetch,
        }

    def _begin_memory_topics(self) -> None:
        """A new life of the node: what memory topics held is gone, and their queue offsets begin at 0 again.

        So do the groups' offsets in them. A group that was at 500 would otherwise wait for message 500, or begin at the
        end, past messages that it has never seen. Nothing can be sent to these topics before this process is ready.
        """
        for (topic, group), queues in sorted(self.offsets.table.offsets.items()):
            if self._is_memory(topic):
                self.offsets.stage(group, [(topic, queue, 0) for queue in queues], reset=True)
        try:
            self.offsets.sync()
        except StoreError as error:
            # A full disk, probably: readers send such a consumer to the first message there is.
            self._log.error("group offsets in memory topics could not be set to 0", error=str(error))

    # ------------------------------------------------------------ turns

    def handle(self, header: Header, now_ms: int) -> Answer:
        """One request. Raises ProtocolError for the answer, StoreError when the disk refused."""
        operation = self._operations.get(header["op"])
        if operation is None:
            raise ProtocolError("UNKNOWN_OP", f"the coordinator has no operation {header['op']!r}")
        return operation(header, now_ms)

    def end_turn(self, now_ms: int) -> TopicNews | None:
        """Write what the turn staged; returns what the other workers must hear. Never raises StoreError.

        Afterwards :meth:`fault` says which parts failed, until the next call.
        """
        deleted = self._write_deletions(now_ms)
        if self.offsets.failed and now_ms >= self._retry_ms["offsets"]:
            self._recover_offsets(now_ms)
        for name in deleted:
            self.offsets.stage_drop(name)
        if self._sync_offsets(now_ms) and deleted:
            try:
                self.topics.finish_deletions()
            except StoreError as error:
                self._fail("topics", error, now_ms)
                deleted = []
        elif deleted:
            self._fail("topics", self._faults["offsets"], now_ms)
            deleted = []
        try:
            if "topics" in self._faults:
                self.topics.take_back()
            self.topics.write()
        except StoreError as error:
            self._fail("topics", error, now_ms)
        self._write_groups()
        self.subscriptions.write()
        return self._news(deleted)

    def _write_deletions(self, now_ms: int) -> list[str]:
        """Tombstones and the topics file for what is being deleted; returns the names that got that far."""
        if not self.topics.deleting:
            return []
        if now_ms < self._retry_ms["topics"]:
            # The last attempt failed a moment ago: whatever depends on the files is refused for the same reason.
            self._faults["topics"] = self._last_errors["topics"]
            return []
        try:
            names = self.topics.write_deletions(self._control.get(Word.WRITTEN), self._control.get(Word.MIN_OFFSET))
        except StoreError as error:
            self._fail("topics", error, now_ms)
            return []
        self._last_errors.pop("topics", None)
        return names

    def _sync_offsets(self, now_ms: int) -> bool:
        """Sync what is staged; False when that is refused."""
        failed_before = self.offsets.failed
        try:
            self.offsets.sync()
        except StoreError as error:
            if failed_before:
                # No new failure: it must neither put off the next attempt nor fill the log.
                self._faults["offsets"] = self._last_errors.get("offsets", error)
            else:
                self._fail("offsets", error, now_ms)
            return False
        return True

    def fault(self, part: Part | None) -> StoreError | None:
        """Why the last turn's writes of ``part`` failed, or None."""
        return None if part is None else self._faults.get(part)

    def forget_faults(self) -> None:
        """Begin a new turn: to be called once the answers of the last one are made."""
        self._faults.clear()

    def tick(self, now_ms: int, *, expire: bool = True) -> None:
        """What time brings: ended sessions, the snapshot of the offsets. Call it when no request waits.

        Without ``expire`` no session ends: heartbeats may wait that were sent while this process did not run.
        """
        self.subscriptions.look(lambda name: self.groups.membership(name) is not None)
        for group, member in self.groups.expire(now_ms) if expire else ():
            self._log.info("session ended", group=group, member=member)
        if now_ms >= self._next_snapshot_ms:
            self._next_snapshot_ms = now_ms + self._config.offsets_interval_ms
            if not self.offsets.failed:
                self.snapshot()

    def snapshot(self) -> None:
        """Write ``consumerOffset.json`` if needed; a failure is logged, the journal has everything."""
        try:
            self.offsets.snapshot()
        except StoreError as error:
            self._log.error("consumerOffset.json could not be written", error=str(error))

    def next_ms(self) -> int | None:
        """When something has to be done without a request; None: not soon."""
        times = [self.groups.next_expiry_ms()]
        if self.offsets.dirty:
            times.append(self._next_snapshot_ms)
        if self.offsets.failed:
            times.append(self._retry_ms["offsets"])
        if self.topics.deleting:
            times.append(self._retry_ms["topics"])
        return min((one for one in times if one is not None), default=None)

    def close(self) -> None:
        """Leave the files as RocketMQ and the next coordinator want them."""
        if self.offsets.failed:
            self._recover_offsets(0)
        else:
            self.snapshot()
        self._write_groups()
        self.subscriptions.write()
        self.offsets.close()

    def _recover_offsets(self, now_ms: int) -> None:
        try:
            self.offsets.recover()
            self._last_errors.pop("offsets", None)
            self._log.info("offsets can be committed again")
        except StoreError as error:
            self._fail("offsets", error, now_ms)

    def _write_groups(self) -> None:
        for write in (self.groups.write, self.groups.write_members):
            try:
                write()
                self._unwritten.discard(write.__name__)
            except StoreError as error:
                # Neither decides about an answer; both are written with the next turn.
                if write.__name__ not in self._unwritten:
                    self._log.error("groups could not be written", error=str(error))
                self._unwritten.add(write.__name__)

    def _fail(self, part: Part, error: StoreError, now_ms: int) -> None:
        last = self._last_errors.get(part)
        if last is None or str(last) != str(error):
            self._log.error(f"{part} could not be written", error=str(error))
        self._faults[part] = self._last_errors[part] = error
        self._retry_ms[part] = now_ms + RETRY_MS

    def _news(self, deleted: list[str]) -> TopicNews | None:
        changed = list(dict.fromkeys(self.topics.changed))
        self.topics.changed.clear()
        if not changed and not deleted:
            return None
        self.groups.topics_changed([*changed, *deleted])
        known = self.topics.table.topics
        return TopicNews(
            {name: topics.describe(known[name]) for name in changed if name in known},
            [(name, self.topics.tombstones[name]) for name in deleted],
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
            requests.optional_integer(header, "queues", 1, topics.MAX_QUEUES),
            perm=6 if perm is None else perm,
            attributes=attributes,
            update=requests.flag(header, "update"),
        )
        topic = self.topics.get(name)
        return Answer(lambda: {"created": created, "topic": topics.describe(topic)}, self._needed(name))

    def _topic_list(self, header: Header, now_ms: int) -> Answer:
        return Answer(lambda: {"topics": [topics.describe(self.topics.get(name)) for name in self.topics.names()]})

    def _topic_describe(self, header: Header, now_ms: int) -> Answer:
        topic = self.topics.get(requests.text(header, "topic"))
        groups = sorted({group for name, group in self.offsets.table.offsets if name == topic.name})
        return Answer(lambda: {"topic": {**topics.describe(topic), "groups": groups}}, self._needed(topic.name))

    def _topic_delete(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        try:
            self.topics.delete(name, self._control.get(Word.WRITTEN))
        except StoreError as error:
            # Writing what was staged before it may have failed: those requests must hear of it too.
            self._fail("topics", error, now_ms)
            raise
        return Answer(lambda: {"deleted": name, "tombstone": self.topics.tombstones.get(name)}, "topics")

    # ------------------------------------------------------------ groups

    def _group_join(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        wanted = requests.names(header, "topics")
        for name in wanted:
            topics.check_name(name)
        timeout_ms = requests.optional_integer(
            header, "session_timeout_ms", _SESSION_TIMEOUT_MIN_MS, _SESSION_TIMEOUT_MAX_MS
        )
        timeout_ms = self._config.session_timeout_ms if timeout_ms is None else timeout_ms
        owned = requests.queues(header, "owned", optional=True)
        generation = requests.optional_integer(header, "generation", 0, _MAX_GENERATION) or 0
        kind, expression = requests.selector(header, "filter")
        view = self.groups.join(group, member, wanted, owned, timeout_ms, now_ms, generation)
        self.subscriptions.join(group, wanted, expression if kind == SQL else None)
        self._log.info("member joined", group=group, member=member, topics=len(wanted))
        return Answer(lambda: self._view(view, timeout_ms))

    def _group_heartbeat(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        generation = requests.integer(header, "generation", 0, _MAX_GENERATION)
        view = self.groups.heartbeat(group, member, generation, requests.queues(header, "owned"), now_ms)
        membership = self.groups.membership(group)
        timeout_ms = membership.member(member).session_timeout_ms if membership else self._config.session_timeout_ms
        return Answer(lambda: self._view(view, timeout_ms))

    def _view(self, view: View, session_timeout_ms: int) -> Fields:
        # Three heartbeats fit a session, whatever the member chose, so that one lost one ends nothing.
        interval_ms = max(_MIN_HEARTBEAT_MS, min(self._config.heartbeat_interval_ms, session_timeout_ms // 3))
        soon_ms = max(_MIN_HEARTBEAT_MS, interval_ms // _REBALANCE_SPEEDUP)
        return {
            "generation": view.generation,
            "assigned": view.assigned,
            "revoke": view.revoke,
            "heartbeat_interval_ms": interval_ms,
            "next_heartbeat_ms": interval_ms if view.settled else soon_ms,
            "session_timeout_ms": session_timeout_ms,
        }

    def _group_leave(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        self.groups.leave(group, member)
        self._log.info("member left", group=group, member=member)
        return Answer(dict)

    def _group_list(self, header: Header, now_ms: int) -> Answer:
        committed: dict[str, set[str]] = {}
        for topic, group in self.offsets.table.offsets:
            committed.setdefault(group, set()).add(topic)
        rows = []
        for name in sorted({*self.groups.names(), *committed}):
            membership = self.groups.membership(name)
            members = len(membership.members) if membership else 0
            rows.append({"name": name, "members": members, "topics": sorted(committed.get(name, ()))})
        return Answer(lambda: {"groups": rows})

    def _group_describe(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "group")
        check_name(name)
        offsets = sorted(self.offsets.table.of_group(name))
        if not self.groups.exists(name) and not offsets:
            raise ProtocolError("GROUP_NOT_EXIST", f"there is no group {name!r}")
        membership = self.groups.membership(name)
        members = [] if membership is None else [membership.members[one] for one in sorted(membership.members)]
        holders = {} if membership is None else membership.holders
        described = {
            "name": name,
            "state": "empty" if not members else "stable" if membership and membership.settled else "rebalancing",
            "generation": membership.generation if membership else None,
            "members": [
                {
                    "member": one.name,
                    "topics": sorted(one.topics),
                    "queues": sorted(one.held),
                    "session_timeout_ms": one.session_timeout_ms,
                    "heard_ms_ago": now_ms - one.heard_ms,
                }
                for one in members
            ],
            "queues": [[topic, queue, holder] for (topic, queue), holder in sorted(holders.items())],
            "offsets": offsets,
        }
        return Answer(lambda: {"group": described})

    # ------------------------------------------------------------ offsets

    def _offset_commit(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.optional_text(header, "member")
        requests.optional_integer(header, "generation", 0, _MAX_GENERATION)
        offsets = requests.offsets(header, "offsets")
        reset = requests.flag(header, "reset")
        # All entries are checked before any is staged: a commit happens as a whole or not at all.
        for topic, queue, _ in offsets:
            self.topics.check_queue(topic, queue)
            self.groups.check_owner(group, member, (topic, queue))
        self.groups.use(group)
        # A memory topic begins anew with the node, so a consumer that lived on goes back in it, and is right to.
        free = [one for one in offsets if self._is_memory(one[0])]
        if free and not reset:
            firm = [one for one in offsets if one not in free]
            stored = self.offsets.stage(group, free, reset=True) + (self.offsets.stage(group, firm) if firm else [])
        else:
            stored = self.offsets.stage(group, offsets, reset=reset)
        return Answer(lambda: {"stored": stored}, "offsets")

    def _is_memory(self, name: str) -> bool:
        topic = self.topics.table.topics.get(name)
        return topic is not None and topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY

    def _offset_fetch(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        check_name(group)
        queues = requests.queues(header, "queues")
        # Read after the turn's sync: whoever sends a commit and a fetch without waiting gets what it committed.
        return Answer(
            lambda: {"offsets": [(topic, queue, self.offsets.fetch(group, topic, queue)) for topic, queue in queues]}
        )
