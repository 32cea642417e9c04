"""Finds the CommitLog position of the slowest consumer group: from its queue offset, through the ConsumeQueue's unit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT_STRUCT
from commitmq.store.log.expiry import Claim
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue


class GroupPosition(NamedTuple):
    """The next message of a queue that ``group`` will read."""

    group: str
    topic: str
    queue: int
    offset: int


class UnitFinder:
    """Reads single units of all queues of a store. Changes nothing."""

    def __init__(self, folder: Path, file_bytes: int, batch_folder: Path, batch_file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._batch_folder = batch_folder
        self._batch_file_bytes = batch_file_bytes
        self._fds = FdCache(16)

    def close(self) -> None:
        self._fds.close()

    def physical_offset(self, topic: str, queue: int, offset: int, log_min: int) -> int | None:
        """Physical offset of the first record at or behind queue ``offset`` that the log still has; None when there is
        none.

        ``log_min`` is the log's minimum. Raises StoreError.
        """
        if os.path.isdir(f"{self._batch_folder}/{topic}/{queue}"):
            return self._batch_offset(f"{self._batch_folder}/{topic}/{queue}", offset, log_min)
        folder = f"{self._folder}/{topic}/{queue}"
        at = offset * UNIT_BYTES
        base = at - at % self._file_bytes
        try:
            fd = self._fds.read_fd(f"{folder}/{segment_name(base)}")
            data = os.pread(fd, UNIT_BYTES, at - base)
        except OSError:
            data = b""
        if len(data) == UNIT_BYTES:
            physical, size, _ = UNIT_STRUCT.unpack(data)
            if size > 0 and size != PREBLANK_SIZE and physical >= log_min:
                return int(physical)
            if size == 0:
                return None  # the queue's end: the group has read everything
        return self._first_kept(folder, offset, log_min)

    def _first_kept(self, folder: str, offset: int, log_min: int) -> int | None:
        """The same for an offset whose file or record is gone: the queue's first message counts."""
        files = ConsumeQueue(folder, self._file_bytes, self._fds)
        files.refresh()
        files.correct_min_offset(log_min)
        unit = files.unit(max(offset, files.min_offset))
        return None if unit is None else unit[0]

    def _batch_offset(self, folder: str, offset: int, log_min: int) -> int | None:
        """The same for a queue whose units are batches: each may hold any number of messages."""
        files = BatchConsumeQueue(folder, self._batch_file_bytes, self._fds)
        files.refresh()
        files.correct_min_offset(log_min)
        units = files.units(files.index_of(offset), 1)
        return int(units["physical_offset"][0]) if len(units) else None


def slowest(finder: UnitFinder, positions: Iterable[GroupPosition], log_min: int) -> Claim | None:
    """The claim of the group whose next message comes first in the log; None when all groups have read everything."""
    # Only the last group of each queue counts, and there may be thousands of groups.
    last: dict[tuple[str, int], GroupPosition] = {}
    for one in positions:
        known = last.get((one.topic, one.queue))
        if known is None or one.offset < known.offset:
            last[one.topic, one.queue] = one
    found: Claim | None = None
    for one in last.values():
        physical = finder.physical_offset(one.topic, one.queue, one.offset, log_min)
        if physical is not None and (found is None or physical < found.offset):
            found = Claim(
                physical, f"group {one.group}, which has not read {one.topic}/{one.queue} from {one.offset} on"
            )
    return found
