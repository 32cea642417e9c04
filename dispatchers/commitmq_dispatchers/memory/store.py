"""The store of memory topics: appends, topics that come and go, the take-over from a former process."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from commitmq import failpoints
from commitmq.errors import DiskFullError, StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import HOST_BYTES, HOST_V6_BYTES, STORE_TIMESTAMP_OFFSET, SYS_FLAG_OFFSET, SysFlag
from commitmq.format.units import UNIT, UNIT_STRUCT
from commitmq.kernels.compiled import tags_codes
from commitmq.plugin.hookspecs import Stored, TopicStoreView
from commitmq.store.log.append import Appended, CommitLogAppender, SegmentUnavailableError
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError
from commitmq.store.memory.memory_files import NodeWord, TopicState, TopicWord, node_page, survives, topic_page
from commitmq.store.memory.shared_memory import PAGE_BYTES, SharedPage, check_private
from commitmq_dispatchers.memory.segments import FILLER_BYTES, NO_ROOM, Segments, Topic
from commitmq_dispatchers.memory.units import UnitFiles

_MAX_OPEN_FILES: Final = 256
_BOUND, _TIMESTAMP, _INCARNATION = int(TopicWord.BOUND), int(TopicWord.TIMESTAMP), int(TopicWord.INCARNATION)
_STORED, _NODE_USED, _TOPIC_USED = int(NodeWord.STORED), int(NodeWord.USED), int(TopicWord.USED)


class MemoryStore:
    """See the package's text; the interface is :class:`commitmq.plugin.hookspecs.TopicStore`."""

    def open(self, view: TopicStoreView) -> None:
        """Take over the folder of a former process of the same life of the node, else begin empty."""
        self._view = view
        self._segment_bytes = view.segment_bytes
        self._budget = view.budget_bytes
        self._topics: dict[str, Topic] = {}
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
        """Memory taken, in bytes."""
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

    def _ready(self, one: Topic, queue: int, largest: int, count: int, size: int) -> UnitFiles:
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

    def _appended(self, one: Topic, units: UnitFiles, append: Callable[[], Appended]) -> Appended:
        one.refusal = None
        try:
            done = append()
        except SegmentUnavailableError:
            self._segments.account(one, -units.give_up_reserve())
            raise one.refusal or self._segments.full() from None
        if failpoints.ACTIVE:
            failpoints.hit("memory.after_append")
        return done

    def _finish(self, one: Topic, units: UnitFiles, data: bytes, count: int, done: Appended) -> Stored:
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

    def _topic(self, name: str, incarnation: int) -> Topic:
        one = self._topics.get(name)
        if one is not None and one.head.get(_INCARNATION) != incarnation:
            self.forget(name)
            one = None
        if one is None:
            one = self._topics[name] = self._make_topic(name, incarnation)
            self._publish_use()
        return one

    def _make_topic(self, name: str, incarnation: int) -> Topic:
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

    def _attach(self, name: str, head: SharedPage, position: int) -> Topic:
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
        one = Topic(name, self._folder / "topics" / name, head, appender)
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
            # The former process died before it recorded its segment size, or the configuration changed: nothing can be
            # read.
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
