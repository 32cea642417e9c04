"""The columns ``delay_ms`` and ``deliver_at`` of a row: when consumers shall get its message."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from commitmq.client.sending.asked import LEAST_DELIVER_MS
from commitmq.errors import InvalidMessageError

TIME_COLUMNS: Final = ("delay_ms", "deliver_at")
_NONE: Final = -1


def by_time(rows: pa.RecordBatch) -> Iterator[tuple[dict[str, Any], pa.RecordBatch]]:
    """The rows of each time, in their order, with the arguments of ``send_batch`` for it; rows without one come first.

    Raises InvalidMessageError for a row with both columns, and for a negative delay. A delay of 0 is none.
    """
    if all(name not in rows.schema.names or rows.column(name).null_count == rows.num_rows for name in TIME_COLUMNS):
        yield {}, rows
        return
    delays, times = _delays(rows), _times(rows)
    if bool(np.any((delays != _NONE) & (times != _NONE))):
        raise InvalidMessageError("a row has both delay_ms and deliver_at; a message has one time")
    delays[delays == 0] = _NONE
    found, which = np.unique(np.stack((delays, times), axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(np.bincount(which, minlength=len(found)))
    for (delay, time), mine in zip(found.tolist(), np.split(order, ends[:-1]), strict=True):
        part = rows if len(mine) == rows.num_rows else rows.take(pa.array(mine))
        if delay != _NONE:
            yield {"delay": timedelta(milliseconds=delay)}, part
        elif time != _NONE:
            yield {"deliver_at": time}, part
        else:
            yield {}, part


def _delays(rows: pa.RecordBatch) -> NDArray[np.int64]:
    if "delay_ms" not in rows.schema.names:
        return np.full(rows.num_rows, _NONE, np.int64)
    column = rows.column("delay_ms").cast(pa.int64())
    least = pc.min(column).as_py()
    if least is not None and least < 0:
        raise InvalidMessageError(f"a row has the delay_ms {least}; a delay is 0 or more")
    return np.array(column.fill_null(_NONE), np.int64)


def _times(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """In ms since 1970, rounded up: a message never comes early. Times before LEAST_DELIVER_MS have passed as well as it."""
    if "deliver_at" not in rows.schema.names:
        return np.full(rows.num_rows, _NONE, np.int64)
    column = rows.column("deliver_at")
    micros = np.array(column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64()).fill_null(0), np.int64)
    given = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    return np.where(given, np.maximum(-(-micros // 1000), LEAST_DELIVER_MS), _NONE)
