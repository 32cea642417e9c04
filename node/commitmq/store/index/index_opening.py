"""Opens an index after a start: keeps the files that can be trusted, and removes or repairs the others.

    the process died alone     page cache intact: the header counts complete items only; items behind them are removed,
                               and the record of the newest item is indexed from its first missing item on
    the node died              only files known to be durable stay; newer ones are deleted and rebuilt from the end of
                               the newest remaining file
    the stop was orderly       all of them; nothing is written before there is something to add

``files.json`` says which files are durable and whether the last stop was orderly. Without it, RocketMQ's rule applies:
files that end after checkpoint.indexMsgTimestamp are deleted.
"""

from __future__ import annotations

import os

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.format.index_header import HEADER_BYTES, IndexHeader, IndexShape, header_of
from commitmq.log import Log
from commitmq.store.index.index_chain import IndexChain
from commitmq.store.index.index_file import IndexFile
from commitmq.store.index.index_listing import IndexListing
from commitmq.store.index.index_shape import fits
from commitmq.store.log.commit_log import CommitLog


class IndexOpening:
    """The steps of opening an index, each on the files that the steps before it left."""

    def __init__(self, listing: IndexListing, shape: IndexShape, commit_log: CommitLog, log: Log) -> None:
        self._listing = listing
        self._shape = shape
        self._commit_log = commit_log
        self._log = log

    def drop_of_other_size(self) -> bool:
        """Delete all files from the first one of another size on: the shape is the store's
        (:mod:`commitmq.config.fitting`), so such a file is torn.
        """
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
