"""Committed offsets of consumer groups: which are acknowledged, where they are stored, and their state after a crash.

Two files hold them. ``config/consumerOffset.json`` is RocketMQ's (spec 1.4, 12.10): a snapshot, written every
``groups.offsets_interval_ms`` when something changed and at stop. ``commitmq/offsets.journal`` has every change since
the snapshot (:mod:`commitmq.store.metadata.offsets_journal`). A change is staged first, becomes durable by
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

from collections.abc import Collection, Iterable
from pathlib import Path

from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.group_config import ConsumerOffsets, journal_path, load_snapshot
from commitmq.store.metadata.journal import Replay
from commitmq.store.metadata.offsets_journal import Change, DropGroup, DropTopic, OffsetsJournal, SetOffsets

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
        """Load snapshot and journal of a store. Raises StoreError when either is damaged beyond a torn tail.

        A full disk is no error here: reads work, and commits are refused until :meth:`recover` succeeds.
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
