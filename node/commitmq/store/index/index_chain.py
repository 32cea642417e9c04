"""Whether an index file is missing between two others, or before the first one: the files do not say, the log does.

A file's header names the first and the last record that it has items of. Between the last of one file and the first of the
next there is no record with a key, or a file is missing. Mostly they are neighbours in the log, so this is one look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from commitmq.errors import StoreError
from commitmq.format.constants import SysFlag
from commitmq.format.index_header import IndexHeader
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker

_MOST_ROWS: Final = 1_024
_BATCH_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 64 << 20  # of the log without a key between two files: beyond that nobody looks


class IndexChain:
    """Looks into the log, and remembers where nothing is missing. Not thread-safe."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._whole: set[tuple[int, int]] = set()

    def first_gap(self, headers: Sequence[IndexHeader]) -> int | None:
        """Number of the first of the files (oldest first, with these ``headers``) before which one is missing; None without.

        A file without an item says nothing.
        """
        start, is_indexed = self._log.min_offset, False
        for number, header in enumerate(headers):
            if header.is_empty:
                continue
            if self._is_missing(start, header.begin_offset, is_indexed):
                return number
            start, is_indexed = max(header.end_offset, self._log.min_offset), header.end_offset >= self._log.min_offset
        return None

    def _is_missing(self, start: int, begin: int, start_is_indexed: bool) -> bool:
        """Whether a record with a key lies in the log from ``start`` up to ``begin``, both where records begin."""
        if begin <= start or (start, begin) in self._whole:
            return False
        walker = LogWalker(self._log, max_rows=_MOST_ROWS, max_bytes=_BATCH_BYTES)
        position = start
        try:
            while position < min(begin, start + _MOST_BYTES):
                batch = walker.walk(position, begin)
                rows = batch.rows
                has_key = (rows["uniq_size"] > 0) | (rows["keys_size"] > 0)
                has_key &= rows["sys_flag"] & SysFlag.TRANSACTION_ROLLBACK != SysFlag.TRANSACTION_ROLLBACK
                if start_is_indexed:
                    has_key &= rows["physical_offset"] != start
                if has_key.any():
                    return True
                position = batch.end
        except StoreError:
            return False  # damage of the log, or a part that just expired: others tell
        finally:
            walker.release()
        if len(self._whole) > _MOST_ROWS:
            self._whole.clear()
        self._whole.add((start, begin))
        return False
