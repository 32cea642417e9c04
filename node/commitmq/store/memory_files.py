"""Memory topics: the files of a memory file system that replace CommitLog and ConsumeQueues for these topics.

    FOLDER/owner                     owner of the folder: the store's root and the node's life (node_files.node_life)
    FOLDER/node                      a page of NodeWord
    FOLDER/topics/TOPIC/head         a page of TopicWord
    …/TOPIC/log/<20 digits>          segments of that topic's own log, ordinary records; physicalOffset counts in it
    …/TOPIC/<queue>/<20 digits>      ConsumeQueue units that point into that log, UNIT_FILE_BYTES a file

One process writes (the memory dispatcher), any number read. A page consists of single aligned 8-byte words, all written
by that one process, as in the control block. A reader may see [FLOOR, BOUND) of a topic's log: BOUND moves after
records and units are in place, FLOOR moves before anything below it is deleted.

Units that point below FLOOR are returned in whole pages, so a queue's first file may begin with a hole. No memory is
ever reused: an evicted segment is unlinked, and a reader that has it mapped still reads the same bytes. So a reader
needs no second check after copying; a late reader does not find the file (OffsetOutOfRangeError) and asks again. In
return a reader must soon unmap evicted segments, because their memory is not free before that:
:meth:`MemoryTopics.release_evicted`.

The folder is outside the store (under /dev/shm), where the store's :func:`~commitmq.store.shared_memory.claim`
put it, open to its owner only. It is removed with the node; the next node recognises the folder of a killed one by its
``owner`` file and empties it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq.errors import OffsetOutOfRangeError
from commitmq.files.fd_cache import FdCache
from commitmq.files.mapped_file import MappedFileQueue
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.shared_memory import PAGE_BYTES, SharedPage

UNIT_FILE_BYTES: Final = 20 * PAGE_BYTES  # whole pages of whole units: 4096 of them
_NODE_MAGIC: Final = 0x434D_514D_4E00_0001
_TOPIC_MAGIC: Final = 0x434D_514D_5400_0001
_MAX_OPEN_TOPICS: Final = 256
_MAX_MAPPED: Final = 4  # of one topic
_MAX_OPEN_FILES: Final = 128  # of all topics together


class NodeWord(IntEnum):
    """Words of the node's page. Sizes in bytes."""

    MAGIC = 0
    BUDGET = 1  # limit for all topics together
    USED = 2  # use of all topics together: segments, units and pages
    SEGMENT_BYTES = 3
    EVICTED = 4  # segments evicted so far
    STORED = 5  # bytes stored so far: moves with every append, so readers can tell whether anything is new
    TOPICS = 6


class TopicWord(IntEnum):
    """Words of a topic's page. Offsets in bytes of the topic's own log."""

    MAGIC = 0
    STATE = 1  # TopicState
    BOUND = 2  # everything below is complete and has its units
    FLOOR = 3  # everything below is evicted
    TIMESTAMP = 4  # store timestamp (ms) of the newest record, stored before BOUND
    INCARNATION = 5  # when the topic was made (ms): differs for a topic of the same name made after a deletion
    USED = 6  # bytes of memory that the topic uses
    EVICTED = 7  # segments of the topic evicted so far


class TopicState(IntEnum):
    """State of a topic. Readers keep a deleted topic's page mapped; it tells them to look for a new one of the name."""

    LIVE = 1
    DELETED = 2


def node_page(folder: Path, *, create: bool = False, writable: bool = False) -> SharedPage:
    """The page of the node. Errors as :class:`SharedPage`."""
    return SharedPage(folder / "node", _NODE_MAGIC, create=create, writable=writable)


def topic_page(topic_folder: Path, *, create: bool = False, writable: bool = False) -> SharedPage:
    """The page of one topic. Errors as :class:`SharedPage`."""
    return SharedPage(topic_folder / "head", _TOPIC_MAGIC, create=create, writable=writable)


# ---------------------------------------------------------------- the folder and its owner


