"""Memory topics: a separate store for topics with ``storage.type=memory``, under a byte budget.

Nothing is dispatched to this dispatcher: the node hands it the runs of its topics (hookspecs.TopicStore), and these
never reach the CommitLog. commitmq.store.memory_files describes the files and the messages that readers may see.

An append has this order, and dying after any step is harmless: memory is reserved (fallocate: a store into a missing
page would be SIGBUS); records are copied, their first bytes last; units are written; TIMESTAMP and BOUND move. Only
then the node acknowledges. A restarted process continues at BOUND, and only BOUND decides: bytes behind it are zeroed,
units that point behind it are cut, and the next queue offset is the number of the first cut unit.

Budget: allocated memory counts. Segments grow in pieces, unit files in pages, and each topic has one page. Before an
allocation that would exceed the budget, segments are evicted until it fits:

1. the oldest segment of the topic that needs memory, unless it is the active one: a topic that takes much pays itself;
2. else the segment of all topics that was begun first, including the active one of a topic that went quiet: such a
   topic is then empty, and continues with the next segment and the next queue offset.

Units go with the segments that they point into (:class:`UnitFiles`). Never evicted are one page for each topic and, for each
queue that was ever used, the page with its last unit. If the budget does not hold a send beside these pages, the send
is refused.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.errors import DiskFullError, StoreError
from commitmq.files.disk import write_all
from commitmq.files.disk_space import NO_SPACE
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import (
    HOST_BYTES,
    HOST_V6_BYTES,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
    UNIT_BYTES,
    SysFlag,
)
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT, UNIT_STRUCT
from commitmq.kernels.compiled import tags_codes
from commitmq.plugin.hookspecs import DispatcherSpec, Stored, TopicStoreView, hookimpl
from commitmq.store.log.append import Appended, CommitLogAppender, SegmentUnavailableError
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError
from commitmq.store.memory_files import (
    UNIT_FILE_BYTES,
    NodeWord,
    TopicState,
    TopicWord,
    node_page,
    survives,
    topic_page,
)
from commitmq.store.shared_memory import PAGE_BYTES, SharedPage, check_private


class UnitFiles:
    """The unit files of one queue; they keep only the memory that readers may still need.

    Units that point below the topic's floor are freed by whole files, and in the first needed file by whole pages,
    which are returned to the file system (a hole: its bytes read as zeros, the size stays). The last unit of a queue
    always stays, so that another process finds the next queue offset: behind the last unit, or in the name of a file
    without units. So a queue whose messages are all evicted keeps one page, or two where its last unit crosses their
    border.

    Every method that frees or takes memory returns its size in bytes of pages, because the kernel counts pages for the
    files.

    ``next``: the next message's queue offset. Files are known by their first byte, ``first`` and ``last``; ``last``
    is -1 without a file. The first ``hole`` bytes of the first file are returned; ``allocated`` is where the pages of
    the last file end.
    """

    __slots__ = ("_fds", "allocated", "first", "folder", "hole", "last", "next")

    def __init__(self, folder: Path, fds: FdCache) -> None:
        self.folder = os.fspath(folder)
        self._fds = fds
        self.next = 0
        self.first = 0
        self.last = -1
        self.allocated = 0
        self.hole = 0

    def _path(self, base: int) -> str:
        return f"{self.folder}/{segment_name(base)}"

    # ------------------------------------------------------------ writing

    def reserve(self, count: int, allocate: Callable[[int, int, int], None]) -> None:
        """Allocate the places of the next ``count`` units with ``allocate(descriptor, start, size)``."""
        start, stop = self.next * UNIT_BYTES, (self.next + count) * UNIT_BYTES
        for base in range(start - start % UNIT_FILE_BYTES, stop, UNIT_FILE_BYTES):
            if base < self.last:
                continue  # fully allocated for an append that then failed
            if base != self.last:
                self._make(base)
            needed = min(UNIT_FILE_BYTES, pages(stop - base))
            if needed > self.allocated:
                allocate(self._fds.write_fd(self._path(base)), self.allocated, needed - self.allocated)
                self.allocated = needed

    def _make(self, base: int) -> None:
        if self.last < 0:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            self.first = base
        fd = os.open(self._path(base), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, UNIT_FILE_BYTES)
        finally:
            os.close(fd)
        self.last, self.allocated = base, 0

    def give_up_reserve(self) -> int:
        """Free the memory that :meth:`reserve` took for a run that was then refused; returns the bytes."""
        if self.last < 0:
            return 0
        freed = 0
        end = self.next * UNIT_BYTES
        while self.last > self.first and self.last >= end:
            self._unlink(self.last)
            freed += self.allocated
            self.last, self.allocated = self.last - UNIT_FILE_BYTES, UNIT_FILE_BYTES
        kept = pages(end - self.last)
        if kept < self.allocated:
            self._cut(kept)
            freed += self.allocated - kept
            self.allocated = kept
        return freed

    def write(self, data: bytes) -> None:
        """Write the units of the next messages, whose places are reserved; ``next`` does not change."""
        at = self.next * UNIT_BYTES
        view = memoryview(data)
        while len(view):
            base = at - at % UNIT_FILE_BYTES
            piece = view[: base + UNIT_FILE_BYTES - at]
            write_all(self._fds.write_fd(self._path(base)), piece, at - base)
            at += len(piece)
            view = view[len(piece) :]

    def _cut(self, size: int) -> None:
        """Empty the last file from byte ``size`` on. Readers never look there: it is behind the acknowledged messages."""
        fd = self._fds.write_fd(self._path(self.last))
        os.ftruncate(fd, size)
        os.ftruncate(fd, UNIT_FILE_BYTES)

    def _unlink(self, base: int) -> None:
        path = self._path(base)
        self._fds.drop(path)
        os.unlink(path)

    # ------------------------------------------------------------ evicting

    def expire(self, floor: int) -> int:
        """Free files and pages whose units all point below ``floor``; returns the bytes."""
        freed = 0
        while self.first < self.last and self._is_below(self.first + UNIT_FILE_BYTES, floor):
            self._unlink(self.first)
            self.first += UNIT_FILE_BYTES
            freed += UNIT_FILE_BYTES - self.hole
            self.hole = 0
        # The last unit stays; for a queue of few units this returns without reading its file.
        stop = min((self.next - 1) * UNIT_BYTES - self.first, UNIT_FILE_BYTES) // PAGE_BYTES
        low, high = self.hole // PAGE_BYTES, stop
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_below(self.first + middle * PAGE_BYTES, floor):
                low = middle
            else:
                high = middle - 1
        end = low * PAGE_BYTES
        if end > self.hole and self._punch(end):
            freed += end - self.hole
            self.hole = end
        return freed

    def _is_below(self, end: int, floor: int) -> bool:
        """Whether the last unit that begins before byte ``end`` of the queue is written and points below ``floor``."""
        number = -(-end // UNIT_BYTES) - 1
        if number >= self.next:
            return False
        at = number * UNIT_BYTES
        base = at - at % UNIT_FILE_BYTES
        data = os.pread(self._fds.write_fd(self._path(base)), UNIT_BYTES, at - base)
        physical: int = UNIT_STRUCT.unpack(data)[0]
        return physical < floor

    def _punch(self, end: int) -> bool:
        """Return the pages of the first file up to ``end``; False on a file system without holes."""
        with mmap.mmap(self._fds.write_fd(self._path(self.first)), UNIT_FILE_BYTES) as mapped:
            try:
                mapped.madvise(mmap.MADV_REMOVE, self.hole, end - self.hole)
            except OSError:
                return False
        return True

    # ------------------------------------------------------------ taking over

    def reopen(self, bound: int) -> int:
        """Take over another process's files: units behind ``bound`` are cut, ``next`` is first. Returns the bytes."""
        bases = sorted(int(name) for name in os.listdir(self.folder))
        if not bases:
            return 0
        self.first = bases[0]
        while True:
            self.last = bases[-1]
            data = np.fromfile(self._path(self.last), UNIT)
            ends = data["physical_offset"].astype(np.int64) + data["size"]
            # A file may begin with a hole: the position of the last unit counts, not the number of units.
            written = np.flatnonzero((data["size"] > 0) & (ends <= bound))
            if len(written) or len(bases) == 1:
                break
            self._unlink(bases.pop())
        count = int(written[-1]) + 1 if len(written) else 0
        self.next = self.last // UNIT_BYTES + count
        self.allocated = pages(count * UNIT_BYTES)
        self._cut(count * UNIT_BYTES)
        there = np.flatnonzero(np.fromfile(self._path(self.first), np.uint8))
        self.hole = int(there[0]) // PAGE_BYTES * PAGE_BYTES if len(there) else 0
        if self.allocated:
            start = self.hole if self.first == self.last else 0
            os.posix_fallocate(self._fds.write_fd(self._path(self.last)), start, self.allocated - start)
        return (len(bases) - 1) * UNIT_FILE_BYTES + self.allocated - self.hole


