"""The segments of all memory topics, under the byte budget: allocation, and eviction to make room.

One memory topic in its process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import Final

from commitmq import failpoints
from commitmq.errors import DiskFullError
from commitmq.files.fd_cache import FdCache
from commitmq.files.no_space import NO_SPACE
from commitmq.format.file_names import segment_name
from commitmq.plugin.hookspecs import TopicStoreView
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.memory.memory_files import NodeWord, TopicWord
from commitmq.store.memory.shared_memory import PAGE_BYTES, SharedPage
from commitmq_dispatchers.memory.units import UnitFiles, pages


class Topic:
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
_BOUND, _TOPIC_USED, _NODE_USED = int(TopicWord.BOUND), int(TopicWord.USED), int(NodeWord.USED)


class Segments:
    """``used`` bytes of the budget are taken, by segments, units and pages; ``evicted`` counts segments."""

    page: SharedPage
    """The node's page. The store sets it before the first use of this object."""

    def __init__(self, view: TopicStoreView, topics: dict[str, Topic], fds: FdCache) -> None:
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

    def reserve(self, one: Topic, base: int, needed: int) -> None:
        """Allocate the first ``needed`` bytes of a segment. Raises DiskFullError."""
        have = one.segments[base]
        if needed <= have:
            return
        piece = min(max(have, _FIRST_PIECE_BYTES), _LARGEST_PIECE_BYTES)
        wanted = min(self._segment_bytes, pages(max(needed, have + piece)))
        self.allocate(one, self._fds.write_fd(one.segment_path(base)), have, wanted - have)
        one.segments[base] = wanted
        self._populate(one, have, wanted - have)

    def _populate(self, one: Topic, start: int, size: int) -> None:
        """Make the kernel map pages at once, where it can: the stores that follow then do not fault page by page."""
        if one.map is not None and not one.map.closed:
            with contextlib.suppress(OSError):
                one.map.madvise(_POPULATE_WRITE, start, size)

    def open(self, one: Topic, base: int) -> mmap.mmap | None:
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

    def _make(self, one: Topic, base: int, size: int) -> None:
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

    def allocate(self, one: Topic, fd: int, start: int, size: int) -> None:
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

    def account(self, one: Topic, size: int) -> None:
        """Count ``size`` more bytes, fewer when it is negative."""
        one.used += size
        self.used += size
        one.head.put(_TOPIC_USED, one.used)
        self.page.put(_NODE_USED, self.used)

    # ------------------------------------------------------------ evicting

    def _evict(self, wanting: Topic) -> bool:
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

    def drop(self, one: Topic, base: int) -> None:
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
