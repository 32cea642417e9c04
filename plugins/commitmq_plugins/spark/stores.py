"""A store folder as the source reads it: its queues, and the range of messages that may be shown.

Only reads, never locks: the node may run in the meantime. While it runs, its control block gives the flushed and
dispatched positions. For a store without a node the end of the log is found as a recovery finds it, without changing
anything.

A reader finds the ends of a queue by bisection, because physical offsets ascend along it. One flipped bit in a unit of
a closed store may make the bisection end there, and all units beyond it would silently be omitted. So the units next to
the ends are examined (:class:`RawUnits`): a unit that the log proves to be of this queue belongs to it, and so do all
units between. Reading them then reports the damage. The log proves none of the relics that RocketMQ left behind a
queue's end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.config.fitting import sizes_of
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.format.constants import LMQ_PREFIX, PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT
from commitmq.kernels.codes import NO_CRC_NEEDED
from commitmq.store.access import lock_holder, require_store
from commitmq.store.geometry import BATCH_FILE, QUEUE_FILE, SEGMENT, look
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker, consumable
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq.store.metadata.topic_files import TopicReader, load_tombstones
from commitmq.store.queues.batch_consume_queue import BatchQueueReader
from commitmq.store.queues.queue_files import LogProof, Proof, has_record_before
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory
from commitmq.store.recovery.scan import scan_to_end
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.store_file import store_id

_LOOK: Final = 64
_NEXT: Final = 2


class RawUnits:
    """The units of one ConsumeQueue as stored in its files."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes

    def at(self, offset: int, count: int) -> NDArray[np.void]:
        """Up to ``count`` units from queue ``offset`` on, of one file; none when there is no file."""
        base, within = divmod(offset * UNIT_BYTES, self._file_bytes)
        try:
            with (self._folder / segment_name(base * self._file_bytes)).open("rb") as file:
                data = os.pread(file.fileno(), min(count * UNIT_BYTES, self._file_bytes - within), within)
        except FileNotFoundError:
            data = b""
        return np.frombuffer(data[: len(data) - len(data) % UNIT_BYTES], UNIT)


def whole_span(
    units: RawUnits, first: int, end: int, *, bound: int, floor: int, proof: Proof, is_clean: bool
) -> tuple[int, int]:
    """``(first, end)`` of a queue, moved outwards over units that the log proves to be its own.

    ``is_clean``: a node closed the store in order, which leaves nothing behind a queue's end; then every non-zero unit
    there is a unit of the queue, or was one.
    """

    def proven(offset: int, unit: np.void) -> bool:
        physical, size = int(unit["physical_offset"]), int(unit["size"])
        whole = 0 < size < PREBLANK_SIZE and physical >= floor and physical + size <= bound
        return whole and proof(offset, physical, size)

    for offset, unit in _from(units, max(0, first - _NEXT), first):
        if proven(offset, unit):
            first = offset
            break
    last = end
    for offset, unit in _from(units, end, None):
        if not any(unit.tobytes()):
            # One whole unit of zeros may be damage too, if a proven unit follows.
            if any(proven(at, one) for at, one in _from(units, offset + 1, offset + _NEXT)):
                continue
            break
        if proven(offset, unit) or is_clean:
            last = offset + 1
        elif offset >= last + _LOOK:
            break
    return first, last


def _from(units: RawUnits, offset: int, end: int | None) -> Iterator[tuple[int, np.void]]:
    """Units with their queue offsets, from ``offset`` up to ``end``, or up to a missing file."""
    while end is None or offset < end:
        found = units.at(offset, _LOOK if end is None else end - offset)
        if not len(found):
            return
        for unit in found:
            yield offset, unit
            offset += 1


_MAX_MAPPED: Final = 4
_CHUNK_UNITS: Final = 65_536
_FEW_UNITS: Final = 16
_WALK_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of each kind of file, from the store's own files."""

    segment: int
    queue_file: int
    batch_file: int


