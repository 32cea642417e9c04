"""What a mover has appended already, found in the log itself: so a message is moved once, whatever died in between.

A mover writes down from time to time how far it is: a position in its source queue, and a position in the log before which
everything that it appended belongs to messages before the first one. After a death it reads the log from there on and keeps a
key of each message that came from it. A message of the source whose key is there is passed over, once for each time.

A key is what a move leaves as it is: body CRC, flag, born time, number of tries, and all properties but ``__CRC32#``. RocketMQ
writes the properties of a copy in another order than ours, so the order does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    BORN_HOST_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    CRC_PROPERTY_PREFIX,
    FLAG_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
)
from commitmq.format.record import parts_of
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, boundary_before
from commitmq.workers.runtime.isolation import is_of_message

Key = tuple[bytes, bytes]
MakeKey = Callable[["bytes | memoryview"], Key]
Wanted = Callable[[DispatchBatch], "np.ndarray[Any, np.dtype[np.bool_]]"]
"""Which records of a batch may be this mover's."""


def key_of(record: bytes | memoryview) -> Key:
    """The key of a whole record."""
    data = bytes(record)
    born, store, _, _, properties, size = parts_of(data)
    tries = RECONSUME_TIMES_OFFSET + born + store
    pairs = data[properties : properties + size].split(b"\x02")
    # (RocketMQ's decoder drops empty values, so a copy lacks them.)
    valued = [one for one in pairs if one[-1:] not in (b"", b"\x01")]
    text = b"\x02".join(sorted(one for one in valued if not one.startswith(CRC_PROPERTY_PREFIX)))
    kept = (
        data[BODY_CRC_OFFSET:QUEUE_ID_OFFSET]
        + data[FLAG_OFFSET:QUEUE_OFFSET_OFFSET]
        + data[BORN_TIMESTAMP_OFFSET:BORN_HOST_OFFSET]
        + data[tries : tries + 4]
    )
    return kept, text


def _made(make: MakeKey, record: bytes | memoryview) -> Key | None:
    """The key of a record; None for one that can have none, which was not moved then."""
    try:
        return make(record)
    except Exception as error:
        if not is_of_message(error):
            raise
        return None


class MovedBefore:
    """The keys of what lies in a part of the log, each with how often it is there.

    ``copy_key`` is the key of a moved copy, as ``source_key`` is of its source: a mover whose copies have more properties
    than their sources gives its own.
    """

    def __init__(self, copy_key: MakeKey = key_of, source_key: MakeKey = key_of) -> None:
        self._copy_key, self._source_key = copy_key, source_key
        self._keys: Counter[Key] = Counter()

    def __len__(self) -> int:
        return self._keys.total()

    def scan(self, log: CommitLog, start: int, end: int, wanted: Wanted, beat: Callable[[], None]) -> None:
        """Read the log from ``start``, or from the beginning of the segment if no record begins there, to its ``end``.
        ``beat`` is called now and then.

        Raises CorruptRecordError.
        """
        self._keys.clear()
        walker = LogWalker(log, max_rows=65_536, max_bytes=16 << 20)
        at = boundary_before(log, start, end)
        while at < end:
            batch = walker.walk(at, end)
            for row in np.flatnonzero(wanted(batch)).tolist():
                if (key := _made(self._copy_key, batch.record(row))) is not None:
                    self._keys[key] += 1
            at = batch.end
            beat()
        walker.release()

    def pass_over(self, record: bytes | memoryview) -> bool:
        """Whether the message of ``record`` was moved already. A second call tells of a second copy."""
        key = _made(self._source_key, record)
        if key is None or not self._keys.get(key):
            return False
        self._keys[key] -= 1
        return True

    def forget(self) -> None:
        """The source is behind everything that was moved before."""
        self._keys.clear()
