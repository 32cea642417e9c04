"""Finds messages by key, unique key or tag in the index files (spec 4.4), without owning a file.

Another process writes; this one maps the files read-only. An item only says that some key with this hash was there, so
every candidate is compared with the real record before it counts: topic and key byte for byte, store time to the
millisecond. RocketMQ returns every record with the hash ("Aa" and "BB" have the same) and counts it against the limit.

Files are walked newest first, and so are chains, so results come newest first and no record comes twice: physical
offsets must fall from one to the next, also across files and requests. Two numbers, passed with every call, decide
which records may be shown: ``bound`` (records that end at or below it) and ``floor`` (records that begin at or above
it).

One search examines a bounded number of items for a bounded time. Its end is a :class:`Cursor`, with which the next
search continues at the same item instead of walking the chain from its newest one.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import OffsetOutOfRangeError, StoreError
from commitmq.files import disk
from commitmq.format.index import (
    HEADER_BYTES,
    IndexHeader,
    IndexShape,
    check_file_size,
    header_of,
    list_index_files,
)
from commitmq.format.java import java_string_hash
from commitmq.kernels import codes, compiled
from commitmq.kernels.compiled import walk_key_chain
from commitmq.store.index.index_files import IndexChain
from commitmq.store.log.commit_log import CommitLog

MAX_MAPPED_FILES: Final = 16
SLICE_MS: Final = 50
_MAX_OFFSET: Final = (1 << 63) - 1
_CHUNK: Final = 128
_SLICE_ITEMS: Final = 1_024
_RETRIES: Final = 5


class KeyKind(IntEnum):
    """The record property that a query compares."""

    KEY = codes.BY_KEY
    UNIQUE = codes.BY_UNIQUE_KEY
    TAG = codes.BY_TAG


class Cursor(NamedTuple):
    """Where a search continues: records before offset ``before``, from item ``item`` of ``file`` (0: its newest) on."""

    file: str
    item: int
    before: int

    def __str__(self) -> str:
        return f"{self.file}-{self.item}-{self.before}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Inverse of ``str``. Raises ValueError."""
        parts = text.split("-")
        if len(parts) == 3 and all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
            item, before = int(parts[1]), int(parts[2])
            if max(item, before) <= _MAX_OFFSET:
                return cls(parts[0], item, before)
        raise ValueError(f"{text!r:.100} is no place where a query can continue")


@dataclass(frozen=True, slots=True)
class KeyQuery:
    """A query. ``begin`` and ``end`` are store times in ms, both inclusive."""

    topic: str
    key: str
    kind: KeyKind = KeyKind.KEY
    begin: int = 0
    end: int = _MAX_OFFSET

    @property
    def hashed(self) -> int:
        """The key's hash as items store it (spec 4.2)."""
        middle = "#T#" if self.kind is KeyKind.TAG else "#"
        value = abs(java_string_hash(f"{self.topic}{middle}{self.key}"))
        return 0 if value > 0x7FFFFFFF else value


@dataclass(slots=True)
class QueryOffsetResult:
    """The result of a search: physical offsets and sizes in bytes, newest first.

    ``following`` is where to continue, None when everything older was examined; ``ran_out`` says that the items or the
    time of one search were used up. ``is_whole`` is False when an item led to no record, its chain was being written to
    all the time, or an index file is missing: then results may be missing.
    """

    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    following: Cursor | None = None
    ran_out: bool = False
    is_whole: bool = True
    examined: int = 0


class MappedIndex:
    """One file, mapped read-only."""

    __slots__ = ("header_words", "inode", "map", "words")

    def __init__(self, path: Path, shape: IndexShape) -> None:
        fd = disk.open_file(path, os.O_RDONLY, "index")
        try:
            stat = os.fstat(fd)
            check_file_size(path, stat.st_size, shape)
            self.inode = stat.st_ino
            self.map = disk.map_file(fd, shape.file_bytes, "index", writable=False)
        finally:
            os.close(fd)
        self.map.madvise(mmap.MADV_RANDOM)
        self.header_words = memoryview(self.map)[:HEADER_BYTES].cast("q")
        self.words: NDArray[np.int32] = np.frombuffer(self.map, np.int32)

    @property
    def header(self) -> IndexHeader:
        return header_of(self.header_words)