def pages(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class TopicSegments:
    """One topic. ``segments``: allocated bytes of each existing segment, by its first offset, ascending."""

    __slots__ = ("appender", "folder", "head", "incoming_bytes", "map", "name", "queues", "refusal", "segments", "used")

    def __init__(self, name: str, folder: Path, head: SharedPage, appender: CommitLogAppender) -> None:
        self.name = name
        self.folder = folder
        self.head = head
        self.appender = appender
        self.queues: dict[int, UnitFiles] = {}
        self.segments: dict[int, int] = {}
        self.map: mmap.mmap | None = None  # the appender's map of the active segment
        self.incoming_bytes = 0  # size of the append under way
        self.refusal: DiskFullError | None = None  # why it got no segment
        self.used = PAGE_BYTES

    def segment_path(self, base: int) -> str:
        return f"{self.folder}/log/{segment_name(base)}"


FILLER_BYTES: Final = 8
_FIRST_PIECE_BYTES: Final = 64 * 1024
_LARGEST_PIECE_BYTES: Final = 1024 * 1024
NO_ROOM: Final = (*NO_SPACE, errno.ENOMEM)
_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module has no name for it yet
_BOUND, _TIMESTAMP, _INCARNATION = int(TopicWord.BOUND), int(TopicWord.TIMESTAMP), int(TopicWord.INCARNATION)
_STORED, _NODE_USED, _TOPIC_USED = int(NodeWord.STORED), int(NodeWord.USED), int(TopicWord.USED)


class Segments:
    """``used`` bytes of the budget are taken, by segments, units and pages; ``evicted`` counts segments."""

    page: SharedPage
    """The node's page. The store sets it before the first use of this object."""

    def __init__(self, view: TopicStoreView, topics: dict[str, TopicSegments], fds: FdCache) -> None:
        """``topics`` are the store's."""
        self._view = view
        self._folder = view.folder
        self._segment_bytes = view.segment_bytes
        self._budget = view.budget_bytes
        self._topics = topics
        self._fds = fds
        self.order: dict[tuple[str, int], None] = {}  # (topic, first offset) of every segment, oldest first
        self.used = PAGE_BYTES
        self.evicted = 0

    def reserve(self, one: TopicSegments, base: int, needed: int) -> None:
        """Allocate the first ``needed`` bytes of a segment. Raises DiskFullError."""
        have = one.segments[base]
        if needed <= have:
            return
        piece = min(max(have, _FIRST_PIECE_BYTES), _LARGEST_PIECE_BYTES)
        wanted = min(self._segment_bytes, pages(max(needed, have + piece)))
        self.allocate(one, self._fds.write_fd(one.segment_path(base)), have, wanted - have)
        one.segments[base] = wanted
        self._populate(one, have, wanted - have)

    def _populate(self, one: TopicSegments, start: int, size: int) -> None:
        """Make the kernel map pages at once, where it can: the stores that follow then do not fault page by page."""
        if one.map is not None and not one.map.closed:
            with contextlib.suppress(OSError):
                one.map.madvise(_POPULATE_WRITE, start, size)

    def open(self, one: TopicSegments, base: int) -> mmap.mmap | None:
        """The map that the appender writes to; None when there is no memory for it: then the appender undoes the run."""
        needed = min(self._segment_bytes, one.incoming_bytes + FILLER_BYTES)
        try:
            if base not in one.segments:
                self._make(one, base, pages(max(min(_FIRST_PIECE_BYTES, self._segment_bytes), needed)))
            elif base >= one.appender.position:
                # The segment was made for a run that then had to be undone; this run may be longer.
                self.reserve(one, base, needed)
            fd = os.open(one.segment_path(base), os.O_RDWR | os.O_CLOEXEC)
            try:
                one.map = mmap.mmap(fd, self._segment_bytes)
            finally:
                os.close(fd)
        except (DiskFullError, OSError) as error:
            one.refusal = error if isinstance(error, DiskFullError) else None
            self._view.log.error("no segment for a memory topic", topic=one.name, error=str(error))
            return None
        self._populate(one, 0, one.segments[base])
        return one.map

    def _make(self, one: TopicSegments, base: int, size: int) -> None:
        temporary = f"{one.folder}/log/.new"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self._segment_bytes)
            self.allocate(one, fd, 0, size)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        os.rename(temporary, one.segment_path(base))
        one.segments[base] = size
        self.order[one.name, base] = None

    def allocate(self, one: TopicSegments, fd: int, start: int, size: int) -> None:
        """Allocate bytes of a file for ``one``, evicting segments if necessary. Raises DiskFullError."""
        while self.used + size > self._budget:
            if not self._evict(one):
                raise self.full()
        while True:
            try:
                os.posix_fallocate(fd, start, size)
                break
            except OSError as error:
                # The memory file system is smaller than the budget, or other programs use it too.
                if error.errno not in NO_ROOM or not self._evict(one):
                    raise DiskFullError(f"no memory for memory topics: {error.strerror}", path=self._folder) from error
        self.account(one, size)

    def full(self) -> DiskFullError:
        """The error when nothing is left to evict."""
        queues = sum(len(one.queues) for one in self._topics.values())
        return DiskFullError(
            f"the {self._budget} bytes of memory.budget_bytes do not hold this message beside the pages that are never"
            f" evicted: one for each of {len(self._topics)} memory topics, and one or two for each of their {queues}"
            " queues in use; nothing is left to evict",
            path=self._folder,
        )

    def account(self, one: TopicSegments, size: int) -> None:
        """Count ``size`` more bytes, fewer when it is negative."""
        one.used += size
        self.used += size
        one.head.put(_TOPIC_USED, one.used)
        self.page.put(_NODE_USED, self.used)

    # ------------------------------------------------------------ evicting

    def _evict(self, wanting: TopicSegments) -> bool:
        """Evict one segment so that ``wanting`` can grow; False when there is none (see the package's text)."""
        # Bytes of the append under way are behind BOUND.
        active = wanting.head.get(_BOUND) // self._segment_bytes * self._segment_bytes
        oldest = next(iter(wanting.segments), active)
        if oldest < active:
            self.drop(wanting, oldest)
            return True
        for name, base in self.order:
            if name != wanting.name:
                self.drop(self._topics[name], base)
                return True
        return False

    def drop(self, one: TopicSegments, base: int) -> None:
        """Evict a topic's first segment. The active segment is evicted as a whole, and the topic continues behind it."""
        floor = base + self._segment_bytes
        one.head.put(TopicWord.FLOOR, floor)
        if one.appender.position < floor:
            one.appender.close()
            one.appender.position = floor
            one.map = None
            one.head.put(_BOUND, floor)
        if failpoints.ACTIVE:
            failpoints.hit("memory.before_unlink")
        path = one.segment_path(base)
        self._fds.drop(path)
        os.unlink(path)
        self.account(one, -one.segments.pop(base))
        self.order.pop((one.name, base), None)
        for units in one.queues.values():
            self.account(one, -units.expire(floor))
        self.evicted += 1
        one.head.put(TopicWord.EVICTED, one.head.get(TopicWord.EVICTED) + 1)
        self.page.put(NodeWord.EVICTED, self.evicted)


