"""Committed offsets of consumer groups: which are acknowledged, where they are stored, and their state after a crash.

Two files hold them. ``config/consumerOffset.json`` is RocketMQ's (spec 1.4, 12.10): a snapshot, written every
``groups.offsets_interval_ms`` when something changed and at stop. ``commitmq/offsets.journal`` has every change since
the snapshot (:mod:`commitmq.store.metadata.journal`). A change is staged first, becomes durable by
:meth:`GroupOffsets.sync`, and only then visible and acknowledged; a failed sync drops all staged changes.

Crash points, and the state that the next :meth:`GroupOffsets.open` finds:

* before the sync ends: the change was not acknowledged. Its record is whole (then it counts, as its consumer had asked)
  or torn (then it is cut);
* after the sync: the record is replayed over the snapshot;
* while the snapshot is written, and until the new journal exists: either snapshot, which the journal knows by name
  (:mod:`commitmq.store.metadata.journal`), with the changes behind it.

A snapshot that the journal does not know is RocketMQ's, which used the store after a crash of a CommitMQ node and never
saw the journal. Then only each queue's last value in the journal counts, and only when it is ahead of the snapshot: no
group goes back behind an offset that either side acknowledged. (A reset to a lower offset that was never written to a
snapshot is lost in that one case: a crash followed by RocketMQ.)

After a replay the snapshot is written and a new journal begun at once. The old journal's last record may have been read
from the page cache of a machine whose disk never got it, and no durable record may be appended behind such a record.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory_files import MemoryTopics
from commitmq.store.metadata import json_config
from commitmq.store.metadata.group_config import ConsumerOffsets, journal_path, load_snapshot
from commitmq.store.metadata.journal import Change, DropGroup, DropTopic, OffsetsJournal, Replay, SetOffsets
from commitmq.store.metadata.topic_config import (
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    QUEUE_TYPE_SIMPLE,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
)
from commitmq.store.queues.batch_consume_queue import BatchQueueReader
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory
from commitmq.store.shared_memory import memory_folder

NONE = -1  # the answer of fetch for a queue without a committed offset
COMMITS_A_VERSION = 500  # RocketMQ's consumerOffsetUpdateVersionStep (spec 1.4)
_log = get_log("coordinator")


def replay(table: ConsumerOffsets, journal: Replay[Change], snapshot: str) -> None:
    """Bring ``table``, a snapshot of this name, up to the journal; the module has the rules."""
    changes = journal.since(snapshot)
    journaled = table if changes is not None else ConsumerOffsets()
    for change in journal.changes if changes is None else changes:
        _apply(journaled, change)
    if journaled is not table:
        for (topic, group), queues in journaled.offsets.items():
            for queue, offset in queues.items():
                known = table.get(group, topic, queue)
                if known is None or offset > known:
                    table.put(group, topic, queue, offset)


def _apply(table: ConsumerOffsets, change: Change) -> None:
    if isinstance(change, DropTopic):
        table.remove_topic(change.topic)
    elif isinstance(change, DropGroup):
        table.remove_group(change.group)
    else:
        for queue, offset in change.offsets:
            table.put(change.group, change.topic, queue, offset)


class GroupOffsets:
    """The offsets of all groups. Every change is staged, then synced; reads see only synced changes."""

    def __init__(self, table: ConsumerOffsets, snapshot: Path, journal: OffsetsJournal) -> None:
        """Use :meth:`open`."""
        self.table = table
        self._snapshot = snapshot
        self._journal = journal
        self._staged: list[Change] = []
        # A topic's offsets in a group with the staged changes applied. An entry here hides the table's.
        self._overlay: dict[tuple[str, str], dict[int, int]] = {}
        self._commits = 0
        self._commits_since_version = 0
        self.dirty = False

    @classmethod
    def open(cls, layout: StoreLayout) -> GroupOffsets:
        """Load snapshot and journal of a store. Raises StoreError when either is damaged beyond a torn tail. A full
        disk is no error here: reads work, and commits are refused until :meth:`recover` succeeds.
        """
        snapshot = layout.config / "consumerOffset.json"
        path = journal_path(layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        table, base = load_snapshot(layout)
        found = OffsetsJournal.open(path)
        if found is None:
            try:
                return cls(table, snapshot, OffsetsJournal.create(path, base))
            except StoreError as error:
                _log.error("offsets cannot be committed", error=str(error))
                return cls(table, snapshot, OffsetsJournal.absent(path))
        journal, content = found
        if content.torn_copy is not None:
            _log.warning("torn tail of the offsets journal cut", bytes=content.torn_bytes, copy=content.torn_copy)
        if content.since(base) is None and not snapshot.exists():
            # Every crash leaves the snapshot, or the one before it as .bak, and the journal knows one of them: as its base,
            # or by a mark when one crash came before the new journal and another one while the snapshot was replaced.
            raise StoreError(
                f"the file of the groups' offsets is missing, and {path} builds on it: groups would consume again what they "
                f"had acknowledged. Put it back, or remove {path} to continue without",
                path=snapshot,
            )
        if content.since(base) is None:
            sentence = (
                "consumerOffset.json was not written by this node last: it counts, and newer offsets of the journal"
            )
            _log.warning(sentence, changes=len(content.changes))
        replay(table, content, base)
        offsets = cls(table, snapshot, journal)
        if content.changes or content.base != base:
            # Until the new journal exists nothing may be appended to this one.
            journal.failed = True
            try:
                if content.changes:
                    offsets.recover()
                else:
                    journal.begin_anew(base, lambda: None)
            except StoreError as error:
                _log.error("offsets cannot be committed", error=str(error))
        return offsets

    @property
    def failed(self) -> bool:
        """True while commits are refused because a write or sync failed."""
        return self._journal.failed

    @property
    def staged(self) -> bool:
        return bool(self._staged)

    @property
    def journal_bytes(self) -> int:
        """Size of the journal file."""
        return self._journal.size_bytes

    def fetch(self, group: str, topic: str, queue: int) -> int:
        """The acknowledged next offset, or NONE."""
        offset = self.table.get(group, topic, queue)
        return NONE if offset is None else offset

    def stage(
        self,
        group: str,
        offsets: Iterable[tuple[str, int, int]],
        *,
        reset: bool = False,
        lower: Collection[tuple[str, int]] = (),
        only_new: bool = False,
    ) -> list[tuple[str, int, int]]:
        """Stage ``(topic, queue, next offset)`` values. Returns the value that will be stored for each.

        A value behind the stored one changes nothing unless ``reset``, or the queue is one of ``lower``: answers may
        arrive out of order, and an acknowledged offset never goes back by accident. With ``only_new`` no stored value
        is changed.
        """
        stored: list[tuple[str, int, int]] = []
        changed: dict[str, dict[int, int]] = {}
        free = frozenset(lower)
        for topic, queue, offset in offsets:
            known = self._staged_queues(group, topic)
            at = known.get(queue, NONE)
            if at != NONE and (only_new or (at > offset and not reset and (topic, queue) not in free)):
                offset = at
            elif at != offset:
                known = self._overlay[topic, group] = dict(known) if (topic, group) not in self._overlay else known
                known[queue] = offset
                changed.setdefault(topic, {})[queue] = offset
            stored.append((topic, queue, offset))
        self._staged += [SetOffsets(group, topic, tuple(queues.items())) for topic, queues in changed.items()]
        self._commits += 1
        return stored

    def staged_offset(self, group: str, topic: str, queue: int) -> int:
        """The next offset with the staged changes applied, or NONE."""
        return self._staged_queues(group, topic).get(queue, NONE)

    def stage_drop(self, topic: str) -> None:
        """Stage that all groups drop ``topic``. Staging it twice is harmless."""
        self._staged.append(DropTopic(topic))
        for key in [*((topic, group) for group in self.table.groups_of(topic)), *self._overlay]:
            if key[0] == topic:
                self._overlay[key] = {}

    def stage_forget(self, group: str) -> None:
        """Stage that ``group`` has no offsets any more."""
        self._staged.append(DropGroup(group))
        for key in [*((topic, group) for topic in self.table.topics_of(group)), *self._overlay]:
            if key[1] == group:
                self._overlay[key] = {}

    def sync(self) -> None:
        """Make all staged changes durable and visible. When it raises StoreError, none of them happened."""
        staged, commits = self._staged, self._commits
        self._staged, self._overlay, self._commits = [], {}, 0
        if not staged:
            if self.failed and commits:
                # A commit that changes nothing could be answered, but "refused until the disk works" is one clear rule.
                raise StoreError("the offsets journal could not be written before", path=self._journal.path)
            return
        self._journal.append(staged)
        for change in staged:
            _apply(self.table, change)
        self._count(commits)
        self.dirty = True

    def _count(self, commits: int) -> None:
        self._commits_since_version += commits
        if self._commits_since_version >= COMMITS_A_VERSION:
            self._commits_since_version %= COMMITS_A_VERSION
            self.table.version.advance()

    def snapshot(self) -> None:
        """Write ``consumerOffset.json`` and begin a new journal, if anything changed. Raises StoreError."""
        if not self.dirty:
            return
        data = json_config.encode(self.table.dumps())
        self._journal.begin_anew(json_config.name_of(data), lambda: json_config.replace_bytes(self._snapshot, data))
        self.dirty = False

    def recover(self) -> None:
        """After a failure: write both files again from the acknowledged offsets. Raises StoreError while that fails."""
        self.dirty = True
        self.snapshot()

    def close(self) -> None:
        """Close the journal. Call :meth:`snapshot` first, so that RocketMQ reads an up-to-date store."""
        self._journal.close()

    def _staged_queues(self, group: str, topic: str) -> dict[int, int]:
        overlay = self._overlay.get((topic, group))
        return self.table.offsets.get((topic, group), {}) if overlay is None else overlay


_MAX_KEPT: Final = 100_000
_MAX_FILES: Final = 64


class EndOffsets:
    """The ends of queues, so that no group commits an offset behind the stored messages.

    The coordinator reads the same ConsumeQueue files as the readers, up to the same bound. So every message shown to a
    consumer lies below the end that is found here afterwards. An end only grows as long as its topic lives. The last end
    found is kept, and files are read only when an offset lies behind it.

    The queue ends of one coordinator. Changes nothing in the store.
    """

    def __init__(self, layout: StoreLayout, config: NodeConfig, control: ControlBlock) -> None:
        self._control = control
        self.cuts = CutHistory.load(layout)  # a log is cut before its node serves anybody
        self._log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, max_mapped=1)
        self._queues = QueueReader(
            self._log,
            layout.consume_queue,
            config.consume_queue.file_bytes,
            ext_file_bytes=config.consume_queue.ext_file_bytes,
            max_open_files=_MAX_FILES,
        )
        self._batches = BatchQueueReader(
            layout.batch_consume_queue, config.consume_queue.batch_file_bytes, max_open_files=_MAX_FILES
        )
        self._memory = MemoryTopics(memory_folder(layout))
        self._kept: OrderedDict[tuple[str, int, int], int] = OrderedDict()  # topic, incarnation, queue
        self._at_cuts: OrderedDict[tuple[str, int, int, int], int] = OrderedDict()  # and the cut's end

    def close(self) -> None:
        self._queues.close()
        self._batches.close()
        self._memory.close()
        self._log.close()

    def forget(self, topic: str) -> None:
        """``topic`` was deleted or changed: its files may be other ones by now."""
        self._queues.forget(topic)
        self._batches.forget(topic)

    def end(self, topic: TopicConfig, queue: int, offset: int, floor: int) -> int | None:
        """A lower bound of the queue's next offset, if it decides whether ``offset`` is valid; else ``offset``. None
        when it is unknown: the queues are being repaired after a crash, or cannot be read.

        ``floor``: physical offset below which no record belongs to the topic.
        """
        key = (topic.name, topic.incarnation, queue)
        if self._kept.get(key, 0) >= offset:
            return offset
        bound = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
        in_memory = topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY
        # Without a supervisor no process dispatches. After a crash consumers may have seen more than is dispatched
        # again so far.
        if not self._control.get(Word.EPOCH) or (not in_memory and bound < self._control.get(Word.RECOVERED_END)):
            return None
        found: tuple[int, int] | None = None
        try:
            if in_memory:
                memory = self._memory.get(topic.name, topic.incarnation)
                if memory is not None:
                    top = memory.bound
                    found = memory.queues.bounds(topic.name, queue, bound=top, floor=memory.floor)
            elif topic.attributes.get(QUEUE_TYPE, QUEUE_TYPE_SIMPLE) == QUEUE_TYPE_BATCH:
                found = self._batches.bounds(topic.name, queue, bound=bound, floor=floor)
            else:
                found = self._queues.bounds(topic.name, queue, bound=bound, floor=floor)
        except (StoreError, OSError):
            return None
        end = 0 if found is None else found[1]
        with contextlib.suppress(KeyError):
            del self._kept[key]
        self._kept[key] = end
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return end

    def end_since(self, topic: TopicConfig, queue: int, generation: int) -> int | None:
        """The queue's end at the lowest cut of the log since ``generation``: an offset that was learnt then and lies behind it
        is of a message that is gone. None without such a cut, and for queues that cannot be read now.
        """
        cut = self.cuts.end_since(generation)
        if cut == NO_CUT or topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY:
            return None
        key = (topic.name, topic.incarnation, queue, cut)
        if (found := self._at_cuts.get(key)) is not None:
            return found
        is_batch = topic.attributes.get(QUEUE_TYPE, QUEUE_TYPE_SIMPLE) == QUEUE_TYPE_BATCH
        try:
            bound = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
            found = (self._batches if is_batch else self._queues).offset_at(topic.name, queue, cut, bound=bound)
        except (StoreError, OSError):
            return None
        if found is not None and bound >= min(cut, self._control.get(Word.RECOVERED_END)):
            self._at_cuts[key] = found  # what is behind the cut changes it no more
            if len(self._at_cuts) > _MAX_KEPT:
                self._at_cuts.popitem(last=False)
        return found
