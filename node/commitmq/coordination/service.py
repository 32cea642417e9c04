"""The coordinator without its sockets: turns of requests, and the files that they change.

Requests are handled in turns. :meth:`Service.handle` changes the state in memory and stages the durable changes.
:meth:`Service.end_turn` writes them, with one sync for all group commits of the turn. Only then the answers are made
and sent. This many clients share the cost of a sync, and no client learns of a change that a crash could still take
back.

A failed write refuses exactly the requests that depended on it (``SERVICE_NOT_AVAILABLE``); everything else continues.
Work that must be finished (a decided deletion, a journal that failed) is tried again every RETRY_MS.

What a request changes, for the audit log: its resource, what was there before, and what is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, Word
from commitmq.coordination.groups import GroupCoordinator, Pace
from commitmq.coordination.listing import Listing
from commitmq.coordination.makers import GROUP, TOPIC, Makers
from commitmq.coordination.offsets import EndOffsets, GroupOffsets
from commitmq.coordination.operations import (
    BroadcastOperations,
    ClientOperations,
    GroupConfigOperations,
    GroupOperations,
    OffsetOperations,
    ShareOperations,
    TopicOperations,
)
from commitmq.coordination.requests import Answer, Fields, Header, Operations, Part
from commitmq.coordination.subscriptions import Subscriptions
from commitmq.coordination.topics import TopicManager, describe
from commitmq.errors import ProtocolError, StoreError
from commitmq.files.disk import sync_folder
from commitmq.files.disk_space import DiskRoom
from commitmq.format.constants import DEAD_LETTER_GROUP, DEAD_LETTER_PASSES, DLQ_PREFIX
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.memory_files import survives
from commitmq.store.shared_memory import memory_folder
from commitmq.supervision.node_files import node_life

_MOST_QUEUES: Final = 16
_OF_TOPICS: Final = ("queues", "read_queues", "write_queues", "perm", "attributes", "order", "sys_flag", "filter_type")


class Change(NamedTuple):
    """``before`` and ``after``: None where there is nothing. ``operation``: its name, if not the request's."""

    resource: str
    before: Any = None
    after: Any = None
    operation: str = ""


