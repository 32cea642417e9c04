"""The writing side of a store's index: files in order of their names, the newest one growing (spec 4.3).

:mod:`commitmq.store.index.index_files` says which files can be trusted after a start. A thread makes full files
durable as soon as they have a successor. A file whose fdatasync failed is worthless, because the kernel has marked its
pages clean: it and all newer ones are deleted and the process ends, to rebuild them.

A start looks at a sample of each file. After a crash the thread also reads whole files, one after the other; a damaged one and
all newer ones are deleted, and indexing goes back (:attr:`IndexFiles.goes_back_to`).

Detects an index file that is missing between two others, or before the first: the files do not tell, the log does.

A file's header names the first and the last record that the file has items of. Either there is no record with a key
between the last of one file and the first of the next, or a file is missing. The two records are usually adjacent in
the log, so this takes one read.

``commitmq/dispatchers/index/files.json``: which index files are durable, and the state at the last orderly stop.

    durable      name of the newest durable file; every older one is durable too. "" while there is none
    clean        the last stop was orderly: all files are complete and durable
    position     when clean: everything of the log below this offset is in the files
    newest       the newest file at that time ("" without one), and newest_end, the end offset in its header

The last two tell whether another program (RocketMQ) used the files since.

The index files of a store by name: their headers, and which of them are known durable.

``files.json`` (:mod:`commitmq.store.index.index_files`) is on the device before the first byte of a file changes.

Opens an index after a start: keeps the files that can be trusted, and removes or repairs the others.

    the process died alone     page cache intact: the header counts complete items only; items behind them are removed,
                               and the record of the newest item is indexed from its first missing item on
    the node died              only files known to be durable stay; newer ones are deleted and rebuilt from the end of
                               the newest remaining file
    the stop was orderly       all of them; nothing is written before there is something to add

``files.json`` says which files are durable and whether the last stop was orderly. Without it, RocketMQ's rule applies:
files that end after checkpoint.indexMsgTimestamp are deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.disk import sync_folder
from commitmq.format.constants import SysFlag
from commitmq.format.index import (
    HEADER_BYTES,
    IndexHeader,
    IndexShape,
    header_of,
    list_index_files,
)
from commitmq.kernels.codes import STATE_LAST_ITEMS, STATE_LAST_OFFSET, STATE_ROW
from commitmq.log import Log
from commitmq.store.geometry import fits
from commitmq.store.index.index_file import IndexFile, create, file_name, is_whole, new_state, store_error
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker

_SPACE: Final = ord(" ")
_MOST_ROWS: Final = 1_024
_BATCH_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 64 << 20  # of log without a key between two files: beyond that the search gives up


class IndexChain:
    """Searches the log for gaps, and remembers the stretches without gaps. Not thread-safe."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._whole: set[tuple[int, int]] = set()

    def first_gap(self, headers: Sequence[IndexHeader]) -> int | None:
        """Number of the first file (oldest first, with these ``headers``) before which one is missing; None if none is.
        A file without an item tells nothing.
        """
        start, is_indexed = self._log.min_offset, False
        for number, header in enumerate(headers):
            if header.is_empty:
                continue
            if self._is_missing(start, header.begin_offset, is_indexed):
                return number
            start, is_indexed = max(header.end_offset, self._log.min_offset), header.end_offset >= self._log.min_offset
        return None

    def _names_key(self, rows: np.ndarray[Any, Any], start: int, end: int) -> bool:
        """Whether the KEYS of one of ``rows``, records from ``start`` to ``end``, are more than spaces, which name none."""
        is_letter = np.frombuffer(self._log.read(start, end - start), np.uint8) != _SPACE
        letters_before = np.concatenate(([0], np.cumsum(is_letter)))
        keys = rows["physical_offset"] - start + rows["keys_start"]
        return bool((letters_before[keys + rows["keys_size"]] > letters_before[keys]).any())

    def _is_missing(self, start: int, begin: int, start_is_indexed: bool) -> bool:
        """Whether the log has a record with a key from ``start`` up to ``begin``, both record boundaries."""
        if begin <= start or (start, begin) in self._whole:
            return False
        walker = LogWalker(self._log, max_rows=_MOST_ROWS, max_bytes=_BATCH_BYTES)
        position = start
        try:
            while position < min(begin, start + _MOST_BYTES):
                batch = walker.walk(position, begin)
                rows = batch.rows
                has_key = rows["sys_flag"] & SysFlag.TRANSACTION_ROLLBACK != SysFlag.TRANSACTION_ROLLBACK
                if start_is_indexed:
                    has_key &= rows["physical_offset"] != start
                if (has_key & (rows["uniq_size"] > 0)).any():
                    return True
                rows = rows[has_key & (rows["keys_size"] > 0)]
                if rows.size and self._names_key(rows, position, batch.end):
                    return True
                position = batch.end
        except StoreError:
            return False  # damage of the log, or a part that just expired: other checks report it
        finally:
            walker.release()
        if len(self._whole) > _MOST_ROWS:
            self._whole.clear()
        self._whole.add((start, begin))
        return False