class IndexReader:
    """Searches the files under ``folder``. Not thread-safe."""

    def __init__(self, commit_log: CommitLog, folder: Path, shape: IndexShape) -> None:
        self.commit_log = commit_log
        self.folder = folder
        self.shape = shape
        self._mapped: OrderedDict[str, MappedIndex] = OrderedDict()
        self._chain = IndexChain(commit_log)

    def last_timestamp(self) -> int:
        """Store time (ms) of the newest indexed record; 0 if there is none."""
        for name in reversed(list_index_files(self.folder)):
            mapped = self.mapped(name)
            if mapped is not None:
                return mapped.header.end_timestamp
        return 0

    def search(
        self,
        query: KeyQuery,
        *,
        bound: int,
        floor: int = 0,
        max_messages: int,
        max_bytes: int = _MAX_OFFSET,
        max_items: int = _MAX_OFFSET,
        start: Cursor | None = None,
    ) -> QueryOffsetResult:
        """The newest matching messages, at most ``max_messages`` and ``max_bytes`` (at least one), from ``start`` on.

        Examines at most ``max_items`` items and stops after SLICE_MS; ``following`` then says where to continue. Raises
        StoreError for files that cannot be read.
        """
        return _IndexSearch(self, query, bound, floor, max_messages, max_bytes, max_items).run(start)

    def close(self) -> None:
        self._mapped.clear()

    def names(self) -> list[str]:
        """The existing files, newest first; maps of other files are given up."""
        names = list_index_files(self.folder)
        present = set(names)
        for name in [name for name in self._mapped if name not in present]:
            del self._mapped[name]
        return names[::-1]

    def lacks_file(self, names: Sequence[str]) -> bool:
        """Whether a file is missing between those called ``names`` (newest first), or before the oldest."""
        mapped = (self.mapped(name) for name in reversed(names))
        return self._chain.first_gap([one.header for one in mapped if one is not None]) is not None

    def mapped(self, name: str) -> MappedIndex | None:
        """The file called ``name``; None when it no longer exists, or has another size: it is torn, and rebuilt."""
        found = self._mapped.get(name)
        path = self.folder / name
        try:
            # A file that was cut away may have been recreated under the same name.
            if found is None or os.stat(path).st_ino != found.inode:
                found = MappedIndex(path, self.shape)
        except (FileNotFoundError, StoreError):
            self._mapped.pop(name, None)
            return None
        except OSError as error:
            raise StoreError(f"cannot read the index file: {error.strerror}", path=path) from error
        self._mapped[name] = found
        self._mapped.move_to_end(name)
        if len(self._mapped) > MAX_MAPPED_FILES:
            self._mapped.popitem(last=False)
        return found