class OperatorChanges:
    """Knows the requests that change something by an operator's will; what consumers do as they run is none."""

    def __init__(self, topics: TopicManager, groups: GroupCoordinator, offsets: GroupOffsets) -> None:
        self._topics, self._groups, self._offsets = topics, groups, offsets
        self._kinds: dict[str, Callable[[Header, str], Change | None]] = {
            "topic.create": self._create,
            "topic.route": self._route,
            "topic.delete": self._delete,
            "group.config": self._config,
            "group.delete": self._group_delete,
            "group.forbid": self._forbid,
            "offset.commit": self._commit,
            "offset.forget": self._forget,
        }

    def of(self, header: Header) -> Change | None:
        """The change that ``header`` asks for; None for none, and for a request that its operation refuses."""
        found = self._kinds.get(header["op"])
        name = header.get("topic" if header["op"].startswith("topic.") else "group")
        return None if found is None or type(name) is not str else found(header, name)

    def _topic(self, name: str) -> dict[str, Any] | None:
        known = self._topics.table.topics.get(name)
        return None if known is None else describe(known)

    def _create(self, header: Header, name: str) -> Change:
        """A topic that is made or changed; or the beginning of a resend of dead letters, whose group is in ``resends``."""
        if name == DEAD_LETTER_PASSES and type(header.get("resends")) is str:
            return Change(f"Group:{header['resends']}", operation="dlq.resend")
        before, after = self._topic(name), {key: header[key] for key in _OF_TOPICS if key in header}
        if before is None or header.get("update") is not True:
            return Change(f"Topic:{name}", before, after)
        queues = after.pop("queues", None)
        both = {} if queues is None else {"read_queues": queues, "write_queues": queues}
        return Change(f"Topic:{name}", before, {**both, **after}, "topic.update")

    def _route(self, header: Header, name: str) -> Change | None:
        """A producer's first look at a topic makes it, where the node lets it."""
        makes = header.get("create") is True and self._topics.auto_creates and name not in self._topics.table.topics
        return Change(f"Topic:{name}") if makes else None

    def _delete(self, header: Header, name: str) -> Change:
        return Change(f"Topic:{name}", self._topic(name))

    def _config(self, header: Header, name: str) -> Change | None:
        if header.get("set") is None:
            return None
        known = self._groups.table.groups.get(name)
        return Change(f"Group:{name}", None if known is None else known.to_json(), header["set"])

    def _group_delete(self, header: Header, name: str) -> Change:
        return Change(f"Group:{name}")

    def _forbid(self, header: Header, name: str) -> Change | None:
        if "readable" not in header:
            return None
        return Change(f"Group:{name}", None, {"topic": header.get("topic"), "readable": header["readable"]})

    def _commit(self, header: Header, name: str) -> Change | None:
        """A commit by an operator: ``[topic, queue, offset]``, -1 before for none. ``from``: the group from before."""
        queues, source = header.get("offsets"), header.get("copied_from")
        by_person, resets = header.get("by_person") is True, header.get("reset") is True
        if header.get("member") is not None or type(queues) is not list:
            return None
        if not (resets or by_person or type(source) is str):
            return None
        shown = [one for one in queues[:_MOST_QUEUES] if _is_queue(one)]
        before = [[topic, queue, self._offsets.staged_offset(name, topic, queue)] for topic, queue, _ in shown]
        more = {"more": len(queues) - len(shown)} if len(queues) > len(shown) else {}
        if name == DEAD_LETTER_GROUP and by_person:
            name = shown[0][0].removeprefix(DLQ_PREFIX) if shown else name
            return Change(f"Group:{name}", {"offsets": before}, {"offsets": shown, **more}, "dlq.purge")
        operation = "group.reset" if resets else "group.clone" if type(source) is str else ""
        copied = {"from": source} if type(source) is str else {}
        return Change(f"Group:{name}", {"offsets": before}, {**copied, "offsets": shown, **more}, operation)

    def _forget(self, header: Header, name: str) -> Change:
        return Change(f"Group:{name}")


def _is_queue(one: Any) -> bool:
    return type(one) is list and [type(part) for part in one] == [str, int, int]


RETRY_MS = 500
READ_ONLY = frozenset(
    ("topic.list", "topic.describe", "group.list", "group.describe", "group.positions", "group.configs", "offset.fetch",
     "client.list")
)  # fmt: skip
"""Operations without an effect: nobody misses one whose client has gone."""
LISTS = frozenset(("topic.list", "group.list", "group.positions", "client.list"))
"""Operations whose answers are made at the end of a turn, so that equal requests of a turn get equal ones."""
_PUBLISH_MS = 100  # between two lists of SQL92 subscriptions for the other workers


def _never() -> None:
    """When a file is to be written that waits for nothing."""


class TopicNews(NamedTuple):
    """News for the other workers: changed topics as the protocol shows them; topics whose deletion was decided, with
    their incarnations; topics whose deletion is done, with their tombstones and incarnations.
    """

    topics: dict[str, Fields]
    ending: list[tuple[str, int]]
    deleted: list[tuple[str, int, int]]


