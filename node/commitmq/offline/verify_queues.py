"""The ConsumeQueues of a store against its log: every record has its unit, and every unit its record.

Batches of the log come in order; the units that they must have are compared with the queue's files in one read a queue
and batch. What remains of a queue in memory is where it begins and ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.store import multi_dispatch
from commitmq.store.batch_consume_queue import BATCH_UNIT, BATCH_UNIT_BYTES, make_units
from commitmq.store.dispatch_batch import DispatchBatch, by_queue, consumable
from commitmq.store.fd_cache import FdCache
from commitmq.store.format import LMQ_PREFIX, PREBLANK_SIZE, UNIT_BYTES, SysFlag
from commitmq.store.layout import StoreLayout, segment_name
from commitmq.store.queue_files import list_queues
from commitmq.store.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH

Tell = Callable[..., None]
"""``(kind, path, offset, extent, detail, is_note)``."""

_UNIT: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_MOST_BLANKS: Final = 1_000_000
# Below every hash of a tag: an address in a queue's extension (spec 3.8).
_FIRST_ADDRESS: Final = -(1 << 31) - 1


@dataclass(slots=True)
class _Seen:
    """Queue offsets of the records that the log has of one queue: ``[first, next)``."""

    first: int
    next: int


class QueueCheck:
    """See the module's text."""

    def __init__(
        self,
        layout: StoreLayout,
        config: NodeConfig,
        deleted: Mapping[str, int],
        attributes: Callable[[str], dict[str, str] | None],
        tell: Tell,
    ) -> None:
        self._root = layout.consume_queue
        self._batch_root = layout.batch_consume_queue
        self._batch_file_bytes = config.consume_queue.batch_file_bytes
        self._batch_units: dict[tuple[str, int], int] = {}
        self._attributes = attributes
        self._was_open = layout.abort.exists()
        self._file_bytes = config.consume_queue.file_bytes
        self._deleted = deleted
        self._tell = tell
        self._fds = FdCache(config.consume_queue.max_open_files)
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._units = 0

    def take(self, batch: DispatchBatch) -> None:
        """Compare the units of the batch's records."""
        rows = batch.rows[consumable(batch.rows)]
        if not len(rows):
            return
        if rows["multi_size"].any():
            self._compare_light(batch, rows)
        rows, starts = by_queue(rows)
        topics, queues = rows["topic"], rows["queue_id"]
        for start, stop in pairwise(starts):
            name = batch.topics[int(topics[start])]
            mine = rows[start:stop]
            gone_below = self._deleted.get(name, -1)
            if gone_below > 0:
                mine = mine[mine["physical_offset"] >= gone_below]
            if not len(mine):
                continue
            if self._is_batch(name, mine):
                self._compare_batches(name, int(queues[start]), mine)
            else:
                self._compare(name, int(queues[start]), mine)

    def _is_batch(self, topic: str, rows: NDArray[np.void]) -> bool:
        """Whether the topic has batch queues; of a topic that nobody knows any more its records tell."""
        attributes = self._attributes(topic)
        if attributes is None:
            return bool((rows["sys_flag"] & SysFlag.INNER_BATCH != 0).any())
        return attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH

    def _compare_batches(self, topic: str, queue_id: int, rows: NDArray[np.void]) -> None:
        """46-byte units come one after the other, whatever their queue offsets; each queue's next one is remembered."""
        folder = self._batch_root / topic / str(queue_id)
        at = self._batch_units.get((topic, queue_id))
        if at is None:
            at = self._first_batch_unit(folder, int(rows["physical_offset"][0]))
        # A record that is a plain message counts as a batch of one.
        inner = (rows["inner_num"] > 0) & (rows["inner_base"] >= 0)
        wanted = make_units(
            rows["physical_offset"], rows["size"], rows["tags_code"], rows["store_timestamp"],
            np.where(inner, rows["inner_base"], rows["queue_offset"]), np.where(inner, rows["inner_num"], 1),
        )  # fmt: skip
        found = self._read(folder, at, len(wanted), BATCH_UNIT, self._batch_file_bytes)
        self._batch_units[topic, queue_id] = at + len(wanted)
        self._units += len(wanted)
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            first = int(wrong[0])
            position = (at + first) * BATCH_UNIT_BYTES
            base = position - position % self._batch_file_bytes
            is_missing = not found[first]["size"]
            self._tell(
                "queue.missing" if is_missing else "queue.wrong",
                folder / segment_name(base),
                position - base,
                len(wrong) * BATCH_UNIT_BYTES,
                f"{len(wrong)} unit(s) of {topic} queue {queue_id}, first that of {_show(wanted[first])}",
                is_missing and self._was_open,
            )

    def _first_batch_unit(self, folder: Path, physical_offset: int) -> int:
        """Number of the unit of the log's first record: those before it belong to records that expired."""
        for path in sorted(folder.glob("[0-9]" * 20)):
            offsets = np.frombuffer(path.read_bytes(), BATCH_UNIT)["physical_offset"]
            hits = np.flatnonzero(offsets == physical_offset)
            if len(hits):
                return int(path.name) // BATCH_UNIT_BYTES + int(hits[0])
        return 0

    def _compare_light(self, batch: DispatchBatch, rows: NDArray[np.void]) -> None:
        """Units in the LMQs that records name. Where in them, the records say, so nothing is said of their order."""
        for (name, queue_id), number, units in multi_dispatch.runs(batch, rows):
            if name.startswith(LMQ_PREFIX):
                expected = np.frombuffer(units, _UNIT)
                numbers = np.arange(number, number + len(expected))
                seen = self._seen.setdefault((name, queue_id), _Seen(number, number))
                seen.next = max(seen.next, number + len(expected))
                self._compare_units(name, queue_id, numbers, expected)

    def _compare(self, topic: str, queue_id: int, rows: NDArray[np.void]) -> None:
        numbers = rows["queue_offset"]
        seen = self._seen.get((topic, queue_id))
        if seen is None:
            seen = self._seen[topic, queue_id] = _Seen(int(numbers[0]), int(numbers[0]))
        self._check_order(topic, queue_id, seen, rows)
        seen.next = int(numbers[-1]) + 1
        expected = np.empty(len(rows), _UNIT)
        for name in ("physical_offset", "size", "tags_code"):
            expected[name] = rows[name]
        self._compare_units(topic, queue_id, numbers, expected)

    def _compare_units(self, topic: str, queue_id: int, numbers: NDArray[np.int64], expected: NDArray[np.void]) -> None:
        first, last = int(numbers.min()), int(numbers.max())
        folder = self._root / topic / str(queue_id)
        found = self._read(folder, first, last - first + 1, _UNIT, self._file_bytes)[numbers - first]
        self._units += len(expected)
        is_same = found["physical_offset"] == expected["physical_offset"]
        is_same &= found["size"] == expected["size"]
        is_same &= (found["tags_code"] == expected["tags_code"]) | (found["tags_code"] <= _FIRST_ADDRESS)
        if is_same.all():
            return
        is_missing = ~is_same & (found["size"] == 0) & (found["physical_offset"] == 0)
        for kind, wrong in (("queue.missing", is_missing), ("queue.wrong", ~is_same & ~is_missing)):
            for start, stop in _runs(wrong):
                self._tell_units(
                    kind, topic, queue_id, int(numbers[start]), stop - start, found[start], expected[start]
                )

    def _check_order(self, topic: str, queue_id: int, seen: _Seen, rows: NDArray[np.void]) -> None:
        numbers = rows["queue_offset"]
        follow = np.concatenate(([seen.next], numbers[:-1] + 1))
        for index in np.flatnonzero(numbers != follow)[:10].tolist():
            offset = int(rows["physical_offset"][index])
            folder = self._root.parent / "commitlog"
            is_repaired = self._are_blank(topic, queue_id, int(follow[index]), int(numbers[index]))
            self._tell(
                "log.order",
                folder,
                offset,
                int(rows["size"][index]),
                f"{topic} queue {queue_id}: queue offset {int(numbers[index])} comes where {int(follow[index])} must",
                is_repaired,
            )

    def _are_blank(self, topic: str, queue_id: int, first: int, stop: int) -> bool:
        """Whether the queue has pre-blank units in [first, stop): what a repair leaves of records that were lost."""
        if not first < stop <= first + _MOST_BLANKS:
            return False
        units = self._read(self._root / topic / str(queue_id), first, stop - first, _UNIT, self._file_bytes)
        return bool(((units["size"] == PREBLANK_SIZE) & (units["physical_offset"] == 0)).all())

    def _tell_units(
        self, kind: str, topic: str, queue_id: int, number: int, count: int, found: Any, expected: Any
    ) -> None:
        at = number * UNIT_BYTES
        base = at - at % self._file_bytes
        what = f"units {number} to {number + count - 1}" if count > 1 else f"unit {number}"
        if kind == "queue.missing":
            detail = f"{what} of {topic} queue {queue_id} are not there; the first record is at {expected['physical_offset']}"
        else:
            detail = f"{what} of {topic} queue {queue_id}: the first is {_show(found)}, its record is {_show(expected)}"
        is_note = kind == "queue.missing" and self._was_open
        self._tell(kind, self._path(topic, queue_id, base), at - base, count * UNIT_BYTES, detail, is_note)

    def _read(self, folder: Path, number: int, count: int, kind: np.dtype[Any], file_bytes: int) -> NDArray[np.void]:
        """``count`` units from number ``number`` of the queue in ``folder``; zeros where there is no file."""
        data = bytearray(count * kind.itemsize)
        at, end = number * kind.itemsize, (number + count) * kind.itemsize
        begun = at
        while at < end:
            base = at - at % file_bytes
            wanted = min(end, base + file_bytes) - at
            try:
                part = os.pread(self._fds.read_fd(os.fspath(folder / segment_name(base))), wanted, at - base)
            except OSError:
                part = b""
            data[at - begun : at - begun + len(part)] = part
            at += wanted
        return np.frombuffer(data, kind)

    def _path(self, topic: str, queue_id: int, base: int) -> Path:
        return self._root / topic / str(queue_id) / segment_name(base)

    # ------------------------------------------------------------ what is there besides

    def finish(self) -> tuple[int, int]:
        """Look for units that no record stands for; returns how many queues and units were looked at."""
        queues = 0
        for topic, queue_id, folder in list_queues(self._batch_root):
            queues += 1
            self._check_batch_rest(topic, queue_id, folder)
        for topic, queue_id, folder in list_queues(self._root):
            queues += 1
            self._check_rest(topic, queue_id, folder)
        self._fds.close()
        return queues, self._units

    def _check_batch_rest(self, topic: str, queue_id: int, folder: Path) -> None:
        end = self._batch_units.get((topic, queue_id))
        if end is None:
            return  # all of its records expired
        for path in sorted(folder.glob("[0-9]" * 20)):
            first = max(0, end - int(path.name) // BATCH_UNIT_BYTES)
            size = path.stat().st_size
            if size not in (0, self._batch_file_bytes):
                self._tell("file.unreadable", path, 0, size, f"it has {size} bytes, not {self._batch_file_bytes}")
            elif first * BATCH_UNIT_BYTES < size:
                behind = np.frombuffer(path.read_bytes(), BATCH_UNIT)[first:]
                for start, stop in _runs(behind["size"] > 0):
                    self._tell(
                        "queue.extra",
                        path,
                        (first + start) * BATCH_UNIT_BYTES,
                        (stop - start) * BATCH_UNIT_BYTES,
                        f"{stop - start} unit(s) of {topic} queue {queue_id} stand for no record, "
                        f"first {_show(behind[start])}",
                        self._was_open,
                    )

    def _check_rest(self, topic: str, queue_id: int, folder: Path) -> None:
        seen = self._seen.get((topic, queue_id))
        end = seen.next * UNIT_BYTES if seen is not None else 0
        for path in sorted(folder.iterdir()):
            if len(path.name) != 20 or not path.name.isdecimal():
                continue
            size = path.stat().st_size
            if size not in (0, self._file_bytes):
                self._tell("file.unreadable", path, 0, size, f"it has {size} bytes, not {self._file_bytes}")
                continue
            base = int(path.name)
            if base + size <= end or not size:
                continue
            units = np.frombuffer(path.read_bytes(), _UNIT)
            first = max(0, end - base) // UNIT_BYTES
            behind = units[first:]
            # Places before a queue's first unit are taken by pre-blank ones (spec 3.3).
            is_blank = (behind["size"] == PREBLANK_SIZE) & (behind["physical_offset"] == 0)
            extra = (behind["size"] > 0) & ~is_blank
            for start, stop in _runs(extra):
                self._tell(
                    "queue.extra",
                    path,
                    (first + start) * UNIT_BYTES,
                    (stop - start) * UNIT_BYTES,
                    f"{stop - start} unit(s) of {topic} queue {queue_id} stand for no record, first {_show(behind[start])}",
                    self._was_open or seen is None,
                )


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """``(start, stop)`` of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _show(unit: Any) -> str:
    return f"(offset {unit['physical_offset']}, size {unit['size']}, tags code {unit['tags_code']})"
