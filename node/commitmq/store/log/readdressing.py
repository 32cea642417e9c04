"""Makes runs for another topic and queue from records: the arrays around the kernel ``readdress``.

Rewrites a part of the log byte for byte, so that the next sync writes it to the device even if the kernel believes
that it is there.

After a failed sync the kernel counts the pages as clean: a later sync succeeds without them. If the process that called
the sync was killed before it could report the failure, no other process knows of it. Rewritten pages are dirty again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq import failpoints
from commitmq.files import disk
from commitmq.files.disk import write_all
from commitmq.files.unshare import data_extents
from commitmq.format.constants import MAX_PROPERTIES_BYTES
from commitmq.format.file_names import segment_name
from commitmq.kernels import codes, compiled
from commitmq.kernels.compiled import find_properties
from commitmq.store.layout import StoreLayout
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError, sentence_of

_CHUNK_BYTES: Final = 1 << 20


def write_anew(layout: StoreLayout, start: int, end: int, segment_bytes: int) -> int:
    """Write [start, end) of the log over itself; returns the bytes. Syncs nothing. Raises OSError. No other process may
    write there in the meantime. A crash in the middle leaves the same bytes.
    """
    written = 0
    for base in range(start - start % segment_bytes, end, segment_bytes):
        path = layout.commit_log / segment_name(base)
        if not path.exists():
            continue
        with disk.opened(path, os.O_RDWR, "segment") as fd:
            for begin, stop in data_extents(fd, max(0, start - base), min(segment_bytes, end - base)):
                for at in range(begin, stop, _CHUNK_BYTES):
                    data = os.pread(fd, min(_CHUNK_BYTES, stop - at), at)
                    write_all(fd, data, at, place="recovery.write_anew")
                    written += len(data)
        if failpoints.ACTIVE:
            failpoints.hit("recovery.after_write_anew")
    return written


_SENTENCES: Final = {
    codes.REASON_TOO_MANY_PAIRS: f"it has more than {codes.MAX_PAIRS} properties",
    codes.REASON_PROPERTIES_SIZE: f"its properties would have more than {MAX_PROPERTIES_BYTES} bytes",
}
_ROOM = 64  # for what a new record has more than its source, beside topic and properties: hosts, slot, length bytes


@dataclass(frozen=True, slots=True)
class NewAddress:
    """Where the new records belong, and how a record of this log ends and names its store host."""

    topic: bytes
    queue_id: int
    store_v6: bool
    properties_crc: bool


def readdress(
    data: NDArray[np.uint8], starts: NDArray[np.int64], target: NewAddress, more: Sequence[bytes] | None = None
) -> CheckedRun:
    """A run for ``target`` from the records of ``data`` that begin at ``starts``.

    ``more``: encoded properties to put into those of record i; one element counts for all records. The properties are
    then in the order of a Java HashMap. None leaves the properties as they are. The records were checked before.
    Raises MessageIllegalError when a new record would break a limit.
    """
    added = b"".join(more or ())
    ends = np.cumsum([len(one) for one in more or (b"",)], dtype=np.int64)
    longest = max((len(one) for one in more or ()), default=0)
    total = int(sum(_sizes(data, starts))) + len(starts) * (len(target.topic) + longest + _ROOM)
    out: NDArray[np.uint8] = np.empty(total, np.uint8)
    new_ends: NDArray[np.int64] = np.empty(len(starts), np.int64)
    result: NDArray[np.int64] = np.zeros(2, np.int64)
    reason = compiled.readdress(
        data,
        starts,
        np.frombuffer(target.topic, np.uint8),
        target.queue_id,
        target.store_v6,
        np.frombuffer(added, np.uint8),
        ends,
        more is not None,
        target.properties_crc,
        out,
        new_ends,
        result,
    )
    if reason != codes.OK:
        raise MessageIllegalError(
            f"record {int(result[0])}: {_SENTENCES.get(reason) or sentence_of(reason)}",
            code="PROPERTIES_SIZE_EXCEEDED" if reason == codes.REASON_PROPERTIES_SIZE else "MESSAGE_ILLEGAL",
        )
    return CheckedRun(out[: int(result[1])], new_ends, len(starts))


def starts_of(run: CheckedRun) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), run.ends[:-1]))


@dataclass(frozen=True, slots=True)
class FoundProperties:
    """Properties of records: value of name k in record i is ``data[starts[k, i]:starts[k, i] + lengths[k, i]]``."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    whole: NDArray[np.bool_]
    """False where no record of the given size lies at all."""

    def value(self, name: int, record: int) -> bytes:
        """One value; empty when the record lacks the property."""
        start = int(self.starts[name, record])
        return self.data[start : start + int(self.lengths[name, record])].tobytes()

    def alike(self) -> tuple[NDArray[np.int64], list[int]]:
        """``(numbers, firsts)``: records whose values are all equal have the same number; the first record of each."""
        numbers: NDArray[np.int64] = np.empty(self.starts.shape[1], np.int64)
        firsts: NDArray[np.int64] = np.empty(self.starts.shape[1], np.int64)
        count = compiled.number_alike(self.data, self.starts, self.lengths, numbers, firsts)
        return numbers, firsts[:count].tolist()


def find(
    data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64], names: Sequence[str]
) -> FoundProperties:
    """The properties ``names`` of the records of ``sizes`` bytes at ``starts``."""
    encoded = [name.encode() for name in names]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    shape = (len(names), len(starts))
    found = FoundProperties(data, np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(len(starts), np.bool_))
    text = np.frombuffer(b"".join(encoded), np.uint8)
    find_properties(data, starts, sizes, text, bounds, found.starts, found.lengths, found.whole)
    return found


def sizes_of(run: CheckedRun) -> NDArray[np.int64]:
    """How many bytes each record of a run has."""
    return np.diff(run.ends, prepend=np.int64(0))


def _sizes(data: NDArray[np.uint8], starts: NDArray[np.int64]) -> Any:
    return data[starts[:, None] + np.arange(4)].astype(np.int64) @ np.array([1 << 24, 1 << 16, 1 << 8, 1], np.int64)
