"""Detects an index file that is missing between two others, or before the first: the files do not tell, the log does.

A file's header names the first and the last record that the file has items of. Either there is no record with a key
between the last of one file and the first of the next, or a file is missing. The two records are usually adjacent in
the log, so this takes one read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from commitmq.errors import StoreError
from commitmq.format.constants import SysFlag
from commitmq.format.index_header import IndexHeader
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker

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