def owner_of(folder: Path) -> dict[str, Any]:
    """The content of the ``owner`` file: ``store`` and ``life``; an empty dict when there is no file."""
    try:
        data = orjson.loads((folder / "owner").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return data if isinstance(data, dict) else {}


def survives(folder: Path, life: str) -> bool:
    """True when ``folder`` holds messages that an earlier process of this life of the node stored."""
    return bool(life) and owner_of(folder).get("life") == life


# ---------------------------------------------------------------- reading


class _MemorySegments(MappedFileQueue):
    """Segments computed from the topic's page, because a folder's listing would be a moment old."""

    def __init__(self, folder: Path, segment_bytes: int, head: SharedPage) -> None:
        self._head = head
        super().__init__(folder, segment_bytes, max_mapped=_MAX_MAPPED)

    def refresh(self) -> None:
        """Give up the maps of evicted segments."""
        floor = self._head.get(TopicWord.FLOOR)
        for base in [base for base in self._maps if base < floor]:
            self._retire(self._maps.pop(base))
        self._give_up_surplus()

    @property
    def min_offset(self) -> int:
        return self._head.get(TopicWord.FLOOR)

    @property
    def end_offset(self) -> int:
        return self._head.get(TopicWord.BOUND)

    def base_of(self, offset: int) -> int:
        if not self.min_offset <= offset < self.end_offset:
            raise OffsetOutOfRangeError(f"offset {offset} is not in memory any more", path=self.folder)
        return offset - offset % self.file_bytes


class MemoryTopic:
    """One topic, as a reader sees it."""

    def __init__(self, folder: Path, name: str, segment_bytes: int, fds: FdCache) -> None:
        """Raises FileNotFoundError while the topic has no messages."""
        self.head = topic_page(folder / name)
        self.log = CommitLog(
            folder / name / "log",
            segment_bytes,
            files=_MemorySegments(folder / name / "log", segment_bytes, self.head),
        )
        self.queues = QueueReader(self.log, folder, UNIT_FILE_BYTES, fds=fds, holes=True)
        self.incarnation = self.head.get(TopicWord.INCARNATION)
        self._seen_floor = self.floor

    @property
    def bound(self) -> int:
        return self.head.get(TopicWord.BOUND)

    @property
    def floor(self) -> int:
        return self.head.get(TopicWord.FLOOR)

    @property
    def is_live(self) -> bool:
        return self.head.get(TopicWord.STATE) == TopicState.LIVE

    def release_evicted(self) -> None:
        """Unmap evicted segments."""
        if self.floor != self._seen_floor:
            self._seen_floor = self.floor
            self.log.refresh()

    def close(self) -> None:
        self.log.close()
        self.head.close()


class MemoryTopics:
    """All memory topics, as a reader sees them; at most _MAX_OPEN_TOPICS are kept open. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Opens nothing before it is needed: the folder may come later, or never."""
        self.folder = folder
        self._page: SharedPage | None = None
        self._inode = 0
        self._open: OrderedDict[str, MemoryTopic] = OrderedDict()
        self._evicted = 0
        self._fds = FdCache(_MAX_OPEN_FILES)

    def get(self, name: str, incarnation: int) -> MemoryTopic | None:
        """The topic; None while it has no messages. Raises StoreError when it cannot be read."""
        found = self._open.get(name)
        if found is not None:
            if found.is_live and found.incarnation == incarnation:
                self._open.move_to_end(name)
                return found
            self._open.pop(name).close()
        page = self.page()
        if page is None:
            return None
        try:
            found = MemoryTopic(self.folder / "topics", name, page.get(NodeWord.SEGMENT_BYTES), self._fds)
        except FileNotFoundError:
            return None
        if not found.is_live or found.incarnation != incarnation:
            found.close()
            return None
        self._open[name] = found
        if len(self._open) > _MAX_OPEN_TOPICS:
            self._open.popitem(last=False)[1].close()
        return found

    def page(self) -> SharedPage | None:
        """The node's page; None while there is no memory process. A recreated page is mapped again."""
        try:
            inode = os.stat(self.folder / "node").st_ino
        except OSError:
            return None
        if self._page is None or inode != self._inode:
            self.close()
            try:
                self._page, self._inode = node_page(self.folder), inode
            except FileNotFoundError:
                return None
        return self._page

    def stored(self) -> int:
        """A number that moves with every message stored in any memory topic."""
        return 0 if self._page is None else self._page.get(NodeWord.STORED)

    def release_evicted(self) -> None:
        """Unmap evicted segments and close deleted topics; call it once a second."""
        if self._page is None or self.page() is None:
            return
        for name in [name for name, one in self._open.items() if not one.is_live]:
            self._open.pop(name).close()
        evicted = self._page.get(NodeWord.EVICTED)
        if evicted != self._evicted:
            self._evicted = evicted
            self._fds.close()  # a deleted unit file is gone only when no process has it open
            for one in self._open.values():
                one.release_evicted()

    def close(self) -> None:
        self._fds.close()
        while self._open:
            self._open.popitem()[1].close()
        if self._page is not None:
            self._page.close()
            self._page = None
