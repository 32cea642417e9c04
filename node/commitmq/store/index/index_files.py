"""The writing side of a store's index: files in order of their names, the newest one growing (spec 4.3).

:mod:`commitmq.store.index.index_opening` says which files can be trusted after a start. A thread makes full files
durable as soon as they have a successor. A file whose fdatasync failed is worthless, because the kernel has marked its
pages clean: it and all newer ones are deleted and the process ends, to rebuild them.

A start looks at a sample of each file. After a crash the thread also reads whole files, one after the other; a damaged one and
all newer ones are deleted, and indexing goes back (:attr:`IndexFiles.goes_back_to`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import sync_folder
from commitmq.format.index_header import IndexHeader, IndexShape, list_index_files
from commitmq.kernels.codes import STATE_LAST_ITEMS, STATE_LAST_OFFSET, STATE_ROW
from commitmq.log import Log
from commitmq.store.index.index_file import IndexFile, create, file_name, is_whole, new_state, store_error
from commitmq.store.index.index_listing import IndexListing
from commitmq.store.index.index_opening import IndexOpening, store_timestamp
from commitmq.store.index.index_state import SavedState
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch

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
        """``run`` is emptied at every start of the node. New files are made there or, if ``folder`` is a separate file
        system, in ``folder``.
        """
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