class Service:
    """The state of one coordinator; modules ``topic_operations``, ``group_operations``, ``offset_operations`` change it."""

    def __init__(
        self, layout: StoreLayout, config: NodeConfig, control: ControlBlock, now_ms: int, room: DiskRoom
    ) -> None:
        """Load the store's files and finish work that a crash interrupted. Raises StoreError."""
        self._log, self._room = get_log("coordinator"), room
        self._memory_enabled = config.memory.enable
        self._control = control
        layout.own.mkdir(parents=True, exist_ok=True)
        layout.config.mkdir(parents=True, exist_ok=True)
        for folder in (layout.own, layout.config):
            # A predecessor may have renamed files and died before the sync. From now on answers treat them as durable.
            sync_folder(folder)
        self.offsets = GroupOffsets.open(layout)
        self.topics = TopicManager.load(
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
        self.groups = GroupCoordinator.load(
            layout,
            self.topics.readable_queues,
            config.groups,
            first_generation=time.time_ns() // 1_000_000,
            now_ms=now_ms,
            committed=self.offsets.table.groups(),
        )
        self.makers = Makers(
            layout.own / "makers.log",
            {TOPIC: lambda: self.topics.table.topics, GROUP: lambda: self.groups.table.groups},
        )
        self.topics.makes = self.groups.makes = self.makers.makes
        self.listing = Listing(self.topics, self.groups, self.offsets)
        self._ends = EndOffsets(layout, config, control)
        self.subscriptions = Subscriptions.load(
            layout,
            control,
            config.filter,
            publish_interval_ms=_PUBLISH_MS,
            file_interval_ms=config.groups.offsets_interval_ms,
        )
        self._faults: dict[Part, OSError | StoreError] = {}
        self._last_errors: dict[Part, OSError | StoreError] = {}
        self._retry_ms: dict[Part, int] = {"topics": now_ms, "offsets": now_ms}  # no attempt before this time
        self._mend_ms = now_ms
        self._reads = -1  # not told: a predecessor may have died before it did
        self._unwritten: set[str] = set()  # files of the groups that wait for a working disk
        self._offsets_pace = Pace(config.groups.offsets_interval_ms)
        topic_operations = TopicOperations(
            self.topics,
            self.offsets,
            self.listing,
            control,
            config=config,
            failed=lambda error, now_ms: self._fail("topics", error, now_ms),
        )
        self.changes = OperatorChanges(self.topics, self.groups, self.offsets)
        shares = ShareOperations(self.groups, self.topics, control)
        group_operations = GroupOperations(
            self.groups, self.topics, self.subscriptions, self.listing, shares, config.network.broker_name
        )
        group_operations.who = lambda: self.makers.who()
        offset_operations = OffsetOperations(self.offsets, self.groups, self.topics, self._ends, shares)
        self.clients = ClientOperations(self.groups)
        self._operations: Operations = {
            **topic_operations.operations,
            **group_operations.operations,
            **offset_operations.operations,
            **shares.operations,
            **BroadcastOperations(self.groups, config.network.broker_name).operations,
            **GroupConfigOperations(self.groups, shares).operations,
            **self.clients.operations,
        }

    def configure(self, config: NodeConfig) -> None:
        """Take the live settings of ``config``. What there is already stays, also above a new limit."""
        topics = config.topics
        self.topics.configure(
            auto_create=topics.auto_create, default_queues=topics.default_queues, max_topics=topics.max_topics
        )
        self.groups.config = config.groups

    def _begin_memory_topics(self) -> None:
        """Begin a new life of the node: the messages of memory topics are gone, and their queue offsets begin at 0
        again.

        So do the groups' offsets in them. A group that was at 500 would otherwise wait for message 500, or begin at the
        end, past messages that it has never seen. No message can be sent to these topics before this process is ready.
        """
        for (topic, group), queues in sorted(self.offsets.table.offsets.items()):
            if self.topics.is_memory(topic):
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
            is_staged = self.topics.has_staged
            self.topics.write()
            if is_staged and "topics" not in self._faults:
                self._recovered("topics")
        except StoreError as error:
            self._fail("topics", error, now_ms)
        self._write_groups(now_ms)
        if self._reads != self.groups.table.reads:
            self._reads = self.groups.table.reads
            self._control.put(Word.GROUP_READS, self._control.get(Word.GROUP_READS) + 1)
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
        self._recovered("topics")
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
        failed_before, is_staged = self.offsets.failed, self.offsets.staged
        try:
            self.offsets.sync()
        except StoreError as error:
            if failed_before:
                # This is no new failure: it must neither delay the next attempt nor fill the log.
                self._faults["offsets"] = self._last_errors.get("offsets", error)
            else:
                self._fail("offsets", error, now_ms)
            return False
        if is_staged:
            self._recovered("offsets")
        return True

    def fault(self, part: Part | None) -> OSError | StoreError | None:
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
        """Write ``consumerOffset.json`` and ``topics.json`` if it is time, and nothing is staged."""
        if not self.offsets.failed and self._offsets_pace.is_due(now_ms):
            with self._offsets_pace:
                self.snapshot()
        try:
            self.topics.storage.snapshot(now_ms)
        except StoreError as error:
            if not self._room.lacked("topics.json", error):
                self._log.error("topics.json could not be written", error=str(error))
            return
        if self.topics.storage.next_snapshot_ms() is None:
            self._room.found("topics.json")

    def mend(self, now_ms: int) -> None:
        """Begin a turn: try again the files of a disk that failed."""
        # This has a clock of its own: requests that are refused in the meantime must not delay it.
        if self.topics.storage.failed and now_ms >= self._mend_ms:
            self._mend_ms = now_ms + RETRY_MS
            try:
                self.topics.storage.recover()
                self._recovered("topics")
                self._retry_ms["topics"] = now_ms  # deletions that waited for it continue at once
                self._log.info("topics can be changed again")
            except StoreError as error:
                self._fail("topics", error, now_ms)
                self._faults.pop("topics", None)

    def snapshot(self) -> None:
        """Write ``consumerOffset.json`` if needed. A failure is logged; the journal has everything."""
        try:
            self._room.try_to("consumerOffset.json", self.offsets.snapshot)
        except StoreError as error:
            self._log.error("consumerOffset.json could not be written", error=str(error))

    def next_ms(self) -> int | None:
        """When work is due without a request; None: not soon."""
        times = [self.groups.next_expiry_ms(), self.groups.next_write_ms(), self.subscriptions.next_write_ms()]
        if self.offsets.dirty:
            times.append(self._offsets_pace.next_ms)
        times.append(self._mend_ms if self.topics.storage.failed else self.topics.storage.next_snapshot_ms())
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
        try:
            self.topics.storage.close()
        except StoreError as error:
            self._log.error("topics.json could not be written", error=str(error))
        self.groups.close()
        self.makers.close()
        self.offsets.close()
        self._ends.close()

    def _recover_offsets(self, now_ms: int) -> None:
        try:
            self.offsets.recover()
            self._recovered("offsets")
            self._log.info("offsets can be committed again")
        except StoreError as error:
            self._fail("offsets", error, now_ms)

    def _write_groups(self, now_ms: int, *, at_once: bool = False) -> None:
        configured = self.groups.is_configured
        whens = {"at_once": at_once}
        for name, write, next_ms in (
            ("groups", partial(self.groups.write, now_ms, **whens), self.groups.next_write_ms),
            ("members", self.groups.write_members, _never),
            ("makers", self.makers.write, _never),
            ("subscriptions", partial(self.subscriptions.write, now_ms, **whens), self.subscriptions.next_write_ms),
        ):
            try:
                write()
            except (OSError, StoreError) as error:
                if configured and name == "groups":
                    self._fail("groups", error, now_ms)
                # No other answer depends on these files; they are written in a later turn.
                elif not self._room.lacked(name, error) and name not in self._unwritten:
                    self._log.error(f"{name} could not be written", error=str(error))
                self._unwritten.add(name)
                continue
            if name in self._unwritten and next_ms() is None:
                self._unwritten.discard(name)
                self._room.found(name)

    def _fail(self, part: Part, error: OSError | StoreError, now_ms: int) -> None:
        last = self._last_errors.get(part)
        if not self._room.lacked(part, error) and (last is None or str(last) != str(error)):
            self._log.error(f"{part} could not be written", error=str(error))
        self._faults[part] = self._last_errors[part] = error
        self._retry_ms[part] = now_ms + RETRY_MS

    def _recovered(self, part: Part) -> None:
        self._last_errors.pop(part, None)
        self._room.found(part)

    def _news(self, deleted: dict[str, int]) -> TopicNews | None:
        changed = list(dict.fromkeys(self.topics.changed))
        self.topics.changed.clear()
        ending = self.topics.deletions.untold()
        if not changed and not ending and not deleted:
            return None
        touched = [*changed, *(name for name, _ in ending), *deleted]
        self.groups.topics_changed(touched)
        self.listing.topics_changed(touched)
        for name in touched:
            self._ends.forget(name)
        known, tombstones = self.topics.table.topics, self.topics.deletions.tombstones
        return TopicNews(
            {name: describe(known[name]) for name in changed if name in known},
            ending,
            [(name, tombstones[name], incarnation) for name, incarnation in deleted.items()],
        )