@dataclass(slots=True)
class SavedState:
    """The saved state of the index files. Offsets are bytes of the log."""

    durable: str = ""
    clean: bool = False
    position: int = -1
    newest: str = ""
    newest_end: int = -1

    @classmethod
    def load(cls, path: Path) -> SavedState | None:
        """The file's content; None if it cannot be read: then RocketMQ's rule decides which files are durable."""
        try:
            data = orjson.loads(path.read_bytes())
            return cls(
                str(data["durable"]),
                data["clean"] is True,
                int(data["position"]),
                str(data["newest"]),
                int(data["newest_end"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Write the file durably. Raises DiskFullError or StoreError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(path, orjson.dumps(asdict(self)), "index_state")
        except OSError as error:
            raise store_error("cannot write the state of the index", error, path) from error


class IndexListing:
    """``names`` of all files under ``folder``, oldest first, and the known facts about them. One thread."""

    def __init__(self, folder: Path, state_path: Path) -> None:
        self.folder = folder
        self._state_path = state_path
        self.names: list[str] = []
        self.headers: dict[str, IndexHeader] = {}
        """The headers of all files that no longer grow."""
        self.saved = SavedState()
        """The content of ``files.json``."""
        self.durable: set[str] = set()
        self.lowered = False
        """A file that was durable is so no longer."""

    def save(self, *, clean: bool, position: int = -1, newest_end: int = -1) -> None:
        """Write ``files.json``; without a ``position`` that and the newest file stay as they were."""
        count = self.durable_count()
        durable = self.names[count - 1] if count else ""
        newest = self.names[-1] if self.names else ""
        if clean and position < 0:
            position, newest, newest_end = self.saved.position, self.saved.newest, self.saved.newest_end
        saved = SavedState(durable, clean, position, newest, newest_end)
        saved.save(self._state_path)
        self.saved = saved

    def durable_count(self) -> int:
        """Number of files, from the oldest on, that are durable without a gap."""
        return next((number for number, name in enumerate(self.names) if name not in self.durable), len(self.names))

    def forget_durable(self, first: str) -> None:
        """Mark the files from ``first`` on as no longer durable; the mark is on the device before they change."""
        if any(name >= first for name in self.durable):
            self.durable = {name for name in self.durable if name < first}
            self.lowered = True
            self.save(clean=False)

    def delete_from(self, number: int) -> None:
        """Delete the files from ``number`` on, newest first, so that a death in between leaves no gap."""
        for name in reversed(self.names[number:]):
            disk.unlink(self.folder / name, "index", missing_ok=True)
            self.headers.pop(name, None)
            self.durable.discard(name)
        del self.names[number:]


class IndexOpening:
    """The steps of opening an index, each on the files that the steps before it left."""

    def __init__(self, listing: IndexListing, shape: IndexShape, commit_log: CommitLog, log: Log) -> None:
        self._listing = listing
        self._shape = shape
        self._commit_log = commit_log
        self._log = log

    def drop_of_other_size(self) -> bool:
        """Delete all files from the first one of another size on: the store has one shape, so that one is torn."""
        listing = self._listing
        for number, name in enumerate(listing.names):
            # Of a file of 0 bytes the name reached the device and the size did not.
            size = (listing.folder / name).stat().st_size
            if size != self._shape.file_bytes:
                self._log.error("the index file is damaged, it is built again", file=name, size=size)
                listing.forget_durable(name)
                listing.delete_from(number)
                return True
        return False

    def read_headers(self) -> None:
        """Read the headers of all files. Raises StoreError for a file that cannot be read."""
        for name in self._listing.names:
            path = self._listing.folder / name
            try:
                with path.open("rb") as file:
                    data = file.read(HEADER_BYTES)
            except OSError as error:
                raise StoreError(f"cannot read the index file: {error.strerror}", path=path) from error
            self._listing.headers[name] = header_of(memoryview(data).cast("q"))

    def repair_newest(self) -> None:
        """Remove the items that the header of the newest file does not count: this process died while it wrote them."""
        listing = self._listing
        if not listing.names:
            return
        name = listing.names[-1]
        file = IndexFile(listing.folder / name, self._shape)
        header = file.header
        if header.is_empty:
            before = listing.headers[listing.names[-2]] if len(listing.names) > 1 else None
            stamp, offset = (before.end_timestamp, before.end_offset) if before is not None else (0, 0)
            file.reset_begin(stamp, offset)
        else:
            offset = file.item_offset(header.count - 1)
            stamp = header.end_timestamp
            if offset != header.end_offset:
                stamp = store_timestamp(self._commit_log, offset, header)
        file.repair(stamp, offset)
        listing.headers[name] = file.header
        file.close()

    def drop_untrusted(self, index_timestamp: int | None) -> None:
        """Delete the first file that is not known durable and all newer ones; with a time stamp, by RocketMQ's rule."""
        listing = self._listing
        for number, name in enumerate(listing.names):
            if index_timestamp is None:
                is_durable = name in listing.durable
            else:
                is_durable = listing.headers[name].end_timestamp <= index_timestamp
            if not is_durable:
                self._log.info("index files are not known durable and are built again", files=listing.names[number:])
                listing.delete_from(number)
                return

    def drop_damaged(self) -> bool:
        """Delete files from the first one on that has an impossible header, or whose items, of which a sample is read, are
        not those that the header counts. Nothing is lost: they are rebuilt.
        """
        listing = self._listing
        for number, name in enumerate(listing.names):
            header = listing.headers[name]
            is_newest = number + 1 == len(listing.names)
            # A file begins where the one before ends; an empty one whose header was lost begins at 0.
            before = listing.headers[listing.names[number - 1]].end_offset if number else 0
            if (
                header.count > self._shape.max_items
                or header.slots_used > self._shape.hash_slots
                or header.begin_offset < before
                or (header.is_empty and not is_newest)
                or not header.begin_offset <= header.end_offset <= self._commit_log.end_offset
                or (
                    listing.saved.clean
                    and name == listing.saved.newest
                    and header.end_offset < listing.saved.newest_end
                )
                or not (header.is_empty or self._has_items(name, header))
            ):
                self._log.error("the index file is damaged, it is built again", file=name, header=str(header))
                listing.forget_durable(name)
                listing.delete_from(number)
                return True
        return False

    def _has_items(self, name: str, header: IndexHeader) -> bool:
        with disk.opened(self._listing.folder / name, os.O_RDONLY, "index") as fd:
            return fits(fd, self._shape, header)

    def drop_behind_gap(self) -> bool:
        """Delete the files behind a missing one too: items must be in the order of the log."""
        listing = self._listing
        number = IndexChain(self._commit_log).first_gap([listing.headers[name] for name in listing.names])
        if number is not None:
            name = listing.names[number]
            self._log.error("an index file is missing before this one, they are built again", file=name)
            listing.forget_durable(name)
            listing.delete_from(number)
        return number is not None

    def was_last_used_by_us(self, last: int) -> bool:
        """Whether this is the index as an orderly stop left it; ``last`` is the newest indexed record."""
        listing = self._listing
        saved = listing.saved
        return (
            saved.clean
            and saved.newest == (listing.names[-1] if listing.names else "")
            and last == saved.newest_end <= saved.position
        )


def store_timestamp(commit_log: CommitLog, offset: int, header: IndexHeader) -> int:
    """Store time (ms) of the record at ``offset``, the newest one of a file with this ``header``."""
    try:
        return commit_log.record(offset, check_crc=False).store_timestamp
    except StoreError:
        return header.end_timestamp  # the record expired; the time only serves to choose files


_ALL_ITEMS: Final = 1 << 62


class IndexFiles:
    """All files under ``folder``. One process, one thread (the syncing thread touches nothing else)."""

    def __init__(
        self,
        folder: Path,
        shape: IndexShape,
        commit_log: CommitLog,
        log: Log,
        *,
        state_path: Path,
        run: Path,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """``run`` is emptied at every start. Files are made there, or in ``folder`` on a separate file system."""
        self.folder = folder
        self.shape = shape
        self._commit_log = commit_log
        self._log = log
        self._state_path = state_path
        self._listing = IndexListing(folder, state_path)
        self._marker = run / "index.written"
        self._temporary = run / "index.new"
        self._clock = clock
        self._newest: IndexFile | None = None
        self._is_written = False
        self._state = new_state()
        self._syncer: ThreadPoolExecutor | None = None
        self._syncing: dict[str, Future[None]] = {}
        self._unread: list[str] = []
        """Files that no longer grow, and that may be damaged."""
        self._reading: tuple[str, Future[bool]] | None = None
        self.goes_back_to: int | None = None
        """Damage was found, and indexing continues at this physical offset; whoever goes back takes it away."""
        self._base = -1
        self._segment = np.empty(0, np.uint8)

    # ------------------------------------------------------------ opening

    def open(self, *, clean: bool, index_timestamp: int, log_end: int | None = None) -> int:
        """Make the files trustworthy (see the module's text); returns the physical offset at which indexing continues.

        ``clean``: the node stopped orderly. ``index_timestamp``: checkpoint.indexMsgTimestamp. ``log_end``: the log's
        end after a recovery; items that point behind it are dropped. Raises StoreError for files that cannot be read.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.folder.stat().st_dev != self._temporary.parent.stat().st_dev:
                self._temporary = self.folder / self._temporary.name
                self._temporary.unlink(missing_ok=True)
        except OSError as error:
            raise store_error("cannot use the folder of the index", error, self.folder) from error
        saved = SavedState.load(self._state_path)
        died_alone = self._marker.exists()
        listing = self._listing
        listing.names = list_index_files(self.folder)
        listing.saved = SavedState() if saved is None else saved
        listing.durable = {name for name in listing.names if name <= listing.saved.durable}
        opening = IndexOpening(listing, self.shape, self._commit_log, self._log)
        dropped = opening.drop_of_other_size()
        opening.read_headers()
        trusted = not died_alone and clean and (saved is None or saved.clean)
        if trusted and saved is not None and saved.newest and saved.newest not in listing.names:
            # RocketMQ deletes its newest file when it recovers, and rebuilds only a part (spec 8.5).
            trusted = False
        if saved is None:
            listing.saved.clean = trusted
        if died_alone:
            opening.repair_newest()
            self._is_written = True
        elif not trusted:
            opening.drop_untrusted(index_timestamp if saved is None else None)
        dropped = opening.drop_damaged() or dropped
        dropped = opening.drop_behind_gap() or dropped
        if log_end is not None and not died_alone:
            self.truncate(log_end)
        self._unread = [] if clean else list(listing.names)
        if self._unread and listing.headers[listing.names[-1]].count < self.shape.max_items:
            # This one grows, so it is read before.
            name = self._unread.pop()
            if not died_alone and not is_whole(self.folder / name, self.shape):
                self._log.error("the index file is damaged, it is built again", file=name)
                listing.forget_durable(name)
                listing.delete_from(len(listing.names) - 1)
                dropped = True
        last = self._take_up()
        if trusted and not dropped:
            # Files that RocketMQ or CommitMQ closed orderly are complete: their newest record is not examined again.
            self._state[STATE_LAST_ITEMS] = _ALL_ITEMS
            if opening.was_last_used_by_us(last) and (log_end is None or listing.saved.position <= log_end):
                last = listing.saved.position
        self.expire(self._commit_log.min_offset)
        for name in listing.names[:-1]:
            self._sync_later(name)
        return max(last, self._commit_log.min_offset)

    def _take_up(self) -> int:
        """Set ``_state`` to the end of the files; returns the offset of the newest indexed record, or 0."""
        state = self._state = new_state()
        if not self._listing.names:
            return 0
        header = self._listing.headers[self._listing.names[-1]]
        last, items = header.end_offset, 0
        # A record's items may be spread over several files.
        for name in reversed(self._listing.names):
            header = self._listing.headers[name]
            if header.is_empty:
                continue
            with self._opened(name) as file:
                found = file.items_of(last)
            items += found
            if found < header.count - 1:
                break
        state[STATE_LAST_OFFSET] = last
        state[STATE_LAST_ITEMS] = items
        return last

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[IndexFile]:
        file = IndexFile(self.folder / name, self.shape)
        try:
            yield file
        finally:
            file.close()

    # ------------------------------------------------------------ writing

    def insert(self, batch: DispatchBatch) -> None:
        """Index the batch's records; records that are already indexed are skipped. Raises DiskFullError when there is
        no space: then the batch may be given again. StoreError for other I/O errors.
        """
        if not len(batch.rows):
            return
        self._begin_writing()
        rows = np.require(batch.rows, requirements=["C", "ALIGNED"])
        segment_bytes = self._commit_log.segment_bytes
        state = self._state
        first = 0
        while first < len(rows):
            base = int(rows["physical_offset"][first]) // segment_bytes * segment_bytes
            stop = int(np.searchsorted(rows["physical_offset"], base + segment_bytes, side="left"))
            state[STATE_ROW] = 0
            part, log = rows[first:stop], self._segment_array(base)
            while not self._growing().insert(log, base, part, state):
                self._roll()
            first = stop

    def _begin_writing(self) -> None:
        if self._is_written:
            return
        self._listing.save(clean=False)
        try:
            self._marker.touch()
        except OSError as error:
            raise store_error("cannot mark the index as written to", error, self._marker) from error
        self._is_written = True

    def _growing(self) -> IndexFile:
        if self._newest is None:
            if not self._listing.names:
                return self._create(None)
            file = IndexFile(self.folder / self._listing.names[-1], self.shape)
            file.load(self._state)
            self._newest = file
            self._listing.headers.pop(self._listing.names[-1], None)
        return self._newest

    def _roll(self) -> None:
        """The newest file is full: make its successor, then sync it in the background."""
        assert self._newest is not None
        full, header = self._newest, self._newest.header
        self._create(header)
        name = full.path.name
        self._listing.headers[name] = header
        full.close()
        self._sync_later(name)

    def _create(self, predecessor: IndexHeader | None) -> IndexFile:
        name = file_name(self._clock(), self._listing.names[-1] if self._listing.names else None)
        file = create(self.folder / name, self._temporary, self.shape, predecessor)
        if failpoints.ACTIVE:
            failpoints.hit("index.after_create")
        self._listing.names.append(name)
        self._newest = file
        file.load(self._state)
        return file

    def _segment_array(self, base: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if base != self._base:
            self._segment = np.frombuffer(self._commit_log.read(base, self._commit_log.segment_bytes), np.uint8)
            self._base = base
        return self._segment

    # ------------------------------------------------------------ durability

    def flush(self) -> tuple[int, int]:
        """Note the files that became durable. Returns (end of the durable files, its store timestamp in ms).

        Every file that ends at that time or before is durable: after a crash RocketMQ keeps the files that its
        checkpoint covers. The timestamp is 0 while none is known. Raises OSError after a failed fdatasync, with the
        affected files deleted.
        """
        self._check_names()
        self._read_on()
        done = [name for name, future in self._syncing.items() if future.done()]
        for name in done:
            error = self._syncing.pop(name).exception()
            if isinstance(error, FileNotFoundError) or name not in self._listing.names:
                continue  # the file expired, or was cut
            if error is not None:
                self._log.error("fdatasync of an index file failed, it is built again", file=name, error=str(error))
                self._release()
                self._listing.delete_from(self._listing.names.index(name))
                raise error
            self._listing.durable.add(name)
        count = self._listing.durable_count()
        if count and self._listing.saved.durable != self._listing.names[count - 1]:
            try:
                self._listing.save(clean=self._listing.saved.clean)
            except StoreError as error:
                self._log.warning("durable index files are not noted yet", error=str(error))
        return self._durable_end(count)

    def _read_on(self) -> None:
        """Look at the file that was read, and have the next one read. Raises StoreError; then it is looked at again."""
        if self._reading is not None and self._reading[1].done():
            name, future = self._reading
            if name in self._listing.names and not future.result():
                self._log.error("the index file is damaged, it is built again", file=name)
                self._listing.forget_durable(name)
                self._release()
                self._listing.delete_from(self._listing.names.index(name))
                self.goes_back_to = max(self._take_up(), self._commit_log.min_offset)
            self._reading = None
        if self._reading is None and self._unread:
            name = self._unread.pop(0)
            self._reading = name, self._thread().submit(is_whole, self.folder / name, self.shape)

    def _check_names(self) -> None:
        """Raise OSError when a file was deleted from outside: a new process must rebuild the files from there on."""
        present = set(list_index_files(self.folder))
        number = next((number for number, name in enumerate(self._listing.names) if name not in present), None)
        if number is not None:
            missing = self._listing.names[number]
            self._log.error("an index file is gone, they are built again from there on", file=missing)
            self._release()
            self._listing.delete_from(number)
            raise FileNotFoundError(errno.ENOENT, "an index file is gone", str(self.folder / missing))

    def _durable_end(self, count: int) -> tuple[int, int]:
        # The newest file may be durable since an orderly stop, but it grows again.
        count = min(count, len(self._listing.names) - 1)
        if count <= 0:
            return 0, 1 if self._listing.lowered else 0
        header, after = self._header(self._listing.names[count - 1]), self._header(self._listing.names[count])
        # Until the next file ends later, a checkpoint of this time would cover that file as well.
        same = after.end_timestamp <= header.end_timestamp
        return header.end_offset, header.end_timestamp - same

    def _header(self, name: str) -> IndexHeader:
        if self._newest is not None and self._newest.path.name == name:
            return self._newest.header
        return self._listing.headers[name]

    def _sync_later(self, name: str) -> None:
        if name in self._listing.durable or name in self._syncing:
            return
        self._syncing[name] = self._thread().submit(_sync, self.folder / name)

    def _thread(self) -> ThreadPoolExecutor:
        if self._syncer is None:
            self._syncer = ThreadPoolExecutor(1, thread_name_prefix="index-sync")
        return self._syncer

    def close(self, position: int) -> None:
        """Make everything durable and note that the stop was orderly; ``position`` is where indexing would continue.
        Raises OSError or StoreError; the next start then rebuilds the newest files.
        """
        if self._syncer is not None:
            self._syncer.shutdown(wait=True)
            self._syncer = None
        self._unread, self._reading = [], None
        self.flush()
        newest_end = self._header(self._listing.names[-1]).end_offset if self._listing.names else 0
        if self._newest is not None:
            self._newest.sync()
            sync_folder(self.folder)
        self._release()
        self._listing.save(clean=True, position=position, newest_end=newest_end)

    def _release(self) -> None:
        if self._newest is not None:
            self._listing.headers[self._newest.path.name] = self._newest.header
            self._newest.close()
            self._newest = None
        self._segment = np.empty(0, np.uint8)
        self._base = -1

    # ------------------------------------------------------------ cutting

    def truncate(self, offset: int) -> None:
        """Drop the items of all records at or behind ``offset``, newest file first; empty files are deleted too."""
        self._release()
        while self._listing.names:
            name = self._listing.names[-1]
            header = self._listing.headers[name]
            if header.end_offset < offset:
                break
            # The file must not count as durable any more before it changes. However, it does not count as written to:
            # if this process dies in here, its successor must not take the rest for the predecessor's work.
            self._listing.forget_durable(name)
            if self._listing.saved.clean:
                self._listing.save(clean=False)
            if failpoints.ACTIVE:
                failpoints.hit("index.before_cut")
            with self._opened(name) as file:
                keep = file.first_item_from(offset)
                if keep > 1:
                    end = file.item_offset(keep - 1)
                    file.cut(keep, store_timestamp(self._commit_log, end, header), end)
                    self._listing.headers[name] = file.header
                    break
            self._listing.delete_from(len(self._listing.names) - 1)
        self._take_up()

    def expire(self, min_offset: int) -> None:
        """Delete files whose newest record is below ``min_offset``, oldest first, never the newest file (spec 10.4)."""
        while len(self._listing.names) > 1 and self._listing.headers[self._listing.names[0]].end_offset < min_offset:
            name = self._listing.names.pop(0)
            del self._listing.headers[name]
            disk.unlink(self.folder / name, "index", missing_ok=True)
            self._listing.durable.discard(name)
            self._log.info("index file expired", file=name)


def _sync(path: Path) -> None:
    fd = disk.open_file(path, os.O_RDWR, "index")
    try:
        if failpoints.ACTIVE:
            failpoints.hit("index.before_fdatasync")
        disk.sync(fd, "index")
        # The file's name, and the deletion of an older file, must be on the device before the file counts as durable.
        sync_folder(path.parent)
    finally:
        os.close(fd)
