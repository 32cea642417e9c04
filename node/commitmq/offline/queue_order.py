"""Compares the bounds of a ConsumeQueue in all pieces of the log: its queue offsets must be consecutive.

The places of batch units are known only when the pieces before are, so :meth:`QueueOrder.misplaced` tells which pieces
must be checked again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from commitmq.files.fd_cache import FdCache, affordable_files
from commitmq.format.constants import PREBLANK_SIZE
from commitmq.format.units import UNIT
from commitmq.offline.findings import LOG, Faults, Finding, Single
from commitmq.offline.piece_bounds import BATCH, LIGHT, Bounds, Queue
from commitmq.offline.queue_units import QueueUnits, locate
from commitmq.offline.store_view import StoreView

_MOST_BLANKS: Final = 1_000_000


def disorder(units: QueueUnits, queue: Queue, wanted: int, number: int, physical_offset: int, size: int) -> Single:
    """A record whose queue offset is not consecutive; a note where a repair left pre-blank units of lost records."""
    is_repaired = False
    if wanted < number <= wanted + _MOST_BLANKS:
        found = units.read(queue, wanted, number - wanted)
        is_repaired = bool(((found["size"] == PREBLANK_SIZE) & (found["physical_offset"] == 0)).all())
    detail = f"{queue[0]} queue {queue[1]}: queue offset {number} comes where {wanted} must"
    finding = Finding("log.order", "commitlog", physical_offset, size, detail, is_repaired)
    return Single((LOG, physical_offset, 1), finding)


class QueueOrder:
    """Combines the bounds of all pieces, which come in the log's order. Memory: two numbers for each queue."""

    def __init__(self, view: StoreView, faults: Faults) -> None:
        config = view.config.consume_queue
        self._fds = FdCache(affordable_files(config.max_open_files))
        self._plain = QueueUnits(view.layout.consume_queue, UNIT, config.file_bytes, self._fds)
        self._batch_root = view.layout.batch_consume_queue
        self._faults = faults
        self.ends: dict[Queue, int] = {}
        """Behind the last unit that has a record."""
        self.batch_ends: dict[Queue, int] = {}

    def misplaced(self, pieces: Iterable[Bounds]) -> dict[int, dict[Queue, int]]:
        """The pieces, by number, whose batch units were searched at wrong places, with the right places."""
        wrong: dict[int, dict[Queue, int]] = {}
        ends = dict(self.batch_ends)
        for index, bounds in enumerate(pieces):
            places = {}
            for row in bounds.table[bounds.table["kind"] == BATCH]:
                queue = (bounds.names[int(row["topic"])], int(row["queue_id"]))
                if queue not in ends:
                    # Units before it belong to expired records.
                    ends[queue] = max(0, locate(self._batch_root, queue, int(row["physical_offset"])))
                places[queue] = ends[queue]
                if int(row["place"]) != ends[queue]:
                    wrong[index] = places
                ends[queue] += int(row["count"])
        return wrong

    def take(self, bounds: Bounds) -> None:
        """Take the next piece: report queue offsets that are not consecutive."""
        for topic, queue_id, kind, first, following, place, size, count, at in bounds.table.tolist():
            queue = (bounds.names[topic], queue_id)
            if kind == BATCH:
                self.batch_ends[queue] = at + count
            elif kind == LIGHT:
                self.ends[queue] = max(self.ends.get(queue, 0), following)
            else:
                wanted = self.ends.get(queue, first)
                if wanted != first:
                    self._faults.add(disorder(self._plain, queue, wanted, first, place, size))
                self.ends[queue] = following

    def close(self) -> None:
        self._fds.close()
