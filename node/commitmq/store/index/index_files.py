"""The writing side of a store's index: files in order of their names, the newest one growing (spec 4.3).

Which files can be trusted after a start
    the process died alone     page cache intact: the header counts complete items only; items behind them are removed,
                               and the record of the newest item is indexed from its first missing item on
    the node died              only files known to be durable stay; newer ones are deleted and rebuilt from the end of
                               the newest remaining file
    the stop was orderly       all of them; nothing is written before there is something to add

``files.json`` (CommitMQ's, see :mod:`commitmq.store.index.index_state`) says which files are durable and whether the
last stop was orderly; it is on the device before the first byte of a file changes. Without it, RocketMQ's rule applies:
files that end after checkpoint.indexMsgTimestamp are deleted. A thread makes full files durable as soon as they have a
successor. A file whose fdatasync failed is worthless, because the kernel has marked its pages clean: it and all newer
ones are deleted and the process ends, to rebuild them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import sync_folder
from commitmq.format.index_header import (
    HEADER_BYTES,
    IndexHeader,
    IndexShape,
    check_file_size,
    header_of,
    list_index_files,
)
from commitmq.kernels.index_insertion import STATE_LAST_ITEMS, STATE_LAST_OFFSET, STATE_ROW
from commitmq.log import Log
from commitmq.store.index.index_chain import IndexChain
from commitmq.store.index.index_file import IndexFile, create, new_state, store_error
from commitmq.store.index.index_state import SavedState
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch

_ALL_ITEMS: Final = 1 << 62


def file_name(now: datetime, newest: str | None) -> str:
    """The name of a new file: local time to the millisecond, moved behind ``newest`` if the clock is not (spec 1.2)."""
    name = _format(now)
    if newest is None or name > newest:
        return name
    try:
        after = datetime.strptime(newest + "000", "%Y%m%d%H%M%S%f") + timedelta(milliseconds=1)
    except ValueError:
        return f"{int(newest) + 1:017d}"
    return _format(after)


def _format(when: datetime) -> str:
    return when.strftime("%Y%m%d%H%M%S") + f"{when.microsecond // 1000:03d}"


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
        """``run`` is emptied at every start of the node. New files are made there or, if ``folder`` is a separate file
        system, in ``folder``.
        """
        self.folder = folder
        self.shape = shape
        self._commit_log = commit_log
        self._chain = IndexChain(commit_log)
        self._log = log
        self._state_path = state_path
        self._marker = run / "index.written"
        self._temporary = run / "index.new"
        self._clock = clock
        self._names: list[str] = []
        self._headers: dict[str, IndexHeader] = {}  # of all files that no longer grow
        self._newest: IndexFile | None = None
        self._saved = SavedState()
        self._durable: set[str] = set()
        self._is_written = False
        self._lowered = False
        self._state = new_state()
        self._syncer: ThreadPoolExecutor | None = None
        self._syncing: dict[str, Future[None]] = {}
        self._base = -1
        self._segment = np.empty(0, np.uint8)

    # ------------------------------------------------------------ opening

    def open(self, *, clean: bool, index_timestamp: int, log_end: int | None = None) -> int:
        """Make the files trustworthy (see the module's text); returns the physical offset at which indexing continues.

        ``clean``: the node stopped orderly. ``index_timestamp``: checkpoint.indexMsgTimestamp. ``log_end``: the log's
        end after a recovery; items that point behind it are dropped. Raises StoreError for files of another size.
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
        self._names = list_index_files(self.folder)
        dropped = self._drop_of_other_size()
        for name in self._names:
            self._headers[name] = self._read_header(name)
        trusted = not died_alone and clean and (saved is None or saved.clean)
        if trusted and saved is not None and saved.newest and saved.newest not in self._names:
            # RocketMQ deletes its newest file when it recovers, and does not rebuild all of it (spec 8.5).
            trusted = False
        self._saved = SavedState(clean=trusted) if saved is None else saved
        self._durable = {name for name in self._names if name <= self._saved.durable}
        if died_alone:
            self._repair_newest()
            self._is_written = True
        elif not trusted:
            self._drop_untrusted(index_timestamp if saved is None else None)
        dropped = self._drop_damaged() or dropped
        dropped = self._drop_behind_gap() or dropped
        if log_end is not None and not died_alone:
            self.truncate(log_end)
        last = self._take_up()
        if trusted and not dropped:
            # Files that RocketMQ or CommitMQ closed orderly are complete: their newest record is not examined again.
            self._state[STATE_LAST_ITEMS] = _ALL_ITEMS
            if self._was_last_used_by_us(last) and (log_end is None or self._saved.position <= log_end):
                last = self._saved.position
        self.expire(self._commit_log.min_offset)
        for name in self._names[:-1]:
            self._sync_later(name)
        return max(last, self._commit_log.min_offset)

    def _drop_of_other_size(self) -> bool:
        """Delete all files from the first one of another size on. Raises StoreError when all are of another size: then
        the configuration is wrong.
        """
        sizes = [(self.folder / name).stat().st_size for name in self._names]
        for number, size in enumerate(sizes):
            # A file without a size: its name reached the device and its size did not. It was never synced, nor were
            # later files.
            if size == 0 or (size != self.shape.file_bytes and self.shape.file_bytes in sizes):
                self._log.error("the index file is damaged, it is built again", file=self._names[number], size=size)
                self._delete_from(number)
                return True
        return False

    def _drop_behind_gap(self) -> bool:
        """Delete the files behind a missing one too: items must be in the order of the log."""
        number = self._chain.first_gap([self._headers[name] for name in self._names])
        if number is not None:
            name = self._names[number]
            self._log.error("an index file is missing before this one, they are built again", file=name)
            self._forget_durable(name)
            self._delete_from(number)
        return number is not None

    def _was_last_used_by_us(self, last: int) -> bool:
        saved = self._saved
        return (
            saved.clean
            and saved.newest == (self._names[-1] if self._names else "")
            and last == saved.newest_end <= saved.position
        )

    def _read_header(self, name: str) -> IndexHeader:
        path = self.folder / name
        try:
            with open(path, "rb") as file:
                check_file_size(path, os.fstat(file.fileno()).st_size, self.shape)
                data = file.read(HEADER_BYTES)
        except OSError as error:
            raise StoreError(f"cannot read the index file: {error.strerror}", path=path) from error
        return header_of(memoryview(data).cast("q"))

    def _repair_newest(self) -> None:
        if not self._names:
            return
        name = self._names[-1]
        file = IndexFile(self.folder / name, self.shape)
        header = file.header
        if header.is_empty:
            before = self._headers[self._names[-2]] if len(self._names) > 1 else None
            stamp, offset = (before.end_timestamp, before.end_offset) if before is not None else (0, 0)
            file.reset_begin(stamp, offset)
        else:
            offset = file.item_offset(header.count - 1)
            stamp = header.end_timestamp if offset == header.end_offset else self._store_timestamp(offset, header)
        file.repair(stamp, offset)
        self._headers[name] = file.header
        file.close()

    def _store_timestamp(self, offset: int, header: IndexHeader) -> int:
        try:
            return self._commit_log.record(offset, check_crc=False).store_timestamp
        except StoreError:
            return header.end_timestamp  # the record expired; the time only serves to choose files

    def _drop_untrusted(self, index_timestamp: int | None) -> None:
        """Delete the first file that is not known durable and all newer ones; with a time stamp, by RocketMQ's rule."""
        for number, name in enumerate(self._names):
            if index_timestamp is None:
                is_durable = name in self._durable
            else:
                is_durable = self._headers[name].end_timestamp <= index_timestamp
            if not is_durable:
                self._log.info("index files are not known durable and are built again", files=self._names[number:])
                self._delete_from(number)
                return

    def _drop_damaged(self) -> bool:
        """Delete files from the first one with an impossible header on. Nothing is lost: they are rebuilt."""
        for number, name in enumerate(self._names):
            header = self._headers[name]
            is_newest = number + 1 == len(self._names)
            if (
                header.count > self.shape.max_items
                or header.slots_used > self.shape.hash_slots
                or header.end_offset < 0
                or (header.is_empty and not is_newest)
                or not header.begin_offset <= header.end_offset <= self._commit_log.end_offset
                or (self._saved.clean and name == self._saved.newest and header.end_offset < self._saved.newest_end)
            ):
                self._log.error("the index file is damaged, it is built again", file=name, header=str(header))
                self._forget_durable(name)
                self._delete_from(number)
                return True
        return False

    def _take_up(self) -> int:
        """Set ``_state`` to the end of the files; returns the offset of the newest indexed record, or 0."""
        state = self._state = new_state()
        if not self._names:
            return 0
        header = self._headers[self._names[-1]]
        last, items = header.end_offset, 0
        # A record's items may be spread over several files.
        for name in reversed(self._names):
            header = self._headers[name]
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
        """Index the batch's records; records that are already indexed are skipped.

        Raises DiskFullError when there is no space: then the batch may be given again. StoreError for other I/O errors.
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
        self._save(clean=False)
        try:
            self._marker.touch()
        except OSError as error:
            raise store_error("cannot mark the index as written to", error, self._marker) from error
        self._is_written = True

    def _growing(self) -> IndexFile:
        if self._newest is None:
            if not self._names:
                return self._create(None)
            file = IndexFile(self.folder / self._names[-1], self.shape)
            file.load(self._state)
            self._newest = file
            self._headers.pop(self._names[-1], None)
        return self._newest

    def _roll(self) -> None:
        """The newest file is full: make its successor, then sync it in the background."""
        assert self._newest is not None
        full, header = self._newest, self._newest.header
        self._create(header)
        name = full.path.name
        self._headers[name] = header
        full.close()
        self._sync_later(name)

    def _create(self, predecessor: IndexHeader | None) -> IndexFile:
        name = file_name(self._clock(), self._names[-1] if self._names else None)
        file = create(self.folder / name, self._temporary, self.shape, predecessor)
        if failpoints.ACTIVE:
            failpoints.hit("index.after_create")
        self._names.append(name)
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
        done = [name for name, future in self._syncing.items() if future.done()]
        for name in done:
            error = self._syncing.pop(name).exception()
            if isinstance(error, FileNotFoundError) or name not in self._names:
                continue  # the file expired, or was cut
            if error is not None:
                self._log.error("fdatasync of an index file failed, it is built again", file=name, error=str(error))
                self._release()
                self._delete_from(self._names.index(name))
                raise error
            self._durable.add(name)
        count = self._durable_count()
        if count and self._saved.durable != self._names[count - 1]:
            try:
                self._save(clean=self._saved.clean)
            except StoreError as error:
                self._log.warning("durable index files are not noted yet", error=str(error))
        return self._durable_end(count)

    def _check_names(self) -> None:
        """Raise OSError when a file was deleted from outside: a new process must rebuild the files from there on."""
        present = set(list_index_files(self.folder))
        number = next((number for number, name in enumerate(self._names) if name not in present), None)
        if number is not None:
            missing = self._names[number]
            self._log.error("an index file is gone, they are built again from there on", file=missing)
            self._release()
            self._delete_from(number)
            raise FileNotFoundError(errno.ENOENT, "an index file is gone", str(self.folder / missing))

    def _save(self, *, clean: bool, position: int = -1, newest_end: int = -1) -> None:
        count = self._durable_count()
        durable = self._names[count - 1] if count else ""
        newest = self._names[-1] if self._names else ""
        if clean and position < 0:
            position, newest, newest_end = self._saved.position, self._saved.newest, self._saved.newest_end
        saved = SavedState(durable, clean, position, newest, newest_end)
        saved.save(self._state_path)
        self._saved = saved

    def _durable_count(self) -> int:
        """Number of files, from the oldest on, that are durable without a gap."""
        return next((number for number, name in enumerate(self._names) if name not in self._durable), len(self._names))

    def _durable_end(self, count: int) -> tuple[int, int]:
        # The newest file may be durable since an orderly stop, but it grows again.
        count = min(count, len(self._names) - 1)
        if count <= 0:
            return 0, 1 if self._lowered else 0
        header, after = self._header(self._names[count - 1]), self._header(self._names[count])
        # Until the next file ends later, a checkpoint of this time would cover that file as well.
        same = after.end_timestamp <= header.end_timestamp
        return header.end_offset, header.end_timestamp - same

    def _header(self, name: str) -> IndexHeader:
        if self._newest is not None and self._newest.path.name == name:
            return self._newest.header
        return self._headers[name]

    def _sync_later(self, name: str) -> None:
        if name in self._durable or name in self._syncing:
            return
        if self._syncer is None:
            self._syncer = ThreadPoolExecutor(1, thread_name_prefix="index-sync")
        self._syncing[name] = self._syncer.submit(_sync, self.folder / name)

    def close(self, position: int) -> None:
        """Make everything durable and note that the stop was orderly; ``position`` is where indexing would continue.

        Raises OSError or StoreError; the next start then rebuilds the newest files.
        """
        if self._syncer is not None:
            self._syncer.shutdown(wait=True)
            self._syncer = None
        self.flush()
        newest_end = self._header(self._names[-1]).end_offset if self._names else 0
        if self._newest is not None:
            self._newest.sync()
            sync_folder(self.folder)
        self._release()
        self._save(clean=True, position=position, newest_end=newest_end)

    def _release(self) -> None:
        if self._newest is not None:
            self._headers[self._newest.path.name] = self._newest.header
            self._newest.close()
            self._newest = None
        self._segment = np.empty(0, np.uint8)
        self._base = -1

    # ------------------------------------------------------------ cutting

    def truncate(self, offset: int) -> None:
        """Drop the items of all records at or behind ``offset``, newest file first; empty files are deleted too."""
        self._release()
        while self._names:
            name = self._names[-1]
            header = self._headers[name]
            if header.end_offset < offset:
                break
            # The file must not count as durable any more before it changes. However, it does not count as written to:
            # if this process dies in here, its successor must not take the rest for the predecessor's work.
            self._forget_durable(name)
            if self._saved.clean:
                self._save(clean=False)
            if failpoints.ACTIVE:
                failpoints.hit("index.before_cut")
            with self._opened(name) as file:
                keep = file.first_item_from(offset)
                if keep > 1:
                    end = file.item_offset(keep - 1)
                    file.cut(keep, self._store_timestamp(end, header), end)
                    self._headers[name] = file.header
                    break
            self._delete_from(len(self._names) - 1)
        self._take_up()

    def _forget_durable(self, first: str) -> None:
        """Mark the files from ``first`` on as no longer durable; the mark is on the device before they change."""
        if any(name >= first for name in self._durable):
            self._durable = {name for name in self._durable if name < first}
            self._lowered = True
            self._save(clean=False)

    def expire(self, min_offset: int) -> None:
        """Delete files whose newest record is below ``min_offset``, oldest first, never the newest file (spec 10.4)."""
        while len(self._names) > 1 and self._headers[self._names[0]].end_offset < min_offset:
            name = self._names.pop(0)
            del self._headers[name]
            disk.unlink(self.folder / name, "index", missing_ok=True)
            self._durable.discard(name)
            self._log.info("index file expired", file=name)

    def _delete_from(self, number: int) -> None:
        """Delete the files from ``number`` on, newest first, so that a death in between leaves no gap."""
        for name in reversed(self._names[number:]):
            disk.unlink(self.folder / name, "index", missing_ok=True)
            self._headers.pop(name, None)
            self._durable.discard(name)
        del self._names[number:]


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
