"""Memory topics: a separate store for topics with ``storage.type=memory``, under a byte budget.

Nothing is dispatched to this dispatcher: the node hands it the runs of its topics (hookspecs.TopicStore), and these
never reach the CommitLog. commitmq.store.memory.memory_files describes the files and what readers may see.

An append has this order, and dying after any step is harmless: memory is reserved (fallocate: a store into a missing
page would be SIGBUS); records are copied, their first bytes last; units are written; TIMESTAMP and BOUND move. Only
then the node acknowledges. A restarted process continues at BOUND, which alone decides: bytes behind it are zeroed,
units that point behind it are cut, and the next queue offset is the number of the first cut unit.

Budget: allocated memory counts. Segments grow in pieces, unit files in pages, and each topic has one page. Before an
allocation that would exceed the budget, segments are evicted until it fits:

1. the oldest segment of the topic that needs memory, unless it is the active one: a topic that takes much pays itself;
2. else the segment of all topics that was begun first, including the active one of a topic that went quiet: such a
   topic is then empty, and continues with the next segment and the next queue offset.
   is empty then, and goes on with the next segment and the next queue offset.

Units go with the segments that they point into (memory_units). Never evicted are one page for each topic and, for each
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
from commitmq.files.fd_cache import FdCache
from commitmq.files.no_space import NO_SPACE
from commitmq.format.file_names import segment_name
from commitmq.kernels.units import tags_codes
from commitmq.plugin.hookspecs import DispatcherSpec, Stored, TopicStoreView, hookimpl
from commitmq.store.log.append import Appended, CommitLogAppender, SegmentUnavailableError
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError
from commitmq.store.memory.memory_files import NodeWord, TopicState, TopicWord, node_page, survives, topic_page
from commitmq.store.memory.shared_memory import PAGE_BYTES, SharedPage, check_private
from commitmq_dispatchers.memory_units import UNIT, UNIT_STRUCT, UnitFiles, pages

_FILLER_BYTES: Final = 8
_FIRST_PIECE_BYTES: Final = 64 * 1024
_LARGEST_PIECE_BYTES: Final = 1024 * 1024
_MAX_OPEN_FILES: Final = 256
_NO_ROOM: Final = (*NO_SPACE, errno.ENOMEM)
_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module has no name for it yet
_BOUND, _TIMESTAMP, _INCARNATION = int(TopicWord.BOUND), int(TopicWord.TIMESTAMP), int(TopicWord.INCARNATION)
_STORED, _NODE_USED, _TOPIC_USED = int(NodeWord.STORED), int(NodeWord.USED), int(TopicWord.USED)


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    """The built-in store of memory topics."""
    if not config.memory.enable:
        return []
    return [DispatcherSpec("memory", "commitmq_dispatchers.memory:MemoryStore", stores_topics=True)]


class _Topic:
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


class MemoryStore:
    """See the module's text; the interface is :class:`commitmq.plugin.hookspecs.TopicStore`."""

    def open(self, view: TopicStoreView) -> None:
        """Take over the folder of a former process of the same life of the node, else begin empty."""
        self._view = view
        self._segment_bytes = view.segment_bytes
        self._budget = view.budget_bytes
        self._topics: dict[str, _Topic] = {}
        self._order: dict[tuple[str, int], None] = {}  # (topic, first offset) of every segment, oldest first
        self._fds = FdCache(_MAX_OPEN_FILES)
        self._used = PAGE_BYTES
        self._evicted = 0
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
        self._page.put(NodeWord.BUDGET, self._budget)
        self._page.put(NodeWord.SEGMENT_BYTES, self._segment_bytes)
        self._publish_use()

    def _create(self) -> None:
        if self._folder.exists() or self._folder.is_symlink():
            check_private(self._folder)
            shutil.rmtree(self._folder)
        self._folder.mkdir(mode=0o700)
        (self._folder / "topics").mkdir()
        self._page = node_page(self._folder, create=True)
        # The folder gets its owner file last, and under its final name: a folder with an owner is complete.
        owner = {"store": os.fspath(self._view.store), "life": self._view.life}
        (self._folder / ".owner").write_bytes(orjson.dumps(owner))
        os.rename(self._folder / ".owner", self._folder / "owner")

    @property
    def used_bytes(self) -> int:
        """Memory taken, in bytes."""
        return self._used

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

    def _ready(self, one: _Topic, queue: int, largest: int, count: int, size: int) -> UnitFiles:
        """Reserve memory for ``count`` records of ``size`` bytes together, except in segments that do not exist yet."""
        if largest + _FILLER_BYTES > self._segment_bytes:
            raise MessageIllegalError(
                f"the record has {largest} bytes and cannot fit a segment of {self._segment_bytes}"
                " (memory.segment_bytes)"
            )
        units = one.queues.get(queue)
        if units is None:
            units = one.queues[queue] = UnitFiles(one.folder / str(queue), self._fds)
        one.incoming_bytes = size
        try:
            units.reserve(count, lambda fd, start, taken: self._allocate(one, fd, start, taken))
            position = one.appender.position
            base = position - position % self._segment_bytes
            if base in one.segments:
                self._reserve_segment(one, base, min(self._segment_bytes, position - base + size + _FILLER_BYTES))
        except DiskFullError:
            self._account(one, -units.give_up_reserve())
            raise
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise DiskFullError(f"no memory for memory topics: {error.strerror}", path=self._folder) from error
            raise
        return units

    def _appended(self, one: _Topic, units: UnitFiles, append: Callable[[], Appended]) -> Appended:
        one.refusal = None
        try:
            done = append()
        except SegmentUnavailableError:
            self._account(one, -units.give_up_reserve())
            raise one.refusal or self._full() from None
        if failpoints.ACTIVE:
            failpoints.hit("memory.after_append")
        return done

    def _finish(self, one: _Topic, units: UnitFiles, data: bytes, count: int, done: Appended) -> Stored:
        number = units.next
        units.write(data)
        if failpoints.ACTIVE:
            failpoints.hit("memory.before_publish")
        one.head.put(_TIMESTAMP, done.store_timestamp)
        one.head.put(_BOUND, done.end)
        units.next = number + count
        self._page.put(_STORED, self._page.get(_STORED) + one.incoming_bytes)
        return Stored(number, done)

    # ------------------------------------------------------------ memory

    def _reserve_segment(self, one: _Topic, base: int, needed: int) -> None:
        """Allocate the first ``needed`` bytes of a segment. Raises DiskFullError."""
        have = one.segments[base]
        if needed <= have:
            return
        piece = min(max(have, _FIRST_PIECE_BYTES), _LARGEST_PIECE_BYTES)
        wanted = min(self._segment_bytes, pages(max(needed, have + piece)))
        self._allocate(one, self._fds.write_fd(one.segment_path(base)), have, wanted - have)
        one.segments[base] = wanted
        self._populate(one, have, wanted - have)

    def _populate(self, one: _Topic, start: int, size: int) -> None:
        """Make the kernel map pages at once, where it can: the stores that follow then do not fault page by page."""
        if one.map is not None and not one.map.closed:
            with contextlib.suppress(OSError):
                one.map.madvise(_POPULATE_WRITE, start, size)

    def _open_segment(self, one: _Topic, base: int) -> mmap.mmap | None:
        """The map that the appender writes to; None when there is no memory for it: then the appender undoes the run."""
        needed = min(self._segment_bytes, one.incoming_bytes + _FILLER_BYTES)
        try:
            if base not in one.segments:
                self._make_segment(one, base, pages(max(min(_FIRST_PIECE_BYTES, self._segment_bytes), needed)))
            elif base >= one.appender.position:
                # The segment was made for a run that then had to be undone; this run may be longer.
                self._reserve_segment(one, base, needed)
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

    def _make_segment(self, one: _Topic, base: int, size: int) -> None:
        temporary = f"{one.folder}/log/.new"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self._segment_bytes)
            self._allocate(one, fd, 0, size)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        os.rename(temporary, one.segment_path(base))
        one.segments[base] = size
        self._order[one.name, base] = None

    def _allocate(self, one: _Topic, fd: int, start: int, size: int) -> None:
        """Allocate bytes of a file for ``one``, evicting segments if necessary. Raises DiskFullError."""
        while self._used + size > self._budget:
            if not self._evict(one):
                raise self._full()
        while True:
            try:
                os.posix_fallocate(fd, start, size)
                break
            except OSError as error:
                # The memory file system is smaller than the budget, or other programs use it too.
                if error.errno not in _NO_ROOM or not self._evict(one):
                    raise DiskFullError(f"no memory for memory topics: {error.strerror}", path=self._folder) from error
        self._account(one, size)

    def _full(self) -> DiskFullError:
        queues = sum(len(one.queues) for one in self._topics.values())
        return DiskFullError(
            f"the {self._budget} bytes of memory.budget_bytes do not hold this message beside what is never evicted: a page"
            f" for each of {len(self._topics)} memory topics, and one or two for each of their {queues} queues in use;"
            " nothing is left to evict",
            path=self._folder,
        )

    def _account(self, one: _Topic, size: int) -> None:
        one.used += size
        self._used += size
        one.head.put(_TOPIC_USED, one.used)
        self._page.put(_NODE_USED, self._used)

    # ------------------------------------------------------------ evicting

    def _evict(self, wanting: _Topic) -> bool:
        """Evict one segment so that ``wanting`` can grow; False when there is none (see the module's text)."""
        # Bytes of the append under way are behind BOUND.
        active = wanting.head.get(_BOUND) // self._segment_bytes * self._segment_bytes
        oldest = next(iter(wanting.segments), active)
        if oldest < active:
            self._drop_segment(wanting, oldest)
            return True
        for name, base in self._order:
            if name != wanting.name:
                self._drop_segment(self._topics[name], base)
                return True
        return False

    def _drop_segment(self, one: _Topic, base: int) -> None:
        """Evict a topic's first segment. If it is the active one, all of it goes, and the topic continues behind it."""
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
        self._account(one, -one.segments.pop(base))
        self._order.pop((one.name, base), None)
        for units in one.queues.values():
            self._account(one, -units.expire(floor))
        self._evicted += 1
        one.head.put(TopicWord.EVICTED, one.head.get(TopicWord.EVICTED) + 1)
        self._page.put(NodeWord.EVICTED, self._evicted)

    # ------------------------------------------------------------ topics

    def _topic(self, name: str, incarnation: int) -> _Topic:
        one = self._topics.get(name)
        if one is not None and one.head.get(_INCARNATION) != incarnation:
            self.forget(name)
            one = None
        if one is None:
            one = self._topics[name] = self._make_topic(name, incarnation)
            self._publish_use()
        return one

    def _make_topic(self, name: str, incarnation: int) -> _Topic:
        while self._used + PAGE_BYTES > self._budget and self._order:
            oldest, base = next(iter(self._order))
            self._drop_segment(self._topics[oldest], base)
        if self._used + PAGE_BYTES > self._budget:
            raise self._full()
        temporary = self._folder / ".new"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(mode=0o700)
            (temporary / "log").mkdir()
            head = topic_page(temporary, create=True)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise DiskFullError(f"no memory for memory topics: {error.strerror}", path=self._folder) from error
            raise
        head.put(_INCARNATION, incarnation)
        head.put(_TOPIC_USED, PAGE_BYTES)
        head.put(TopicWord.STATE, TopicState.LIVE)
        os.rename(temporary, self._folder / "topics" / name)
        self._used += PAGE_BYTES
        return self._attach(name, head, 0)

    def _attach(self, name: str, head: SharedPage, position: int) -> _Topic:
        def open_segment(base: int) -> mmap.mmap | None:
            return self._open_segment(one, base)

        appender = CommitLogAppender(
            position,
            segment_bytes=self._segment_bytes,
            open_segment=open_segment,
            store_host=self._view.store_host,
            max_message_bytes=self._view.config.commit_log.max_message_bytes,
            properties_crc=self._view.config.commit_log.append_properties_crc,
            last_timestamp=head.get(_TIMESTAMP),
        )
        one = _Topic(name, self._folder / "topics" / name, head, appender)
        return one

    def forget(self, topic: str) -> None:
        """A topic was deleted: its memory is free when the last reader unmaps it."""
        one = self._topics.pop(topic, None)
        if one is None:
            return
        one.appender.close()
        one.head.put(TopicWord.STATE, TopicState.DELETED)
        one.head.close()
        for key in [key for key in self._order if key[0] == topic]:
            del self._order[key]
        self._used -= one.used
        self._fds.close()
        grave = self._folder / ".deleted"
        shutil.rmtree(grave, ignore_errors=True)
        os.rename(one.folder, grave)
        shutil.rmtree(grave)
        self._evicted += len(one.segments)
        self._page.put(NodeWord.EVICTED, self._evicted)
        self._publish_use()

    def topics(self) -> dict[str, int]:
        """Topics that hold memory, with their incarnations."""
        return {name: one.head.get(_INCARNATION) for name, one in self._topics.items()}

    def _publish_use(self) -> None:
        self._page.put(_NODE_USED, self._used)
        self._page.put(NodeWord.TOPICS, len(self._topics))

    def close(self, *, keep: bool) -> None:
        """The process ends. Without ``keep`` the node ends too, and all messages are deleted."""
        self._fds.close()
        for one in self._topics.values():
            one.appender.close()
            one.head.close()
        self._page.close()
        if not keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ taking over

    def _reopen(self) -> None:
        self._page = node_page(self._folder, writable=True)
        self._evicted = self._page.get(NodeWord.EVICTED)
        if self._page.get(NodeWord.SEGMENT_BYTES) != self._segment_bytes:
            # The former process died before it recorded its segment size, or the configuration changed: nothing can be
            # read.
            self._page.close()
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
        self._order = dict.fromkeys(sorted(ages, key=lambda key: ages[key]))
        self._used = PAGE_BYTES + sum(one.used for one in self._topics.values())
        self._view.log.info("memory topics taken over", topics=len(self._topics), used_bytes=self._used)

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
    born_v6 = segment[39] & 0x10
    return int.from_bytes(segment[68:76] if born_v6 else segment[56:64], "big", signed=True)
