"""Multi-dispatch: a record that names further queues gets a unit in each of them too (spec 3.10).

The writer stored the names (``INNER_MULTI_DISPATCH``) and the assigned queue offsets (``INNER_MULTI_QUEUE_OFFSET``) in
the record. So the log alone says where every unit belongs, and dispatching it again, in any process, gives the same
queues. For the same reason the records decide, not the present value of ``consume_queue.enable_multi_dispatch``: a
record that was stored while it was on has used up an offset, and without its unit the queue would have a hole.
"""

from __future__ import annotations

import numpy as np

from commitmq.format.constants import LMQ_PREFIX, MULTI_DISPATCH_SEPARATOR, RETRY_PREFIX, UNIT_BYTES
from commitmq.format.units import UNIT_STRUCT
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.store.log.dispatch_batch import DispatchBatch, Rows

_MAX_NAME_BYTES = 255
_MAX_OFFSET_DIGITS = 18
_EXCEPT = (RETRY_PREFIX, "rmq_sys_")

Run = tuple[tuple[str, int], int, bytearray]
"""Queue, queue offset of the first unit, consecutive units."""


def runs(batch: DispatchBatch, rows: Rows) -> list[Run]:
    """Units for the further queues that ``rows`` (of ``batch``, in log order) name, in the log's order for each queue.

    Skipped, as in RocketMQ, are retry, system and schedule topics, lists of unequal length, names with a path
    separator, and offsets that are not numbers.
    """
    found: list[Run] = []
    last: dict[tuple[str, int], int] = {}  # the newest run of each queue
    assert batch.log is not None
    for row in rows[np.flatnonzero((rows["multi_size"] > 0) & (rows["multi_offsets_size"] > 0))]:
        topic = batch.topics[int(row["topic"])]
        if topic.startswith(_EXCEPT) or topic == SCHEDULE_TOPIC:
            continue
        record = batch.log.read(int(row["physical_offset"]), int(row["size"]))
        names = _list(record, int(row["multi_start"]), int(row["multi_size"]))
        offsets = _list(record, int(row["multi_offsets_start"]), int(row["multi_offsets_size"]))
        if len(names) != len(offsets):
            continue
        unit = UNIT_STRUCT.pack(int(row["physical_offset"]), int(row["size"]), int(row["tags_code"]))
        for name, text in zip(names, offsets, strict=True):
            if not _is_folder(name) or not text.isascii() or not text.isdigit() or len(text) > _MAX_OFFSET_DIGITS:
                continue
            offset = int(text)
            key = (name, 0 if name.startswith(LMQ_PREFIX) else int(row["queue_id"]))
            run = found[last[key]] if key in last else None
            if run is not None and run[1] + len(run[2]) // UNIT_BYTES == offset:
                run[2].extend(unit)
            else:
                last[key] = len(found)
                found.append((key, offset, bytearray(unit)))
    return found


def _list(record: memoryview, start: int, size: int) -> list[str]:
    return str(record[start : start + size], "utf-8", "replace").split(MULTI_DISPATCH_SEPARATOR)


def _is_folder(name: str) -> bool:
    """Whether ``name`` can be a folder's name. A name that would lead to another folder, or cannot be a folder, gets no
    queue.
    """
    return bool(name) and name not in (".", "..") and not {"/", "\0"} & set(name) and _fits(name)


def _fits(name: str) -> bool:
    return len(name.encode("utf-8", "replace")) <= _MAX_NAME_BYTES