class _IndexSearch:
    """One search in progress."""

    def __init__(
        self,
        reader: IndexReader,
        query: KeyQuery,
        bound: int,
        floor: int,
        max_messages: int,
        max_bytes: int,
        max_items: int,
    ) -> None:
        self.reader = reader
        self.query = query
        self.hashed = query.hashed
        self.topic = np.frombuffer(query.topic.encode(), np.uint8)
        self.key = np.frombuffer(query.key.encode(), np.uint8)
        self.bound = self.before = bound
        self.floor = floor
        self.max_messages = max_messages
        self.bytes_left = max_bytes
        self.items_left = max_items
        self.deadline = time.monotonic() + SLICE_MS / 1000
        self.found = QueryOffsetResult()
        # A few more candidates than wanted, so that a collision does not cost a second round.
        size = min(_CHUNK, max_messages + 8)
        self.offsets = np.zeros(size, np.int64)
        self.items = np.zeros(size, np.int64)
        self.out = np.zeros(4, np.int64)

    def run(self, start: Cursor | None) -> QueryOffsetResult:
        names = self.reader.names()
        self.found.is_whole = not self.reader.lacks_file(names)
        item = 0
        if start is not None:
            self.before = min(self.before, start.before)
            if start.file in names:
                names = names[names.index(start.file) :]
                item = start.item
        query = self.query
        for number, name in enumerate(names):
            older = names[number + 1] if number + 1 < len(names) else None
            mapped = self.reader.mapped(name)
            if mapped is None:
                continue
            header = mapped.header
            if not header.is_empty:
                if header.end_offset < self.floor:
                    break
                overlaps = header.begin_timestamp <= query.end and header.end_timestamp >= query.begin
                if overlaps and not self._chain(name, older, mapped, header.begin_timestamp, item):
                    break
                if header.begin_timestamp < query.begin:
                    break
            item = 0
        return self.found

    def _chain(self, name: str, older: str | None, mapped: MappedIndex, begin_timestamp: int, item: int) -> bool:
        """Search one file; False when the search ends here, with ``found.following`` set to where it continues."""
        shape, query, out = self.reader.shape, self.query, self.out
        tries = 0
        while True:
            walk_key_chain(
                mapped.words, shape.hash_slots, shape.max_items, self.hashed, item, self.before, self.floor,
                query.begin, query.end, begin_timestamp, min(_SLICE_ITEMS, self.items_left), self.offsets, self.items, out,
            )  # fmt: skip
            taken, item, examined, is_unstable = (int(value) for value in out)
            self.found.examined += examined
            self.items_left -= examined
            if taken:
                stopped = self._take(taken)
                if stopped is not None:
                    following = int(self.items[stopped]) if stopped < taken else item
                    if following:
                        self.found.following = Cursor(name, following, self.before)
                    elif older is not None:
                        self.found.following = Cursor(older, 0, self.before)
                    return False
            if is_unstable:
                # The item is being written, or removed, at this moment: search again from the chain's head, which is
                # complete by then. Records already taken are not taken twice, because offsets must fall.
                tries += 1
                if tries > _RETRIES:
                    self.found.is_whole = False
                    return True
                time.sleep(0.001)
                item = 0
            elif not item:
                return True
            if self.items_left <= 0 or time.monotonic() > self.deadline:
                self.found.following = Cursor(name, item, self.before)
                self.found.ran_out = True
                return False

    def _take(self, count: int) -> int | None:
        """Compare the first ``count`` candidates and keep matches; returns the index to continue at if there are enough."""
        sizes, verdicts = self._judge(count)
        found = self.found
        for index in range(count):
            if verdicts[index] == codes.MATCH:
                size = int(sizes[index])
                if found.offsets and size > self.bytes_left:
                    return index
                found.offsets.append(int(self.offsets[index]))
                found.sizes.append(size)
                self.bytes_left -= size
                self.before = int(self.offsets[index])
                if len(found.offsets) >= self.max_messages:
                    return index + 1
            elif verdicts[index] == codes.NO_RECORD:
                found.is_whole = False
        self.before = int(self.offsets[count - 1])
        return None

    def _judge(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Compare the candidates with their records, one kernel call for each segment."""
        offsets = self.offsets[:count]
        sizes, verdicts = np.zeros(count, np.int64), np.full(count, codes.NO_RECORD, np.uint8)
        segment_bytes = self.reader.commit_log.segment_bytes
        first = 0
        while first < count:
            base = int(offsets[first]) // segment_bytes * segment_bytes
            stop = first + 1
            while stop < count and offsets[stop] >= base:
                stop += 1
            try:
                log = np.frombuffer(self.reader.commit_log.read(base, segment_bytes), np.uint8)
            except OffsetOutOfRangeError:
                log = None  # expired since the item was read
            if log is not None:
                compiled.match_keys(
                    log, base, min(segment_bytes, self.bound - base), offsets[first:stop], self.topic, self.key,
                    int(self.query.kind), self.query.begin, self.query.end, sizes[first:stop], verdicts[first:stop],
                )  # fmt: skip
            first = stop
        return sizes, verdicts
