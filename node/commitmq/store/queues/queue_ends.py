"""``commitmq/queue_ends``: a record of all ConsumeQueues and their ends, written by the process that owns their files.

Only a queue's files tell its next offset: where a file is missing, the queue looks as if it had fewer units, and the
next message gets an offset that was already given out. So the ends are recorded separately, and the next start compares
the two (:mod:`commitmq.offline.queue_check`).

    line 1    ``CMQENDS1``, a space, CRC-32 of line 2 in 8 hexadecimal digits
    line 2    JSON: {"position": …, "log_start": …, "expires_below": …, "queues": [queue, …]}, each queue a list
              [kind, topic, queue id, first, end, next, last end]

    position        physical offset: every unit of a record that begins below it is included, and on the device
    log_start       where the log began. :mod:`commitmq.store.log.expiry` records expiry before it happens, so segments
                    that are missing behind both places were lost (:func:`lost_beginning`)
    expires_below   files whose last unit points below it may have been deleted since, -1 when none may
    kind            0 a plain queue, 1 a batch queue
    first, end      the first file's first byte, and the byte behind the last unit (logical bytes of the queue)
    next            the next queue offset
    last end        end of the last unit's record in the log

The file is replaced as a whole, durably: at every start, from time to time while the queues grow, around a deletion of
files, and at an orderly stop. A missing or torn file counts as none; then a start compares samples of the log with the
queues.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from commitmq.errors import StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES, SysFlag
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT_STRUCT
from commitmq.store.layout import StoreLayout
from commitmq.store.log import dispatch_batch
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, consumable
from commitmq.store.log.expiry import Claim, MinOffsetFile
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue, BatchQueueReader
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_reader import QueueReader

_MAX_FILES: Final = 64
_MAX_QUEUES: Final = 64
_ROWS: Final = 16_384
_BYTES: Final = 16 << 20


class EndsAt:
    """The ends of queues at a place of the log, before the dispatchers have caught up with it.

    Below the place where dispatchers begin the ConsumeQueues have every unit; behind it the records themselves say which queue
    and offset they have. Nothing here writes.

    The next offset of each queue when the log ended at ``place``. Close it.
    """

    def __init__(
        self,
        layout: StoreLayout,
        log: CommitLog,
        *,
        file_bytes: int,
        batch_file_bytes: int,
        dispatched: int,
        place: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Every unit of a record below ``dispatched`` is in its queue; both positions are records' boundaries. Reads the log
        between them. Raises CorruptRecordError.
        """
        self._bound = min(dispatched, place)
        kept: Any = {"max_open_files": _MAX_FILES, "max_queues": _MAX_QUEUES}  # each queue is asked for once
        self._plain = QueueReader(log, layout.consume_queue, file_bytes, **kept)
        self._batches = BatchQueueReader(layout.batch_consume_queue, batch_file_bytes, **kept)
        self._behind: dict[tuple[str, int], int] = {}
        walker = LogWalker(log, max_rows=_ROWS, max_bytes=_BYTES)
        at = max(self._bound, log.min_offset)
        while at < place:
            batch = walker.walk(at, place)
            self._take(batch)
            at = batch.end
            beat()
        walker.release()

    def _take(self, batch: DispatchBatch) -> None:
        rows = batch.rows[consumable(batch.rows)]
        inner = (rows["inner_num"] > 0) & (rows["inner_base"] >= 0) & (rows["sys_flag"] & SysFlag.INNER_BATCH != 0)
        ends = np.where(inner, rows["inner_base"] + rows["inner_num"], rows["queue_offset"] + 1)
        for topic, queue, end in zip(rows["topic"].tolist(), rows["queue_id"].tolist(), ends.tolist(), strict=True):
            self._behind[batch.topics[topic], queue] = end
        if rows["multi_size"].any():
            for key, first, units in dispatch_batch.runs(batch, rows):
                self._behind[key] = first + len(units) // UNIT_BYTES

    def end(self, topic: str, queue: int, *, in_batches: bool = False) -> int | None:
        """The next offset of a queue; None for one without any file or record. Raises StoreError."""
        found = self._behind.get((topic, queue))
        if found is None:
            reader = self._batches if in_batches else self._plain
            bounds = reader.bounds(topic, queue, bound=self._bound)
            found = None if bounds is None else bounds[1]
        return found

    def close(self) -> None:
        self._plain.close()
        self._batches.close()


_MAGIC: Final = b"CMQENDS1 "
PLAIN: Final = 0
BATCH: Final = 1


class QueueEnd(NamedTuple):
    """One queue; see the module's text."""

    kind: int
    topic: str
    queue_id: int
    first: int
    end: int
    next_offset: int
    last_end: int

    @classmethod
    def of(cls, queue: ConsumeQueue | BatchConsumeQueue) -> QueueEnd:
        """The end of ``queue``, as its object knows it."""
        kind = BATCH if isinstance(queue, BatchConsumeQueue) else PLAIN
        topic, queue_id = queue.key
        return cls(kind, topic, queue_id, queue.first_byte, queue.end_byte, queue.max_offset, queue.max_physical_offset)