_MAX_OPEN_FILES: Final = 256


class MemoryStore:
    """See the package's text; the interface is :class:`commitmq.plugin.hookspecs.TopicStore`."""

    def open(self, view: TopicStoreView) -> None:
        """Take over the folder of an earlier process of the same life of the node, else begin empty."""
        self._view = view
        self._segment_bytes = view.segment_bytes
        self._budget = view.budget_bytes
        self._topics: dict[str, TopicSegments] = {}
        self._fds = FdCache(_MAX_OPEN_FILES)
        self._segments = Segments(view, self._topics, self._fds)
        self._folder = view.folder
        try:
            if survives(self._folder, view.life):
                check_private(self._folder)
                self._reopen()
            else:
                self._create()
        except OSError as error:
            raise StoreError(
                f"cannot keep memory topics here: {error.strerror} (memory.folder)", path=self._folder
            ) from error
        self._segments.page.put(NodeWord.BUDGET, self._budget)
        self._segments.page.put(NodeWord.SEGMENT_BYTES, self._segment_bytes)
        self._publish_use()

    def _create(self) -> None:
        if self._folder.exists() or self._folder.is_symlink():
            check_private(self._folder)
            shutil.rmtree(self._folder)
        self._folder.mkdir(mode=0o700)
        (self._folder / "topics").mkdir()
        self._segments.page = node_page(self._folder, create=True)
        # The folder gets its owner file last, and under its final name: a folder with an owner is complete.
        owner = {"store": os.fspath(self._view.store), "life": self._view.life}
        (self._folder / ".owner").write_bytes(orjson.dumps(owner))
        os.rename(self._folder / ".owner", self._folder / "owner")

    @property
    def used_bytes(self) -> int:
        return self._segments.used

    # ------------------------------------------------------------ appending

    def append_record(
        self, topic: str, incarnation: int, queue: int, record: bytearray, born_host_bytes: int
    ) -> Stored:
        """Store one record of ``CommitLogAppender.encode``. Raises as :meth:`append_run`."""
        one = self._topic(topic, incarnation)
        size = len(record)
        units = self._ready(one, queue, size, 1, size)
        codes = np.zeros(1, np.int64)
        ends = np.array([size], np.int64)
        tags_codes(np.frombuffer(record, np.uint8), ends, codes)
        done = self._appended(one, units, lambda: one.appender.append_record(record, units.next, born_host_bytes))
        data = UNIT_STRUCT.pack(done.physical_offset, size, int(codes[0]))
        return self._finish(one, units, data, 1, done)

    def append_run(self, topic: str, incarnation: int, queue: int, run: CheckedRun, born_host: bytes) -> Stored:
        """Store all of a checked run or nothing.

        Raises MessageIllegalError for a record that no segment holds, DiskFullError when nothing is left to evict. Any
        other exception leaves this object unusable: a new process takes over the acknowledged messages.
        """
        one = self._topic(topic, incarnation)
        ends = run.ends
        sizes = np.diff(ends, prepend=0)
        units = self._ready(one, queue, int(sizes.max()), run.count, int(ends[-1]))
        codes = np.zeros(run.count, np.int64)
        tags_codes(run.data, ends, codes)
        done = self._appended(one, units, lambda: one.appender.append_run(run, units.next, born_host))
        table = np.empty(run.count, UNIT)
        table["size"] = sizes
        table["tags_code"] = codes
        starts = ends - sizes
        first = 0
        for part in done.parts:
            stop = first + part.count
            table["physical_offset"][first:stop] = starts[first:stop] + (part.physical_offset - int(starts[first]))
            first = stop
        return self._finish(one, units, table.tobytes(), run.count, done)

    def _ready(self, one: TopicSegments, queue: int, largest: int, count: int, size: int) -> UnitFiles:
        """Reserve memory for ``count`` records of ``size`` bytes together, except in segments that do not exist yet."""
        if largest + FILLER_BYTES > self._segment_bytes:
            raise MessageIllegalError(
                f"the record has {largest} bytes and cannot fit a segment of {self._segment_bytes}"
                " (memory.segment_bytes)"
            )
        units = one.queues.get(queue)
        if units is None:
            units = one.queues[queue] = UnitFiles(one.folder / str(queue), self._fds)
        one.incoming_bytes = size
        try:
            units.reserve(count, lambda fd, start, taken: self._segments.allocate(one, fd, start, taken))
            position = one.appender.position
            base = position - position % self._segment_bytes
            if base in one.segments:
                self._segments.reserve(one, base, min(self._segment_bytes, position - base + size + FILLER_BYTES))
        except DiskFullError:
            self._segments.account(one, -units.give_up_reserve())
            raise
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFullError(f"no memory for memory topics: {error.strerror}", path=self._folder) from error
            raise
        return units

    def _appended(self, one: TopicSegments, units: UnitFiles, append: Callable[[], Appended]) -> Appended:
        one.refusal = None
        try:
            done = append()
        except SegmentUnavailableError:
            self._segments.account(one, -units.give_up_reserve())
            raise one.refusal or self._segments.full() from None
        if failpoints.ACTIVE:
            failpoints.hit("memory.after_append")
        return done

    def _finish(self, one: TopicSegments, units: UnitFiles, data: bytes, count: int, done: Appended) -> Stored:
        number = units.next
        units.write(data)
        if failpoints.ACTIVE:
            failpoints.hit("memory.before_publish")
        one.head.put(_TIMESTAMP, done.store_timestamp)
        one.head.put(_BOUND, done.end)
        units.next = number + count
        page = self._segments.page
        page.put(_STORED, page.get(_STORED) + one.incoming_bytes)
        return Stored(number, done)

    # ------------------------------------------------------------ topics

    def _topic(self, name: str, incarnation: int) -> TopicSegments:
        one = self._topics.get(name)
        if one is not None and one.head.get(_INCARNATION) != incarnation:
            self.forget(name)
            one = None
        if one is None:
            one = self._topics[name] = self._make_topic(name, incarnation)
            self._publish_use()
        return one

    def _make_topic(self, name: str, incarnation: int) -> TopicSegments:
        while self._segments.used + PAGE_BYTES > self._budget and self._segments.order:
            oldest, base = next(iter(self._segments.order))
            self._segments.drop(self._topics[oldest], base)
        if self._segments.used + PAGE_BYTES > self._budget:
            raise self._segments.full()
        temporary = self._folder / ".new"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(mode=0o700)
            (temporary / "log").mkdir()
            head = topic_page(temporary, create=True)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFullError(f"no memory for memory topics: {error.strerror}", path=self._folder) from error
            raise
        head.put(_INCARNATION, incarnation)
        head.put(_TOPIC_USED, PAGE_BYTES)
        head.put(TopicWord.STATE, TopicState.LIVE)
        os.rename(temporary, self._folder / "topics" / name)
        self._segments.used += PAGE_BYTES
        return self._attach(name, head, 0)

    def _attach(self, name: str, head: SharedPage, position: int) -> TopicSegments:
        def open_segment(base: int) -> mmap.mmap | None:
            return self._segments.open(one, base)

        appender = CommitLogAppender(
            position,
            segment_bytes=self._segment_bytes,
            open_segment=open_segment,
            store_host=self._view.store_host,
            max_message_bytes=self._view.config.commit_log.max_message_bytes,
            properties_crc=self._view.config.commit_log.append_properties_crc,
            last_timestamp=head.get(_TIMESTAMP),
        )
        one = TopicSegments(name, self._folder / "topics" / name, head, appender)
        return one

    def forget(self, topic: str) -> None:
        """A topic was deleted: its memory is free when the last reader unmaps it."""
        one = self._topics.pop(topic, None)
        if one is None:
            return
        one.appender.close()
        one.head.put(TopicWord.STATE, TopicState.DELETED)
        one.head.close()
        for key in [key for key in self._segments.order if key[0] == topic]:
            del self._segments.order[key]
        self._segments.used -= one.used
        self._fds.close()
        grave = self._folder / ".deleted"
        shutil.rmtree(grave, ignore_errors=True)
        os.rename(one.folder, grave)
        shutil.rmtree(grave)
        self._segments.evicted += len(one.segments)
        self._segments.page.put(NodeWord.EVICTED, self._segments.evicted)
        self._publish_use()

    def topics(self) -> dict[str, int]:
        """Topics that hold memory, with their incarnations."""
        return {name: one.head.get(_INCARNATION) for name, one in self._topics.items()}

    def _publish_use(self) -> None:
        self._segments.page.put(_NODE_USED, self._segments.used)
        self._segments.page.put(NodeWord.TOPICS, len(self._topics))

    def close(self, *, keep: bool) -> None:
        """The process ends. Without ``keep`` the node ends too, and all messages are deleted."""
        self._fds.close()
        for one in self._topics.values():
            one.appender.close()
            one.head.close()
        self._segments.page.close()
        if not keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ taking over

    def _reopen(self) -> None:
        self._segments.page = node_page(self._folder, writable=True)
        self._segments.evicted = self._segments.page.get(NodeWord.EVICTED)
        if self._segments.page.get(NodeWord.SEGMENT_BYTES) != self._segment_bytes:
            # The previous process died before it recorded its segment size, or the configuration changed: nothing can
            # be read.
            self._segments.page.close()
            self._create()
            return
        ages: dict[tuple[str, int], int] = {}
        for unfinished in (".new", ".deleted"):
            shutil.rmtree(self._folder / unfinished, ignore_errors=True)
        for folder in sorted((self._folder / "topics").iterdir()):
            try:
                self._reopen_topic(folder, ages)
            except (StoreError, OSError) as error:
                self._view.log.error(
                    "a memory topic cannot be taken over and is lost", topic=folder.name, error=str(error)
                )
                self._topics.pop(folder.name, None)
                self._fds.close()
                shutil.rmtree(folder)
        self._segments.order = dict.fromkeys(sorted(ages, key=lambda key: ages[key]))
        self._segments.used = PAGE_BYTES + sum(one.used for one in self._topics.values())
        self._view.log.info("memory topics taken over", topics=len(self._topics), used_bytes=self._segments.used)

    def _reopen_topic(self, folder: Path, ages: dict[tuple[str, int], int]) -> None:
        head = topic_page(folder, writable=True)
        if head.get(TopicWord.STATE) != TopicState.LIVE:
            head.close()
            shutil.rmtree(folder)
            return
        floor = head.get(TopicWord.FLOOR)
        bound = max(head.get(_BOUND), floor)
        head.put(_BOUND, bound)
        one = self._topics[folder.name] = self._attach(folder.name, head, bound)
        for name in sorted(os.listdir(folder / "log")):
            path = folder / "log" / name
            base = int(name) if name.isdecimal() else -1
            if not floor <= base < bound:
                path.unlink()
                continue
            one.segments[base] = allocated = os.stat(path).st_blocks * 512
            one.used += allocated
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), self._segment_bytes) as mapped:
                ages[folder.name, base] = _store_timestamp(mapped)
                start = max(0, bound - base)
                if start < allocated:
                    # A stale record behind the end would join a new one of matching length.
                    mapped[start:allocated] = bytes(allocated - start)
        for entry in os.listdir(folder):
            if entry.isdecimal():
                units = one.queues[int(entry)] = UnitFiles(folder / entry, self._fds)
                one.used += units.reopen(bound)
                one.used -= units.expire(floor)
        head.put(_TOPIC_USED, one.used)


def _store_timestamp(segment: mmap.mmap) -> int:
    """Store timestamp (ms) of a segment's first record: the segment's age."""
    born_v6 = segment[SYS_FLAG_OFFSET + 3] & SysFlag.BORN_HOST_V6
    at = STORE_TIMESTAMP_OFFSET + (HOST_V6_BYTES if born_v6 else HOST_BYTES)
    return int.from_bytes(segment[at : at + 8], "big", signed=True)


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    """The built-in store of memory topics."""
    if not config.memory.enable:
        return []
    return [DispatcherSpec("memory", "commitmq_dispatchers.memory:MemoryStore", stores_topics=True)]
