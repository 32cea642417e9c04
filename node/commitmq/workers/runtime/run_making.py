"""Makes runs for other queues from records of the log: what a mover appends (:mod:`commitmq.workers.runtime.run_mover`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.errors import OffsetOutOfRangeError
from commitmq.format.constants import SYS_FLAG_OFFSET, Property, SysFlag
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.readdressing import Target, find, readdress
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError
from commitmq.workers.runtime.run_mover import MovedRun

Integers = NDArray[np.int64]
Report = Callable[[str, int], None]
"""Told why a message is not moved, and its physical offset."""

_MOST_RUN_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 16 << 20
_GROWTH_BYTES: Final = 256  # of a record: its topic's name, a CRC, some properties
_HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"


def few_enough(sizes: Integers) -> int:
    """How many of the first messages are few enough bytes to be taken at once: they are copied several times on their way."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return max(1, int(np.searchsorted(ends, _MOST_BYTES, side="right"))) if len(sizes) else 0


class RunMaker:
    """Makes runs from the records of ``log``. Messages that cannot be moved are reported and left out."""

    def __init__(self, log: CommitLog, config: NodeConfig, report: Report) -> None:
        self._log = log
        self._report = report
        self._store_v6 = ":" in config.network.store_host
        self._properties_crc = config.commit_log.append_properties_crc
        self._max_run_bytes = min(_MOST_RUN_BYTES, config.commit_log.max_run_bytes)

    def by_segment(
        self, places: Integers, *, silent: bool = False
    ) -> Iterator[tuple[int, NDArray[np.uint8], Integers]]:
        """``(base, data, which)`` of each segment that is still there; ``which`` are the indices of its records.

        ``silent``: another look at the same records reports those that have expired.
        """
        bases = places - places % self._log.segment_bytes
        for base in np.unique(bases).tolist():
            which = np.flatnonzero(bases == base)
            try:
                data = np.frombuffer(self._log.read(base, self._log.segment_bytes), np.uint8)
            except OffsetOutOfRangeError:
                for place in [] if silent else places[which].tolist():
                    self._report("its record has expired", place)
                continue
            yield base, data, which

    def runs(
        self,
        base: int,
        data: NDArray[np.uint8],
        positions: Integers,
        sizes: Integers,
        *,
        more: Sequence[bytes] | None = None,
        to: tuple[str, int] | None = None,
    ) -> Iterator[MovedRun]:
        """The messages at ``positions`` of ``data``, the segment at ``base``, as runs, each of one queue and host layout.

        A message goes ``to`` a topic and queue, or to its REAL_TOPIC and REAL_QID. ``more``: encoded properties to put
        into those of each message; the properties are then in the order of a Java HashMap.
        """
        if not len(positions):
            return
        found = find(data, positions, sizes, [Property.REAL_TOPIC, Property.REAL_QUEUE_ID])
        if to is None:
            numbers, firsts = found.alike()
        else:
            numbers, firsts = np.zeros(len(positions), np.int64), [0]
        wide = (data[positions + SYS_FLAG_OFFSET + 3] & SysFlag.BORN_HOST_V6) != 0
        for number, first in enumerate(firsts):
            topic, queue = _address(found.value(0, first), found.value(1, first)) if to is None else to
            for born_v6 in (False, True):
                mine = (numbers == number) & (wide == born_v6)
                good = mine & found.whole
                if topic is None or topic == _HALF_TOPIC:
                    good &= False
                for place in positions[mine & ~good].tolist():
                    self._report("its record does not say where it belongs", base + place)
                which = np.flatnonzero(good)
                for part in _parts(sizes[which], self._max_run_bytes):
                    added = None if more is None else [more[index] for index in which[part].tolist()]
                    for run in self._readdressed(base, data, positions[which][part], topic or "", queue, added):
                        yield MovedRun(topic or "", queue, run, born_v6)

    def _readdressed(
        self,
        base: int,
        data: NDArray[np.uint8],
        positions: Integers,
        topic: str,
        queue: int,
        more: Sequence[bytes] | None,
    ) -> Iterator[CheckedRun]:
        """The messages as one run. One that breaks a limit is reported, and the others go in runs around it."""
        aim = Target(topic.encode(), queue, self._store_v6, self._properties_crc)
        try:
            run = readdress(data, np.ascontiguousarray(positions), aim, more)
        except MessageIllegalError as error:
            if len(positions) == 1:
                self._report(str(error), base + int(positions[0]))
                return
        else:
            yield run
            return
        middle = len(positions) // 2
        for part in (slice(0, middle), slice(middle, None)):
            some = None if more is None else more[part]
            yield from self._readdressed(base, data, positions[part], topic, queue, some)


def _address(topic: bytes, queue: bytes) -> tuple[str | None, int]:
    try:
        return (topic.decode() or None), int(queue)
    except ValueError:
        return None, 0


def _parts(sizes: Integers, max_run_bytes: int) -> Iterator[slice]:
    """Cuts into runs."""
    ends = np.cumsum(sizes + _GROWTH_BYTES)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_run_bytes, side="right")))
        yield slice(start, stop)
        start = stop


def one_by_one(one: MovedRun) -> Iterator[MovedRun]:
    """The messages of a run, each as a run of its own."""
    start = 0
    for end in one.run.ends.tolist():
        data = one.run.data[start:end]
        yield MovedRun(one.topic, one.queue_id, CheckedRun(data, np.array([end - start], np.int64), 1), one.born_v6)
        start = end


def unique_key(one: MovedRun) -> str:
    """The unique key of the first message of a run, for people who look for it."""
    found = find(one.run.data, np.zeros(1, np.int64), one.run.ends[:1], [Property.UNIQUE_KEY])
    return found.value(0, 0).decode("utf-8", "replace")