@dataclass(slots=True)
class QueueEnds:
    """All queues at one position of the log; see the module's text."""

    position: int
    log_start: int = 0
    expires_below: int = -1
    queues: list[QueueEnd] = field(default_factory=list)

    @classmethod
    def at(cls, position: int, log_start: int, queues: Iterable[ConsumeQueue | BatchConsumeQueue]) -> QueueEnds:
        """The current ends of ``queues``, when all units of records below ``position`` are in their files."""
        return cls(position, log_start, -1, [QueueEnd.of(queue) for queue in queues if queue.max_physical_offset >= 0])

    @classmethod
    def load(cls, path: Path) -> QueueEnds | None:
        """The file's content; None unless it is complete."""
        try:
            head, _, data = path.read_bytes().partition(b"\n")
            if not head.startswith(_MAGIC) or int(head[len(_MAGIC) :], 16) != zlib.crc32(data):
                return None
            found = orjson.loads(data)
            position, log_start, expires = (int(found[name]) for name in ("position", "log_start", "expires_below"))
            return cls(position, log_start, expires, [QueueEnd(*queue) for queue in found["queues"]])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Replace the file, durably. Raises StoreError; then the file has the old or the new content."""
        data = orjson.dumps(
            {
                "position": self.position,
                "log_start": self.log_start,
                "expires_below": self.expires_below,
                "queues": self.queues,
            },
            default=tuple,
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(path, b"%s%08x\n%s" % (_MAGIC, zlib.crc32(data), data), "queue_ends")
        except OSError as error:
            raise StoreError(f"cannot write the record of the queues' ends: {error.strerror}", path=path) from error


def expect_expiry(path: Path, min_offset: int) -> None:
    """Write into the file, durably, that queue files whose last unit points below ``min_offset`` may be deleted from
    now on. If that cannot be written, on a full disk, delete the file. Raises StoreError when neither can be done.
    """
    ends = QueueEnds.load(path)
    if ends is None or ends.expires_below >= min_offset:
        return
    ends.expires_below = min_offset
    try:
        ends.save(path)
    except StoreError:
        forget(path)


def lost_beginning(layout: StoreLayout, ends: QueueEnds, first: int) -> str:
    """A message if the log, whose ``first`` segment begins there, must begin earlier; else "". ``ends`` must be of the
    last use of the store: RocketMQ deletes segments too, and records that nowhere. Raises StoreError.
    """
    begin = max(ends.log_start, MinOffsetFile(layout).read())
    if begin >= first:
        return ""
    return (
        f"segments are missing at the log's beginning: it began at physical offset {begin}, begins at {first} now, and the "
        f"segments between did not expire. Put them back, or remove {layout.queue_ends} to continue without them"
    )


def forget(path: Path) -> None:
    """Delete the file, durably: its content is about to become wrong. Raises StoreError."""
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(path, "queue_ends")
            disk.sync_folder(path.parent, "queue_ends")
    except OSError as error:
        raise StoreError(f"cannot remove the record of the queues' ends: {error.strerror}", path=path) from error


class GroupPosition(NamedTuple):
    """The next message of a queue that ``group`` will read."""

    group: str
    topic: str
    queue: int
    offset: int


class UnitFinder:
    """Finds the CommitLog position of the slowest consumer group: from its queue offset, through the ConsumeQueue's
    unit. Reads single units of all queues of a store. Changes nothing.
    """

    def __init__(self, folder: Path, file_bytes: int, batch_folder: Path, batch_file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._batch_folder = batch_folder
        self._batch_file_bytes = batch_file_bytes
        self._fds = FdCache(16)

    def close(self) -> None:
        self._fds.close()

    def physical_offset(self, topic: str, queue: int, offset: int, log_min: int) -> int | None:
        """Physical offset of the first record at or behind queue ``offset`` that the log still has; None when there is
        none. ``log_min`` is the log's minimum. Raises StoreError.
        """
        if os.path.isdir(f"{self._batch_folder}/{topic}/{queue}"):
            return self._batch_offset(f"{self._batch_folder}/{topic}/{queue}", offset, log_min)
        folder = f"{self._folder}/{topic}/{queue}"
        at = offset * UNIT_BYTES
        base = at - at % self._file_bytes
        try:
            fd = self._fds.read_fd(f"{folder}/{segment_name(base)}")
            data = os.pread(fd, UNIT_BYTES, at - base)
        except OSError:
            data = b""
        if len(data) == UNIT_BYTES:
            physical, size, _ = UNIT_STRUCT.unpack(data)
            if size > 0 and size != PREBLANK_SIZE and physical >= log_min:
                return int(physical)
            if size == 0:
                return None  # the queue's end: the group has read everything
        return self._first_kept(folder, offset, log_min)

    def _first_kept(self, folder: str, offset: int, log_min: int) -> int | None:
        """The same for an offset whose file or record is gone: the queue's first message counts."""
        files = ConsumeQueue(folder, self._file_bytes, self._fds)
        files.refresh()
        files.correct_min_offset(log_min)
        unit = files.unit(max(offset, files.min_offset))
        return None if unit is None else unit[0]

    def _batch_offset(self, folder: str, offset: int, log_min: int) -> int | None:
        """The same for a queue whose units are batches: each may hold any number of messages."""
        files = BatchConsumeQueue(folder, self._batch_file_bytes, self._fds)
        files.refresh()
        files.correct_min_offset(log_min)
        units = files.units(files.index_of(offset), 1)
        return int(units["physical_offset"][0]) if len(units) else None


def slowest(finder: UnitFinder, positions: Iterable[GroupPosition], log_min: int) -> Claim | None:
    """The claim of the group whose next message comes first in the log; None when all groups have read everything."""
    # Only the last group of each queue counts, and there may be thousands of groups.
    last: dict[tuple[str, int], GroupPosition] = {}
    for one in positions:
        known = last.get((one.topic, one.queue))
        if known is None or one.offset < known.offset:
            last[one.topic, one.queue] = one
    found: Claim | None = None
    for one in last.values():
        physical = finder.physical_offset(one.topic, one.queue, one.offset, log_min)
        if physical is not None and (found is None or physical < found.offset):
            found = Claim(
                physical, f"group {one.group}, which has not read {one.topic}/{one.queue} from {one.offset} on"
            )
    return found