@dataclass(frozen=True)
class Slice:
    """Queue offsets ``[first, end)`` of one queue; records below physical offset ``floor`` belong to no topic.
    ``incarnation`` distinguishes topics of one name: a topic that is deleted and created again has another one.
    """

    topic: str
    queue_id: int
    is_batch: bool
    first: int
    end: int
    floor: int = 0
    incarnation: str = ""

    @property
    def count(self) -> int:
        """Number of messages, judged by the offsets."""
        return self.end - self.first


class OpenStore:
    """The store in ``root``, opened for reading. Not thread-safe."""

    def __init__(self, root: Path, sizes: Sizes | None = None) -> None:
        """Raises StoreError when it is no store. ``sizes``: the known sizes, so that the folder need not be searched."""
        self.layout = StoreLayout(root.absolute())
        require_store(self.layout)
        self.sizes = sizes or found_sizes(self.layout)
        self.log = CommitLog(self.layout.commit_log, self.sizes.segment, max_mapped=_MAX_MAPPED)
        self.queues = QueueReader(self.log, self.layout.consume_queue, self.sizes.queue_file)
        self.batches = BatchQueueReader(self.layout.batch_consume_queue, self.sizes.batch_file)
        self._proof = LogProof(self.layout.commit_log, self.sizes.segment)
        self._deleted: dict[str, int] = load_tombstones(self.layout)
        self._topics: dict[str, TopicConfig] | None = None

    def close(self) -> None:
        self.queues.close()
        self.batches.close()
        self._proof.close()
        self.log.close()

    @property
    def is_live(self) -> bool:
        return bool(lock_holder(self.layout.lock)) and self.layout.control.exists()

    def span(self) -> tuple[int, int]:
        """``(floor, bound)``: the physical offsets between which records may be shown: flushed, and not expired."""
        if self.is_live:
            control = ControlBlock(self.layout.control)
            try:
                # Read the floor first: it may only be older than the bound.
                floor = control.get(Word.MIN_OFFSET)
                return floor, min(control.get(Word.FLUSHED), control.dispatcher(0, DispatcherWord.DISPATCHED))
            finally:
                control.close()
        return self.log.min_offset, self._end_at_rest()

    def crc_from(self) -> int:
        """The physical offset from which on every record has a ``__CRC32#``; :data:`NO_CRC_NEEDED` when none is known."""
        known = -1
        if self.is_live:
            control = ControlBlock(self.layout.control)
            try:
                known = control.get(Word.CRC_FROM)
            finally:
                control.close()
        elif not self.layout.abort.exists():
            sidecar = Sidecar.load(self.layout.sidecar)
            if sidecar is not None and sidecar.agrees_with(
                self.layout.checkpoint, segment_bytes=self.sizes.segment, previous=None
            ):
                known = sidecar.crc_from
        return known if known >= 0 else NO_CRC_NEEDED

    def _end_at_rest(self) -> int:
        """The log's end when no node uses the store: behind the last whole record, and not below the last flushed
        position.

        A flushed record that is damaged now does not end the log: its queue leads to it, and reading it reports the
        damage.
        """
        start = next((base for base in reversed(self.log.segments()) if any(self.log.read(base, 8))), None)
        if start is None:
            return 0
        known = Sidecar.load(self.layout.sidecar)
        flushed = known.flushed if known is not None and start < known.flushed < self.log.end_offset else 0
        if flushed and has_record_before(self.log, flushed):
            # The node that flushed the part below has checked it.
            start = flushed
        return max(scan_to_end(self.log, start).end, flushed)

    def unqueued(self, bound: int) -> list[tuple[str, int, int]]:
        """``(topic, queue, queue offset)`` of messages at the end of the log that are in no ConsumeQueue.

        A crash may leave some, until the next start of a node adds them. Only the log behind the last record of any
        queue is searched; ``store verify`` finds a queue that lost more than others.
        """
        ends = {(one.topic, one.queue_id): one for one in self.slices(0, bound)}
        last = max(
            (self.place(one, one.end - 1, bound) for one in ends.values() if one.count), default=self.log.min_offset
        )
        walker = LogWalker(self.log, max_rows=_CHUNK_UNITS, max_bytes=_WALK_BYTES)
        found = []
        while last < bound:
            batch = walker.walk(last, bound)
            for row in batch.rows[consumable(batch.rows)]:
                topic, queue = batch.topics[row["topic"]], int(row["queue_id"])
                known = ends.get((topic, queue))
                end = 0 if known is None else known.end
                if int(row["queue_offset"]) >= end and int(row["physical_offset"]) >= self.floor_of(topic, 0):
                    found.append((topic, queue, int(row["queue_offset"])))
            last = batch.end
        walker.release()
        return found

    def floor_of(self, topic: str, floor: int) -> int:
        """``floor``, or where the present topic of this name may begin when an earlier one was deleted."""
        return max(floor, int(self._deleted.get(topic, 0)))

    def identity(self) -> str:
        """The id of this store under each of its names: its store id, else the log's folder on this machine."""
        known = store_id(self.layout.root)
        if known is not None:
            return known
        facts = self.layout.commit_log.stat()
        return f"{facts.st_dev}:{facts.st_ino}"

    def queue_counts(self) -> dict[str, int]:
        """The number of queues of each topic that has files: one more than the highest number."""
        found: dict[str, int] = {}
        for folder in (self.layout.consume_queue, self.layout.batch_consume_queue):
            for topic, queue_id in _folders(folder, lambda _topic: True):
                found[topic] = max(found.get(topic, 0), queue_id + 1)
        return found

    def configured_topics(self) -> dict[str, TopicConfig]:
        """The topics by name, as of the first call. Raises StoreError when they cannot be read."""
        if self._topics is None:
            reader = TopicReader(self.layout)
            try:
                self._topics = reader.everything().topics
            finally:
                reader.close()
        return self._topics

    def incarnation(self, topic: str) -> str:
        """The incarnation of the present topic: a number, or for RocketMQ's ``@`` and its predecessor's end."""
        known = self.configured_topics().get(topic)
        if (known is None or not known.incarnation) and topic in self._deleted:
            return f"@{self._deleted[topic]}"
        return str(known.incarnation if known is not None else 0)

    def place(self, queue: Slice, offset: int, bound: int) -> int:
        """Physical offset of the first message at or behind queue ``offset``; ``bound`` when there is none."""
        found = self._reader(queue).read(
            queue.topic, queue.queue_id, offset, bound=bound, floor=queue.floor, max_messages=1, max_bytes=1
        )
        return int(found.units["physical_offset"][0]) if found.count else bound

    def last_message(self, queue: Slice, bound: int) -> int:
        """Queue offset of the slice's last message; one less than its first offset when it has none.

        Pre-blank units (spec 3.3) may follow it: places that never had a message. A missing message counts as a
        message, so that reading it reports the loss.
        """
        at, count = queue.end, _FEW_UNITS
        while not queue.is_batch and at > queue.first:
            first = max(queue.first, at - count)
            found_at, found = self.queues.units(
                queue.topic, queue.queue_id, first, at - first, bound=bound, floor=queue.floor
            )
            if found_at != first or len(found) < at - first:
                if at - first == 1:
                    break
                count = 1  # a file ends here, or a unit is missing: read one at a time
                continue
            real = np.flatnonzero(found["size"] != PREBLANK_SIZE)
            if len(real):
                return first + int(real[-1])
            at, count = first, min(4 * count, _CHUNK_UNITS)
        return at - 1

    def offset_at(self, queue: Slice, physical: int, bound: int) -> int:
        """The slice's first queue offset whose record begins at or behind ``physical``; its end without one."""
        found = self._reader(queue).offset_at(queue.topic, queue.queue_id, physical, bound=bound, floor=queue.floor)
        return queue.end if found is None else min(max(found, queue.first), queue.end)

    def within_bytes(self, queue: Slice, budget: int, bound: int) -> int:
        """The queue offset up to which the slice's records take at most ``budget`` bytes together."""
        at = queue.first
        while at < queue.end:
            found = self._reader(queue).read(
                queue.topic, queue.queue_id, at, bound=bound, floor=queue.floor,
                max_messages=min(_CHUNK_UNITS, queue.end - at), max_bytes=max(budget, 1),
            )  # fmt: skip
            taken = int(found.units["size"].sum(dtype="i8"))
            if found.next_offset <= at or taken > budget:
                break
            budget -= taken
            at = found.next_offset
        return min(at, queue.end)

    def _reader(self, queue: Slice) -> QueueReader | BatchQueueReader:
        return self.batches if queue.is_batch else self.queues

    def offset_by_time(self, queue: Slice, timestamp: int, bound: int) -> int:
        """First queue offset stored at ``timestamp`` (ms) or later, within the slice; its end when all is older."""
        found = self._reader(queue).offset_by_time(
            queue.topic, queue.queue_id, timestamp, bound=bound, floor=queue.floor
        )
        return queue.end if found is None else min(max(found, queue.first), queue.end)

    def slices(self, floor: int, bound: int, wants: Callable[[str], bool] = lambda _topic: True) -> list[Slice]:
        """The readable range of all queues of wanted topics, by topic and number; empty queues included."""
        found = []
        folders = [
            (folder, is_batch, _folders(folder, wants))
            for folder, is_batch in ((self.layout.consume_queue, False), (self.layout.batch_consume_queue, True))
        ]
        if any(topic not in self.configured_topics() for _, _, queues in folders for topic, _ in queues):
            self._topics = None  # it may have come behind the last look; its settings are there before its queues
        is_live = self.is_live
        is_clean = not is_live and not self.layout.abort.exists() and Sidecar.load(self.layout.sidecar) is not None
        for folder, is_batch, queues in folders:
            reader = self.batches if is_batch else self.queues
            for topic, queue_id in queues:
                lowest = self.floor_of(topic, floor)
                span = reader.bounds(topic, queue_id, bound=bound, floor=lowest)
                if span is not None and not is_batch and not is_live and not topic.startswith(LMQ_PREFIX):
                    span = whole_span(
                        RawUnits(folder / topic / str(queue_id), self.sizes.queue_file), *span,
                        bound=bound, floor=lowest, proof=self._proof.of(topic, queue_id), is_clean=is_clean,
                    )  # fmt: skip
                if span is not None:
                    found.append(Slice(topic, queue_id, is_batch, *span, lowest, self.incarnation(topic)))
        return sorted(found, key=lambda one: (one.topic, one.queue_id, one.is_batch))


def check_generation(store: OpenStore, generation: int, bound: int) -> None:
    """Raise StoreError if the log was cut below ``bound`` since the store had this ``generation``: what was read may be of
    before the cut, or of later.
    """
    if generation > 0:
        end = CutHistory.load(store.layout).end_since(generation)
        if end != NO_CUT and end < bound:
            raise StoreError("the log was cut while it was read: read it again", path=store.layout.root)


def found_sizes(layout: StoreLayout) -> Sizes:
    """The store's own sizes; a node's default when there is no file yet."""
    sizes = {**sizes_of(NodeConfig()), **look(layout, index=False).sizes}
    return Sizes(sizes[SEGMENT], sizes[QUEUE_FILE], sizes[BATCH_FILE])


def _folders(root: Path, wants: Callable[[str], bool]) -> list[tuple[str, int]]:
    """``(topic, queue)`` of every queue folder of a wanted topic below ``root``."""
    if not root.is_dir():
        return []
    return [
        (topic.name, int(queue.name))
        for topic in root.iterdir()
        if topic.is_dir() and wants(topic.name)
        for queue in topic.iterdir()
        if queue.name.isascii() and queue.name.isdigit()
    ]
