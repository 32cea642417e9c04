"""Replays the log into the table of idempotent producers, and finds a producer's stored messages in the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError
from commitmq.kernels.codes import MARK_EPOCH, MARK_FOLLOWS, MARK_ID_SIZE, MARK_ID_START, MARK_SEQUENCE
from commitmq.kernels.compiled import find_marks
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.store.producers.producer_table import Place, ProducerTable

StoredRecord = tuple[int, int, int, str]
"""Queue offset, physical offset, store timestamp (ms) and unique id of a stored message."""

UNKNOWN: Final[StoredRecord] = (-1, -1, -1, "")
"""The message is stored, but its place is not remembered."""

_Marks = np.ndarray[Any, np.dtype[np.int64]]
_WALK_ROWS: Final = 16_384


def marks_of(batch: DispatchBatch) -> tuple[_Marks, memoryview] | None:
    """The marks of ``batch``'s records, a row each (MARK_*), and the segment they point into; None if none."""
    rows = batch.rows
    if not len(rows) or batch.log is None:
        return None
    segment_bytes = batch.log.segment_bytes
    base = int(rows["physical_offset"][0]) // segment_bytes * segment_bytes
    segment = batch.log.read(base, segment_bytes)
    properties = np.ascontiguousarray(rows["physical_offset"] - base + rows["properties_start"], np.int64)
    marks = np.empty((len(rows), 5), np.int64)
    sizes = np.ascontiguousarray(rows["properties_size"], np.int64)
    if not find_marks(np.frombuffer(segment, np.uint8), properties, sizes, marks):
        return None
    return marks, segment


def replay(table: ProducerTable, batch: DispatchBatch, deleted: Mapping[str, int]) -> None:
    """Enter every record of ``batch`` with a producer's mark into ``table``; the batch must have its log attached.

    ``deleted``: the physical offset below which a topic's records no longer count.
    """
    found = marks_of(batch)
    if found is None:
        return
    marks, segment = found
    rows = batch.rows
    offsets, sizes = rows["physical_offset"], rows["size"].astype(np.int64)
    joined = marks[:, MARK_FOLLOWS] == 1
    joined[1:] &= (
        (rows["topic"][1:] == rows["topic"][:-1])
        & (rows["queue_id"][1:] == rows["queue_id"][:-1])
        & (rows["queue_offset"][1:] == rows["queue_offset"][:-1] + 1)
        & (offsets[1:] == offsets[:-1] + sizes[:-1])
    )
    starts = np.flatnonzero((marks[:, MARK_SEQUENCE] >= 0) & ~joined)
    # A stretch continues as long as each record joins the one before.
    breaks = np.append(np.flatnonzero(~joined), len(rows))
    stops = breaks[np.searchsorted(breaks, starts, side="right")]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        row, last = rows[start], rows[stop - 1]
        topic = batch.topics[int(row["topic"])]
        if int(row["physical_offset"]) < deleted.get(topic, 0):
            continue
        at, size = int(marks[start, MARK_ID_START]), int(marks[start, MARK_ID_SIZE])
        place = Place(
            int(marks[start, MARK_SEQUENCE]),
            stop - start,
            int(row["queue_offset"]),
            int(row["physical_offset"]),
            int(last["physical_offset"]) + int(last["size"]),
        )
        name = bytes(segment[at : at + size]).decode("utf-8", "replace")
        stamp = int(last["store_timestamp"])
        table.replay(name, int(marks[start, MARK_EPOCH]), topic, int(row["queue_id"]), place, stamp)


def find_stored(
    log: CommitLog, places: Iterable[Place], producer_id: str, epoch: int, sequence: int, count: int
) -> list[StoredRecord]:
    """The places of ``count`` messages from ``sequence`` on, read from the log; ``places`` say where to look.

    :data:`UNKNOWN` for messages that no place covers, or that expired meanwhile. Each found record's mark is compared.
    """
    stored = [UNKNOWN] * count
    name = producer_id.encode()
    for place in places:
        first, stop = max(place.sequence, sequence), min(place.sequence + place.records, sequence + count)
        if first >= stop:
            continue
        walker = LogWalker(log, max_rows=_WALK_ROWS, max_bytes=log.segment_bytes)
        at = place.physical_offset
        try:
            while at < place.end:
                batch = walker.walk(at, place.end)
                found = marks_of(batch)
                if found is None:
                    break
                marks, segment = found
                wanted = (
                    (marks[:, MARK_SEQUENCE] >= first)
                    & (marks[:, MARK_SEQUENCE] < stop)
                    & (marks[:, MARK_EPOCH] == epoch)
                )
                for index in np.flatnonzero(wanted).tolist():
                    start, size = int(marks[index, MARK_ID_START]), int(marks[index, MARK_ID_SIZE])
                    if bytes(segment[start : start + size]) != name:
                        continue
                    row = batch.rows[index]
                    stored[int(marks[index, MARK_SEQUENCE]) - sequence] = (
                        int(row["queue_offset"]),
                        int(row["physical_offset"]),
                        int(row["store_timestamp"]),
                        batch.text(index, "uniq"),
                    )
                at = batch.end
        except (OffsetOutOfRangeError, CorruptRecordError):
            continue  # expired since, or another record than remembered: that it is stored is known all the same
        finally:
            walker.release()
    return stored
