"""The writer's table of idempotent producers, its snapshots, and the look-up of places for repeated sends.

Owns ``commitmq/producers``. commitmq.store.producers and commitmq.store.producers
describe the table and why it is right after any crash. Sends that are not idempotent use nothing of this module.

The writer packs a snapshot between two requests (a few milliseconds for tens of thousands of entries) and keeps it
until the records it covers are flushed. A thread of its own writes and syncs it, and touches nothing else. The log's
beginning is deleted only below a snapshot that is on the device (``durable``): a start that reads the log from the
snapshot on must find every record.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from commitmq.config import NodeConfig
from commitmq.errors import CommitMQError, StoreError
from commitmq.files.disk_space import DiskRoom
from commitmq.format.producer_mark import MAX_EPOCH, MAX_ID_CHARACTERS, MAX_SEQUENCE, is_producer_id, mark_prefix
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.store.log.append import Appended
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch
from commitmq.store.producers import (
    UNKNOWN,
    BatchMetadata,
    ProducerSnapshot,
    ProducerTable,
    StoredRecord,
    find_stored,
    replay,
)
from commitmq.store.queues.queue_files import has_record_before
from commitmq.workers.runtime.context import monotonic_ms

_FEW_SEGMENTS: Final = 4
_RETRY_MS: Final = 5_000
_SNAPSHOT: Final = "producers"
_TELL_FORGOTTEN_MS: Final = 60_000


class SequenceFields(NamedTuple):
    """The producer fields in the header of an idempotent send; ``mark`` is the producer without the sequence."""

    producer_id: str
    epoch: int
    sequence: int
    mark: bytes


class ProducersUnusableError(CommitMQError):
    """The producer table cannot be made durable, so the writer must not promise idempotence."""


def numbered(header: Mapping[str, Any]) -> SequenceFields:
    """The three producer fields of an idempotent send. Raises ValueError with a sentence that names the fault."""
    name, epoch, sequence = header["producer_id"], header.get("producer_epoch", -1), header.get("sequence", -1)
    if not is_producer_id(name):
        raise ValueError(f"producer_id must be 1 to {MAX_ID_CHARACTERS} letters, digits and ._-/@+=")
    if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH:
        raise ValueError(f"producer_epoch must be an integer from 0 to {MAX_EPOCH}")
    if type(sequence) is not int or not 0 <= sequence <= MAX_SEQUENCE:
        raise ValueError(f"sequence must be an integer from 0 to {MAX_SEQUENCE}")
    return SequenceFields(name, epoch, sequence, mark_prefix(name, epoch))


class ProducerStateManager:
    """The writer's table of idempotent producers, with its snapshots. Call :meth:`open` first, then :meth:`replay`
    with the records from the offset that it returns.
    """

    def __init__(self, layout: StoreLayout, config: NodeConfig, log: Log, room: DiskRoom) -> None:
        self._layout = layout
        self._log, self._room = log, room
        self._segment_bytes = config.commit_log.segment_bytes
        self._settings = config.producers
        self.table = self._empty()
        self._usable = True
        self._position = 0  # of the last snapshot that was taken
        self.durable = 0
        """Position of the snapshot that is on the device; 0 when none can be used."""
        self._due_ms = 0
        self._taken: ProducerSnapshot | None = None
        self._saving: threading.Thread | None = None
        self._problem: OSError | None = None
        self._written = 0  # set by the thread: position of the snapshot it has saved
        self._told_forgotten = 0
        self._tell_ms = 0

    def _empty(self) -> ProducerTable:
        settings = self._settings
        return ProducerTable(max_entries=settings.max_entries, window=settings.window, expiry_ms=settings.expiry_ms)

    # ------------------------------------------------------------ the start

    def open(self, log: CommitLog, end: int, deleted: Mapping[str, int]) -> int:
        """Load the snapshot; returns the physical offset to replay records from, at most ``end``, the log's end.
        ``deleted``: see :func:`commitmq.store.producers.replay`.
        """
        path = self._layout.producers
        try:
            found = ProducerSnapshot.load(path)
            if found is None:
                return self._without_snapshot(log, end)
            self.table.load_bytes(found.table, deleted)
            self._check(log, found.position, end)
        except (StoreError, OSError) as error:
            # Do not start with an empty table instead: messages answered as stored would be stored again.
            self.table = self._empty()
            self._log.warning(
                "the table of idempotent producers is rebuilt from the whole log",
                reason=str(error),
                bytes=end - log.min_offset,
            )
            return min(log.min_offset, end)
        self._position = self.durable = found.position
        self._due_ms = monotonic_ms() + self._settings.snapshot_interval_ms
        return max(found.position, min(log.min_offset, end))

    def replay(self, batch: DispatchBatch, deleted: Mapping[str, int]) -> None:
        """Take the next records, which lie behind those already known."""
        replay(self.table, batch, deleted)

    def _without_snapshot(self, log: CommitLog, end: int) -> int:
        """Rebuild from the whole log: the snapshot's file is missing. Recovery made one when it took the store over, so
        an operator deleted the file, or there was no room for it. The snapshot made durable here is empty and stands at
        the log's beginning, which is right, too.
        """
        begin = min(log.min_offset, end)
        if begin < end:
            self._log.warning(
                "the table of idempotent producers is rebuilt from the whole log",
                reason=f"the snapshot is missing [{self._layout.producers}]",
                bytes=end - begin,
            )
        self._position = begin
        try:
            ProducerSnapshot(begin, self.table.to_bytes()).save(self._layout.producers)
            self.durable = begin
        except OSError as error:
            self._usable = False
            self._log.warning(
                "idempotent sends are refused until the snapshot of producers can be written",
                error=os.strerror(error.errno or 5),
            )
        return begin

    def _check(self, log: CommitLog, position: int, end: int) -> None:
        if position > end:
            raise StoreError(f"the log ends at {end}, before {position}, where the snapshot of producers was taken")
        if log.min_offset < position and not has_record_before(log, position):
            raise StoreError(f"no record ends at {position}, where the snapshot of producers was taken")
        newest = self.table.newest()
        if newest is None:
            return
        name, epoch, _, _, sequence, place = newest
        if place.physical_offset >= log.min_offset and UNKNOWN in find_stored(log, [place], name, epoch, sequence, 1):
            raise StoreError(f"the log's record before {place.end} is not the one in the snapshot of producers")

    # ------------------------------------------------------------ sends

    def judge(self, sender: SequenceFields, topic: str, queue: int, count: int) -> int:
        """How many of the messages are stored already. Raises SequenceRefusedError, or ProducersUnusableError."""
        if not self._usable:
            raise ProducersUnusableError("the snapshot of idempotent producers cannot be written to the disk")
        return self.table.judge(sender.producer_id, sender.epoch, topic, queue, sender.sequence, count)

    def note(
        self, sender: SequenceFields, topic: str, queue: int, before: int, queue_offset: int, done: Appended
    ) -> None:
        """Record that the messages of ``sender`` behind the first ``before`` were stored from ``queue_offset`` on."""
        sequence = sender.sequence + before
        for part in done.parts:
            place = BatchMetadata(
                sequence, part.count, queue_offset, part.physical_offset, part.physical_offset + part.size_bytes
            )
            self.table.note(sender.producer_id, sender.epoch, topic, queue, place, done.store_timestamp)
            sequence += part.count
            queue_offset += part.count

    def find(self, sender: SequenceFields, topic: str, queue: int, count: int) -> tuple[list[StoredRecord], int]:
        """Where the first ``count`` messages of ``sender`` are, and the end of its newest record in this queue."""
        places = self.table.places(sender.producer_id, topic, queue)
        # Opened again each time: repetitions are rare, and a lasting mapping would keep expired segments on the disk.
        log = CommitLog(self._layout.commit_log, self._segment_bytes, _FEW_SEGMENTS)
        try:
            stored = find_stored(log, places, sender.producer_id, sender.epoch, sender.sequence, count)
        finally:
            log.close()
        return stored, self.table.end(sender.producer_id, topic, queue)

    def forget_topic(self, topic: str, below: int) -> None:
        """Drop the records of a deleted topic below ``below``."""
        self.table.forget_topic(topic, below)

    # ------------------------------------------------------------ snapshots

    def turn(self, position: int, flushed: int, wanted: int = 0) -> int:
        """Run once per turn of the writer's loop. ``position`` is the log's end, ``flushed`` the end of its durable
        part; cleanup wants to delete the log up to ``wanted``. Returns the offset that should be flushed soon, 0 when
        that does not matter.
        """
        if self._saving is not None:
            if not self._saving.is_alive():
                self._saved()
        elif self._taken is not None:
            if flushed >= self._taken.position:
                self._save(self._taken)
            elif wanted > self.durable:
                return self._taken.position
        elif position != self._position or not self._usable:
            now = monotonic_ms()
            behind = position - self._position
            if behind >= self._settings.snapshot_bytes or now >= self._due_ms or wanted > self._position:
                self._take(position, now)
        return 0

    def finish(self, position: int, flushed: int) -> None:
        """The writer stops in order: save a snapshot of the end if all is flushed, so that the next start reads nothing."""
        if self._saving is not None:
            self._saving.join()
            self._saved()
        # One that was taken, and waits for its flush, is not saved yet.
        if position == flushed and (self._taken is not None or position != self._position or not self._usable):
            self._take(position, monotonic_ms())
            taken, self._taken = self._taken, None
            if taken is not None:
                self._write(taken)
                self._saved()

    def _take(self, position: int, now: int) -> None:
        self.table.expire(time.time_ns() // 1_000_000)
        self._tell_forgotten(now)
        self._taken = ProducerSnapshot(position, self.table.to_bytes())
        self._position = position
        self._due_ms = now + self._settings.snapshot_interval_ms

    def _save(self, snapshot: ProducerSnapshot) -> None:
        self._taken = None
        self._saving = threading.Thread(target=self._write, args=(snapshot,), name="producers", daemon=True)
        self._saving.start()

    def _write(self, snapshot: ProducerSnapshot) -> None:
        try:
            snapshot.save(self._layout.producers)
            self._problem, self._written = None, snapshot.position
        except OSError as error:
            self._problem = error

    def _saved(self) -> None:
        self._saving = None
        if self._problem is None:
            self._usable, self.durable = True, self._written
            self._room.found(_SNAPSHOT)
            return
        # The old snapshot is still right. The writer tries the next one soon, and a start reads a little more
        # in the meantime.
        if not self._room.lacked(_SNAPSHOT, self._problem):
            self._log.warning(
                "cannot write the snapshot of idempotent producers", error=os.strerror(self._problem.errno or 5)
            )
        self._position = -1
        self._due_ms = monotonic_ms() + _RETRY_MS

    def _tell_forgotten(self, now: int) -> None:
        if self.table.forgotten != self._told_forgotten and now >= self._tell_ms:
            self._log.info(
                "producers were forgotten",
                count=self.table.forgotten - self._told_forgotten,
                known=len(self.table),
                entries=self.table.entries,
            )
            self._told_forgotten = self.table.forgotten
            self._tell_ms = now + _TELL_FORGOTTEN_MS
