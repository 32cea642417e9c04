"""Messages of the timer topic as columns: when each is due, and what its unit of the timer log needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError
from commitmq.format.constants import PREBLANK_SIZE, SYS_FLAG_OFFSET, Property, SysFlag
from commitmq.format.java import java_string_hash
from commitmq.format.record import decode_record
from commitmq.semantics.timer import TIMER_TOPIC, TimerRules
from commitmq.store.log.append import longs
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.readdressing import FoundProperties, find
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.run_making import few_enough

Integers = NDArray[np.int64]
Report = Callable[[str, int], None]

PRECISION_MS: Final = 1_000
_COARSEST_MS: Final = 60_000
_NAMES: Final = (
    Property.TIMER_DELAY_SECONDS,
    Property.TIMER_DELAY_MS,
    Property.TIMER_DELIVER_MS,
    Property.TIMER_OUT_MS,
    Property.TIMER_DELETE_KEY,
    Property.TIMER_ROLL_TIMES,
    Property.UNIQUE_KEY,
    Property.REAL_TOPIC,
)
(_SECONDS, _MS, _AT, _OUT, _DELETES, _ROLLED, _UNIQUE, _TOPIC) = range(len(_NAMES))
_SCALES: Final = ((_SECONDS, 1000), (_MS, 1))
_MOST_MS: Final = 1 << 50
NO_DELAY: Final = -1 << 62
_STORE_TIME_AT: Final = 56
_WIDER: Final = 12  # bytes of an IPv6 host more than of an IPv4 host
_BYTES: Final = 256 ** np.arange(7, -1, -1, dtype=np.uint64)


class TimerKeys(NamedTuple):
    """Of a message: its unique id, its real topic, and what it cancels (empty for one that is no cancellation)."""

    unique: bytes
    topic: bytes
    deletes: bytes


_NO_KEYS: Final = TimerKeys(b"", b"", b"")


class RollKey(NamedTuple):
    """A message by its topic and unique id, its time and how often it rolled."""

    unique_key: bytes
    topic: bytes
    out_ms: int
    rolled: int
    cancels: bool
    """A cancellation has the unique id and the time of its message, and goes round on its own."""


def message_key(topic: bytes, unique: bytes) -> bytes:
    """A message of ``topic`` with the unique id ``unique``, for comparisons. No topic and no id has this separator."""
    return topic + b"\x01" + unique


def delete_keys(deletes: bytes, topic: bytes) -> set[bytes]:
    """The messages (:func:`message_key`) that a cancellation means, of its encoded properties TIMER_DEL_UNIQKEY and REAL_TOPIC
    (spec 12.2). They are of its own topic: whoever may send to a topic cancels nothing in another one.

    The stored key may be the unique id alone, or have the topic before it. (RocketMQ compares bare ids, or with
    appendTopicForTimerDeleteKey both, but never one with the other. There the topic in the key counts, whatever the own one.)
    """
    if not deletes:
        return set()
    before = topic + b"+"
    ids = {deletes, deletes[len(before) :]} if deletes.startswith(before) else {deletes}
    return {message_key(topic, one) for one in ids}


@dataclass(slots=True)
class Incoming:
    """Messages of the timer topic. ``behind``: the queue offset behind them. All columns have one entry a message."""

    behind: int
    offsets: Integers
    """Queue offsets."""
    physical: Integers
    sizes: Integers
    out_ms: Integers
    """TIMER_OUT_MS: the slot."""
    due_ms: Integers
    """The very time that was asked for, behind the slot by up to the precision."""
    delay_ms: Integers
    """How long after its storing a message was to be delivered; NO_DELAY for one that named a time."""
    topic_hash: Integers
    cancels: NDArray[np.bool_]
    rolled: Integers
    keys: list[TimerKeys]
    """Empty unless they were asked for; of messages of which they were not asked for, without anything in them."""

    def __len__(self) -> int:
        return len(self.physical)

    def roll_keys(self, which: Integers) -> list[RollKey]:
        """Of the messages with these indices."""
        columns = self.out_ms[which].tolist(), self.rolled[which].tolist(), self.cancels[which].tolist()
        keys = (self.keys[index] for index in which.tolist())
        return [RollKey(one.unique, one.topic, *rest) for one, *rest in zip(keys, *columns, strict=True)]

    def keep(self, which: NDArray[np.bool_]) -> None:
        """Drop all others."""
        for name in ("offsets", "physical", "sizes", "out_ms", "due_ms", "delay_ms", "topic_hash", "cancels", "rolled"):
            setattr(self, name, getattr(self, name)[which])
        if self.keys:
            self.keys = [self.keys[index] for index in np.flatnonzero(which).tolist()]


Which = Callable[[Incoming], NDArray[np.bool_]]


class TimerQueue:
    """Reads the queue of the timer topic. Messages that cannot be read are reported and omitted."""

    def __init__(self, reader: QueueReader, log: CommitLog, report: Report) -> None:
        self._reader, self._log, self._report = reader, log, report
        self.topics: dict[int, str] = {}
        """The topics of the messages so far, by the hashes of their names."""

    def bounds(self, bound: int, floor: int) -> tuple[int, int]:
        """(first queue offset, offset behind the last one)."""
        return self._reader.bounds(TIMER_TOPIC, 0, bound=bound, floor=floor) or (0, 0)

    def take(
        self, offset: int, count: int, *, bound: int, floor: int, with_keys: Which | None = None
    ) -> Incoming | None:
        """Up to ``count`` messages from ``offset`` on, and not too many bytes; None at the end of the queue.

        ``with_keys``: which of them get the keys by which messages, their rolls and their cancellations belong together.
        """
        at, units = self._reader.units(TIMER_TOPIC, 0, offset, count, bound=bound, floor=floor)
        if not len(units):
            return None
        units = units[: few_enough(units["size"])]
        sizes = units["size"].astype(np.int64)
        real = (sizes > 0) & (sizes != PREBLANK_SIZE)
        offsets = at + np.flatnonzero(real)
        places, sizes = units["physical_offset"].astype(np.int64)[real], sizes[real]
        parts = list(self._parts(offsets, places, sizes, with_keys))
        return _joined(at + len(units), parts)

    def _parts(
        self, offsets: Integers, places: Integers, sizes: Integers, with_keys: Which | None
    ) -> Iterator[Incoming]:
        segment_bytes = self._log.segment_bytes
        bases = places - places % segment_bytes
        breaks = np.flatnonzero(np.diff(bases)) + 1
        for which in np.split(np.arange(len(places)), breaks) if len(places) else ():
            base = int(bases[which[0]])
            try:
                data = np.frombuffer(self._log.read(base, segment_bytes), np.uint8)
            except OffsetOutOfRangeError:
                for place in places[which].tolist():
                    self._report("its record has expired", place)
                continue
            yield self._part(base, data, offsets[which], places[which], sizes[which], with_keys)

    def _part(
        self,
        base: int,
        data: NDArray[np.uint8],
        offsets: Integers,
        places: Integers,
        sizes: Integers,
        with_keys: Which | None,
    ) -> Incoming:
        found = find(data, places - base, sizes, _NAMES)
        out, good = longs(data, found.starts[_OUT], found.lengths[_OUT])
        good &= found.whole
        for place in places[~good].tolist():
            self._report("its record has no TIMER_OUT_MS", place)
        rolled, _ = longs(data, found.starts[_ROLLED], found.lengths[_ROLLED])
        delays = delays_of(data, found)
        part = Incoming(
            0,
            offsets,
            places,
            sizes,
            out,
            exact_due(data, places - base, found, out, delays),
            delays,
            self._topic_hashes(found),
            found.lengths[_DELETES] > 0,
            rolled,
            [],
        )
        if with_keys is not None:
            part.keys = _keys(found, with_keys(part))
        if not good.all():
            part.keep(good)
        return part

    def _topic_hashes(self, found: FoundProperties) -> Integers:
        rows = slice(_TOPIC, _TOPIC + 1)
        topics = FoundProperties(
            found.data, np.ascontiguousarray(found.starts[rows]), np.ascontiguousarray(found.lengths[rows]), found.whole
        )
        numbers, firsts = topics.alike()
        names = [topics.value(0, first).decode("utf-8", "replace") for first in firsts]
        hashes = [java_string_hash(name) for name in names]
        self.topics.update(zip(hashes, names, strict=True))
        return np.array(hashes, np.int64)[numbers] if len(numbers) else np.empty(0, np.int64)

    def learn_topics(self, units: NDArray[np.void]) -> None:
        """Take the names of the topics of ``units`` of the timer log from one message of each."""
        hashes, firsts = np.unique(units["topic_hash"].astype(np.int64), return_index=True)
        for topic, first in zip(hashes.tolist(), firsts.tolist(), strict=True):
            if topic not in self.topics:
                place, size = int(units["physical_offset"][first]), int(units["record_bytes"][first])
                try:
                    record = decode_record(self._log.read(place, size), with_body=False)
                except (OffsetOutOfRangeError, CorruptRecordError, ValueError):
                    continue
                self.topics[topic] = record.properties.get(Property.REAL_TOPIC, "")


def _keys(found: FoundProperties, which: NDArray[np.bool_]) -> list[TimerKeys]:
    """Those of the messages ``which``."""
    keys = [_NO_KEYS] * len(which)
    if (wanted := np.flatnonzero(which)).size:
        data = np.ascontiguousarray(found.data).data
        columns = []
        for row in (_UNIQUE, _TOPIC, _DELETES):
            starts = found.starts[row][wanted]
            ends = (starts + found.lengths[row][wanted]).tolist()
            columns.append([bytes(data[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)])
        for index, one in zip(wanted.tolist(), map(TimerKeys, *columns), strict=True):
            keys[index] = one
    return keys


def _joined(behind: int, parts: list[Incoming]) -> Incoming:
    def column(name: str) -> Integers:
        columns = [getattr(one, name) for one in parts]
        return np.concatenate(columns) if columns else np.empty(0, np.int64)

    return Incoming(
        behind,
        column("offsets"),
        column("physical"),
        column("sizes"),
        column("out_ms"),
        column("due_ms"),
        column("delay_ms"),
        column("topic_hash"),
        column("cancels").astype(np.bool_),
        column("rolled"),
        [keys for one in parts for keys in one.keys],
    )


def due_of(data: NDArray[np.uint8], positions: Integers, sizes: Integers, out_ms: Integers) -> Integers:
    """The very times that the messages at ``positions`` asked for."""
    found = find(data, positions, sizes, _NAMES[:3])
    return exact_due(data, positions, found, out_ms, delays_of(data, found))


def exact_due(
    data: NDArray[np.uint8], positions: Integers, found: FoundProperties, out_ms: Integers, delays: Integers
) -> Integers:
    """The very time that each message asked for. ``found`` has the request's properties in its first rows, ``delays`` are
    :func:`delays_of` it.

    RocketMQ rounds to seconds: it delivers at the end of the slot. A relative time counts from the time of storing, which a
    roll renews; then, and for a message without a request, the end of the slot counts. An absolute time counts also where a
    RocketMQ with a larger precision (timerPrecisionMs) has rounded it further.
    """
    latest = out_ms + PRECISION_MS
    due = latest.copy()
    at, good = longs(data, found.starts[_AT], found.lengths[_AT])
    due[good] = at[good]
    latest[good] += _COARSEST_MS - PRECISION_MS
    relative = delays != NO_DELAY
    if relative.any():
        due[relative] = (_store_times(data, positions, found.whole) + delays)[relative]
        latest[relative] = out_ms[relative] + PRECISION_MS
    return np.clip(due, out_ms, latest)


def delays_of(data: NDArray[np.uint8], found: FoundProperties) -> Integers:
    """How long after its storing each message is to be delivered (ms); NO_DELAY for one that names a time, or nothing."""
    delays = np.full(found.starts.shape[1], NO_DELAY, np.int64)
    for row, scale in reversed(_SCALES):
        delay, good = longs(data, found.starts[row], found.lengths[row])
        delays[good] = np.clip(delay[good], -_MOST_MS, _MOST_MS) * scale
    return delays


def _store_times(data: NDArray[np.uint8], positions: Integers, whole: NDArray[np.bool_]) -> Integers:
    safe = np.where(whole, positions, positions[whole][0] if whole.any() else 0)
    wide = (data[safe + SYS_FLAG_OFFSET + 3] & SysFlag.BORN_HOST_V6) != 0
    at = safe + _STORE_TIME_AT + np.where(wide, _WIDER, 0)
    return (data[at[:, None] + np.arange(8)].astype(np.uint64) @ _BYTES).astype(np.int64)


def slots_of(out_ms: Integers, write_ms: int, rules: TimerRules) -> tuple[Integers, NDArray[np.bool_]]:
    """(time of the slot in ms that each message takes when it is enqueued at ``write_ms``, whether it rolls) (spec 12.2).

    What is due beyond the window rolls: a little beyond takes the middle of the window, so that its last round is not too
    short for the work; else the window's end. A time that a RocketMQ with a smaller precision has rounded takes the slot of
    its second.
    """
    window_ms = rules.window_ms
    slots = window_ms // rules.precision_ms
    beyond = out_ms - write_ms - window_ms
    far = np.where(
        beyond < slots // 3 * rules.precision_ms, write_ms + slots // 2 * rules.precision_ms, write_ms + window_ms
    )
    rolls = beyond >= 0
    slots_ms = np.where(rolls, far, out_ms)
    return slots_ms - slots_ms % rules.precision_ms, rolls
