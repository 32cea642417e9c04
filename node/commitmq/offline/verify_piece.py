"""The main task of a verification: compares a piece of the log with its units and items.

It changes nothing, and its result is plain and small, because it is sent from process to process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from commitmq.format.file_names import segment_name
from commitmq.offline.extents import Extent, walk_extents
from commitmq.offline.findings import LOG, Faults, Finding, Single
from commitmq.offline.piece_bounds import Bounds, Queue
from commitmq.offline.store_view import StoreView
from commitmq.offline.verify_index import IndexCheck, IndexList
from commitmq.offline.verify_queues import QueueCheck
from commitmq.store.log.commit_log import NO_START, Piece, find_start, find_stop


@dataclass(frozen=True, slots=True)
class PieceTask:
    """A piece, where to begin (with :data:`NO_START` the task must search), and the known places of batch units."""

    piece: Piece
    start: int
    index: IndexList | None
    places: Mapping[Queue, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PieceReport:
    """The result for ``[start, end)``; ``records_end`` is behind the last whole record, -1 if there is none."""

    start: int
    end: int
    records: int = 0
    units: int = 0
    records_end: int = -1
    faults: Faults = field(default_factory=Faults)
    bounds: Bounds = field(default_factory=Bounds)


def check_piece(view: StoreView, task: PieceTask) -> PieceReport:
    """Read a piece of the log and compare its records with their units and items. Raises StoreError."""
    log = view.open_log()
    base = task.piece.base
    segment = np.frombuffer(log.read(base, view.segment_bytes), np.uint8)
    start = find_start(segment, task.piece) if task.start == NO_START else task.start
    stop = NO_START if start == NO_START else find_stop(segment, task.piece)
    if start >= stop:
        return PieceReport(start, start)
    faults = Faults()
    queues = QueueCheck(view, faults, task.places)
    index = IndexCheck(view, task.index, faults) if task.index is not None else None
    walker = view.walker(log)
    records, records_end = 0, -1
    stretch = walk_extents(log, segment, base, view.bases, start, stop)
    for extent in stretch.extents:
        if extent.damage:
            faults.add(_fault(view, extent, base))
            continue
        position = records_end = extent.start
        while position < extent.end:
            batch = walker.walk(position, extent.end)
            queues.take(batch)
            if index is not None:
                index.take(batch, segment, base)
            records += len(batch)
            position = batch.end
        records_end = extent.end
    if index is not None:
        index.finish(start, stretch.end)
    queues.close()
    walker.release()
    return PieceReport(start, stretch.end, records, queues.units, records_end, faults, queues.bounds())


def _fault(view: StoreView, extent: Extent, base: int) -> Single:
    file, size = f"commitlog/{segment_name(base)}", extent.end - extent.start
    is_note = extent.is_torn_end and view.was_open
    finding = Finding("log.record", file, extent.start - base, size, extent.damage, is_note)
    return Single((LOG, extent.start, 0), finding)
