"""The task of a parallel rebuild that makes one index file; its items are known once the items of the log are counted.

The items of all files are numbered from 0 in the log's order, and a file has as many as fit (spec 4.2): so the numbers
of items in the pieces of the log tell where each file begins. The node's own code makes the file, from a record before
it on, because the first item's seconds count from that record's time.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from commitmq.errors import StoreError
from commitmq.format.index_header import IndexHeader, IndexShape
from commitmq.kernels import codes, compiled
from commitmq.offline.rebuild_pieces import writing
from commitmq.offline.store_view import StoreView
from commitmq.store.index.index_file import create, new_state
from commitmq.store.layout import StoreLayout
from commitmq.store.log.dispatch_batch import Rows


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Make file ``name``, whose items begin with number ``first_item``, from the log up to ``end``.

    ``start`` is the position of a record with ``items_before`` items before it; the last item of the file before,
    number ``first_item - 1``, belongs to a record at or behind it.
    """

    staging: Path
    name: str
    first_item: int
    start: int
    items_before: int
    end: int


def make_index_file(view: StoreView, task: IndexTask) -> int:
    """See :class:`IndexTask`; returns the physical offset at which the file ends. Raises StoreError, DiskFullError."""
    shape = IndexShape(view.config.index.hash_slots, view.config.index.max_items)
    log = view.open_log()
    walker = view.walker(log)
    seen, position = task.items_before, task.start
    file = None
    state = new_state()
    with writing(task.staging):
        own = task.staging / f"index-{uuid.uuid4().hex}"
        own.mkdir()
        while position < task.end:
            base = position - position % view.segment_bytes
            batch = walker.walk(position, task.end)
            segment = np.frombuffer(log.read(base, view.segment_bytes), np.uint8)
            rows: Rows = np.require(batch.rows, requirements=["C", "ALIGNED"])
            position = batch.end
            if file is None:
                counts = np.zeros(len(rows), np.int64)
                compiled.count_items(segment, base, rows, counts)
                sums = seen + np.cumsum(counts)
                if not len(rows) or (task.first_item and int(sums[-1]) < task.first_item):
                    seen = int(sums[-1]) if len(rows) else seen
                    continue
                before = None
                if task.first_item:
                    row = int(np.searchsorted(sums, task.first_item))
                    stamp, offset = int(rows["store_timestamp"][row]), int(rows["physical_offset"][row])
                    before = IndexHeader(stamp, stamp, offset, offset, 0, 1)
                    state[codes.STATE_LAST_OFFSET] = offset
                    state[codes.STATE_LAST_ITEMS] = task.first_item - int(sums[row] - counts[row])
                    rows = rows[row:]
                file = create(own / task.name, own / "new", shape, before)
                file.load(state)
            state[codes.STATE_ROW] = 0
            if not file.insert(segment, base, rows, state):
                break
        if file is None:
            raise StoreError("the log has changed since its items were counted", path=view.root)
        end = file.header.end_offset
        file.sync()
        file.close()
        walker.release()
        (own / task.name).rename(StoreLayout(task.staging).index / task.name)
        own.rmdir()
    return end
