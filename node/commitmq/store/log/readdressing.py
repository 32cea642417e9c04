"""Makes runs for another topic and queue from records: the arrays around :mod:`commitmq.kernels.readdress`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.kernels import raw
from commitmq.kernels import readdress as kernel
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError, sentence_of

_SENTENCES: Final = {
    kernel.REASON_TOO_MANY_PAIRS: f"it has more than {kernel.MAX_PAIRS} properties",
    kernel.REASON_PROPERTIES_SIZE: f"its properties would have more than {kernel.MAX_PROPERTIES} bytes",
}
_ROOM = 64  # for what a new record has more than its source, beside topic and properties: hosts, slot, length bytes


@dataclass(frozen=True, slots=True)
class Target:
    """Where the new records belong, and how a record of this log ends and names its store host."""

    topic: bytes
    queue_id: int
    store_v6: bool
    properties_crc: bool


def readdress(
    data: NDArray[np.uint8], starts: NDArray[np.int64], target: Target, more: Sequence[bytes] | None = None
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
    reason = kernel.readdress(
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
    if reason != raw.OK:
        raise MessageIllegalError(
            f"record {int(result[0])}: {_SENTENCES.get(reason) or sentence_of(reason)}",
            code="PROPERTIES_SIZE_EXCEEDED" if reason == kernel.REASON_PROPERTIES_SIZE else "MESSAGE_ILLEGAL",
        )
    return CheckedRun(out[: int(result[1])], new_ends, len(starts))


def starts_of(run: CheckedRun) -> NDArray[np.int64]:
    """Where each record of a run begins."""
    return np.concatenate((np.zeros(1, np.int64), run.ends[:-1]))


def values(data: NDArray[np.uint8], starts: NDArray[np.int64], name: str) -> list[bytes | None]:
    """The value of the property ``name`` of each record; None where a record lacks it."""
    spans = np.empty((len(starts), 2), np.int64)
    kernel.property_spans(data, starts, np.frombuffer(name.encode(), np.uint8), spans)
    return [None if start < 0 else data[start:end].tobytes() for start, end in spans.tolist()]


def common_value(data: NDArray[np.uint8], starts: NDArray[np.int64], name: str) -> bytes | None:
    """The value of the property ``name`` when all records have the same one; None when they differ or one lacks it."""
    spans = np.empty((len(starts), 2), np.int64)
    found = kernel.property_spans(data, starts, np.frombuffer(name.encode(), np.uint8), spans)
    if found != len(starts) or not kernel.same_values(data, spans):
        return None
    return data[int(spans[0, 0]) : int(spans[0, 1])].tobytes()


def _sizes(data: NDArray[np.uint8], starts: NDArray[np.int64]) -> Any:
    return data[starts[:, None] + np.arange(4)].astype(np.int64) @ np.array([1 << 24, 1 << 16, 1 << 8, 1], np.int64)
