"""Searches a ConsumeQueue behind its last record: units that stand for no record, and files of a wrong size."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from commitmq.format.constants import PREBLANK_SIZE
from commitmq.format.units import BATCH_UNIT, UNIT
from commitmq.offline.findings import QUEUES, Faults, Finding, Single
from commitmq.offline.queue_units import runs, show, written_units
from commitmq.offline.store_view import StoreView


@dataclass(frozen=True, slots=True)
class Rest:
    """A queue to be checked behind unit number ``end``; -1 when the log has no record of it."""

    topic: str
    queue_id: int
    is_batch: bool
    end: int


def check_rest(view: StoreView, rests: tuple[Rest, ...]) -> Faults:
    """Search for units without a record, and for files of a wrong size."""
    faults = Faults()
    for rest in rests:
        layout, config = view.layout, view.config.consume_queue
        root = layout.batch_consume_queue if rest.is_batch else layout.consume_queue
        file_bytes = config.batch_file_bytes if rest.is_batch else config.file_bytes
        for path in sorted((root / rest.topic / str(rest.queue_id)).glob("[0-9]" * 20)):
            _check_file(view, rest, path, file_bytes, faults)
    return faults


def _check_file(view: StoreView, rest: Rest, path: Path, file_bytes: int, faults: Faults) -> None:
    kind = BATCH_UNIT if rest.is_batch else UNIT
    base, size = int(path.name), path.stat().st_size
    order = (QUEUES, rest.is_batch, rest.topic, rest.queue_id, 1)
    file = os.path.relpath(path, view.root)
    if size not in (0, file_bytes):
        detail = f"it has {size} bytes, not {file_bytes}"
        faults.add(Single((*order, "file.unreadable", base), Finding("file.unreadable", file, 0, size, detail)))
        return
    if rest.is_batch and rest.end < 0:
        return  # all records of the queue expired
    first = max(0, max(0, rest.end) * kind.itemsize - base) // kind.itemsize
    for position, units in written_units(path, first * kind.itemsize, kind):
        # Pre-blank units occupy the places before a queue's first unit (spec 3.3).
        is_blank = (units["size"] == PREBLANK_SIZE) & (units["physical_offset"] == 0) & (not rest.is_batch)
        for start, stop in runs((units["size"] > 0) & ~is_blank):
            at = position + start * kind.itemsize
            detail = (
                f"{stop - start} unit(s) of {rest.topic} queue {rest.queue_id} stand for no record, "
                f"first {show(units[start])}"
            )
            is_note = view.was_open or rest.end < 0
            finding = Finding("queue.extra", file, at, (stop - start) * kind.itemsize, detail, is_note)
            faults.add(Single((*order, "queue.extra", base + at), finding))
