"""A worker's counters, gauges and histograms: one mapped file for each process, ``run/ROLE.counts``, which outlives the
process; and what the node's own workers count. Times are counted in nanoseconds and shown in seconds.

Layout: blocks of 1024 bytes; words are signed, 8 bytes, in host byte order (the file never leaves the machine).

    block 0        words: magic, number of rows; the rest is zero
    block 1        takes what is counted in rows that could not be made; nobody reads it
    block 2..      one row each:
        word 0         length of the description; stored last, so a reader sees whole rows or none
        words 1..31    the values: one of a counter or gauge; count, sum and one for each bucket (+Inf too) of a
        histogram bytes 256..    the description: a JSON object with name, kind, help, labels and, of a histogram,
        bounds and scale

Why a file: a worker that died continues counting where its predecessor was, so counters do not fall while a node runs;
and reading costs the worker nothing. Why rows describe themselves: a reader needs to know no worker, so what a plugin's
worker counts is shown like the node's own. Why single words: as in :mod:`commitmq.control`, a load or store is one
machine access. Count and buckets of a histogram are separate words, so a reader may see an observation in one and not
yet in the other.

The file has holes: a row takes space when it is made, a page at a time, by posix_fallocate. A store into a hole would
end the process (SIGBUS) where the disk is full; so without space the row is not made, and what it would count is lost.
Rows are never removed while the node runs; with ``max_rows`` of them, further ones are counted in a row of the same
family whose labels are all ``_other``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq.errors import StoreError


class Kind(StrEnum):
    """Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``labels`` are names; each row of a table has a value for each.

    Rows hold whole numbers; what is shown is the number times ``scale``, so a histogram of seconds that counts nanoseconds
    has the scale 1e-9. ``bounds`` are the upper ends of a histogram's buckets, in the unit that is shown, ascending, without
    the last one (+Inf). A counter's name ends with ``_total``.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.kind is Kind.HISTOGRAM) != bool(self.bounds) or list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has bounds, in ascending order")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters, and nothing else, end with _total")


def doubling(first: float, count: int) -> tuple[float, ...]:
    """``count`` bounds from ``first`` on, each twice the one before."""
    return tuple(first * (1 << step) for step in range(count))


_NS: Final = 1e-9
DURATIONS: Final = doubling(0.00005, 16)
"""50 us to 1.6 s."""
SIZES: Final = tuple(float(4096 << (2 * step)) for step in range(8))
"""4 KiB to 64 MiB."""
RUN_LENGTHS: Final = doubling(1.0, 15)
ROCKETMQ_MESSAGE_SIZES: Final = (1_024.0, 4_096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)
LATENESS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0, 3_600.0)
ROCKETMQ_FINISH_TIMES: Final = (5.0, 60.0, 600.0, 3_600.0, 43_200.0, 86_400.0)

MESSAGES_IN: Final = Family(
    "commitmq_messages_in_total",
    Kind.COUNTER,
    "Messages stored, by the topic that they are stored in. Source: client, or node for those that the node itself moves.",
    ("topic", "source"),
)
BYTES_IN: Final = Family(
    "commitmq_bytes_in_total", Kind.COUNTER, "Bytes of the records of these messages.", ("topic", "source")
)
MESSAGE_SIZE: Final = Family(
    "commitmq_message_size_bytes",
    Kind.HISTOGRAM,
    "Size of a record; of a run of messages their mean, counted once.",
    ("topic",),
    ROCKETMQ_MESSAGE_SIZES,
)
APPEND_DURATION: Final = Family(
    "commitmq_append_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a send in the writer until its messages are in the log; a wait for the device comes behind it.",
    ("kind",),
    DURATIONS,
    _NS,
)
APPEND_MESSAGES: Final = Family("commitmq_append_messages", Kind.HISTOGRAM, "Messages of one append.", (), RUN_LENGTHS)
SEND_DURATION: Final = Family(
    "commitmq_send_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a send in the writer, from its reading to its answer.",
    ("ack",),
    DURATIONS,
    _NS,
)
SENDS_REFUSED: Final = Family(
    "commitmq_sends_refused_total", Kind.COUNTER, "Sends that the node refused, by the code of the answer.", ("code",)
)
SENDS_WAITING: Final = Family(
    "commitmq_sends_waiting", Kind.GAUGE, "Sends that wait for the device at the end of the writer's turn."
)
FLUSH_DURATION: Final = Family(
    "commitmq_flush_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a sync of the log, by the process that made it.",
    ("by",),
    DURATIONS,
    _NS,
)
FLUSH_SIZE: Final = Family(
    "commitmq_flush_size_bytes", Kind.HISTOGRAM, "Bytes of the log that a sync made durable.", ("by",), SIZES
)
PULL_DURATION: Final = Family(
    "commitmq_pull_duration_seconds",
    Kind.HISTOGRAM,
    "Time that a reader worked on a pull, without the time that the pull waited for a message.",
    ("result",),
    DURATIONS,
    _NS,
)
PULLS_PARKED: Final = Family("commitmq_pulls_parked", Kind.GAUGE, "Pulls that wait for a message.")
PULLS_WOKEN: Final = Family("commitmq_pulls_woken", Kind.GAUGE, "Pulls that have messages and wait for their turn.")
MESSAGES_OUT: Final = Family(
    "commitmq_messages_out_total",
    Kind.COUNTER,
    "Messages passed to consumers, by topic and group; the group is empty for readers without one. Way: pull or pop.",
    ("topic", "group", "way"),
)
BYTES_OUT: Final = Family(
    "commitmq_bytes_out_total", Kind.COUNTER, "Bytes of the records of these messages.", ("topic", "group", "way")
)
DEAD_LETTERS: Final = Family(
    "commitmq_dead_letters_total",
    Kind.COUNTER,
    "Messages that became dead letters because a consumer sent them back once too often.",
    ("topic", "group"),
)
POP_IN_FLIGHT: Final = Family(
    "commitmq_pop_inflight_messages",
    Kind.GAUGE,
    "Messages that consumers which share queues have received and not acknowledged.",
    ("topic", "group"),
)
SET_ASIDE: Final = Family(
    "commitmq_messages_set_aside_total",
    Kind.COUNTER,
    "Messages of which not even a dead letter fits, by the process that passed them; commitmq dlq stuck lists them.",
    ("process",),
)
TRANSACTIONS_OPEN: Final = Family(
    "commitmq_transactions_pending", Kind.GAUGE, "Transactions that nobody has ended yet."
)
TRANSACTIONS_ENDED: Final = Family(
    "commitmq_transactions_ended_total",
    Kind.COUNTER,
    "Transactions that ended, by topic. Outcome: commit or rollback.",
    ("topic", "outcome"),
)
TRANSACTION_TIME: Final = Family(
    "commitmq_transaction_duration_seconds",
    Kind.HISTOGRAM,
    "Time from the birth of a half message to its commit.",
    ("topic",),
    ROCKETMQ_FINISH_TIMES,
    1e-3,
)
DELAYED_IN: Final = Family(
    "commitmq_delayed_in_total", Kind.COUNTER, "Messages with a time of their own that the timer took in.", ("topic",)
)
DELAYED_OUT: Final = Family(
    "commitmq_delayed_out_total", Kind.COUNTER, "Messages with a time of their own that are done.", ("topic",)
)
DELAYED_WAITING: Final = Family(
    "commitmq_delayed_messages", Kind.GAUGE, "Messages that wait for their time, by topic.", ("topic",)
)


SUFFIX: Final = ".counts"
OTHER: Final = "_other"
BLOCK_BYTES: Final = 1024
MAX_BUCKETS: Final = 29
_MAGIC: Final = 0x434D_5143_0000_0001
_WORDS: Final = BLOCK_BYTES // 8
_TEXT: Final = 256
_MAX_TEXT: Final = BLOCK_BYTES - _TEXT
_OTHER_ROWS: Final = 64
_FIRST: Final = 2
_LOST: Final = 1
_PAGE_BYTES: Final = 4096
_COUNT, _SUM, _BUCKETS = 1, 2, 3
_FEW: Final = 16


class Count:
    """One counter or gauge. Only the worker that owns the table may change it."""

    __slots__ = ("_at", "_words")

    def __init__(self, words: memoryview[int], row: int) -> None:
        self._words, self._at = words, row * _WORDS + _COUNT

    def add(self, value: int = 1) -> None:
        """Count ``value`` more; for a gauge it may be negative."""
        self._words[self._at] += value

    def set(self, value: int) -> None:
        self._words[self._at] = value

    @property
    def value(self) -> int:
        return self._words[self._at]


class Histogram:
    """One histogram. Only the worker that owns the table may change it."""

    __slots__ = ("_at", "_bounds", "_words")

    def __init__(self, words: memoryview[int], row: int, family: Family) -> None:
        self._words, self._at = words, row * _WORDS
        self._bounds = tuple(round(bound / family.scale) for bound in family.bounds)

    def observe(self, value: int, times: int = 1) -> None:
        """Count ``times`` observations of ``value``, in the unit of the words."""
        words, at = self._words, self._at
        words[at + _BUCKETS + bisect_left(self._bounds, value)] += times
        words[at + _SUM] += value * times
        words[at + _COUNT] += times

    def observe_all(self, values: Sequence[int]) -> None:
        """Count one observation of each of ``values``, many of them for the price of a few."""
        if len(values) < _FEW:
            for value in values:
                self.observe(value)
            return
        import numpy as np  # what only reads a table does not need it

        words, at = self._words, self._at
        found = np.bincount(np.searchsorted(self._bounds, values))
        for bucket in np.flatnonzero(found).tolist():
            words[at + _BUCKETS + bucket] += int(found[bucket])
        words[at + _SUM] += sum(values)
        words[at + _COUNT] += len(values)


class CountTable:
    """The table of one worker. Not thread-safe: one thread makes rows and counts."""

    def __init__(self, path: Path, max_rows: int) -> None:
        """Take up the table at ``path``, or begin one; the role's lock must be held. Raises StoreError."""
        self._max_rows = max_rows
        size = -(-(_FIRST + max_rows + _OTHER_ROWS) * BLOCK_BYTES // _PAGE_BYTES) * _PAGE_BYTES
        try:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size != size:
                    path.unlink()  # not truncated: a reader may have it mapped
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(self._fd, 0, _PAGE_BYTES)
                os.ftruncate(self._fd, size)
                self._map = mmap.mmap(self._fd, size)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise StoreError(f"cannot make the table of counts: {error.strerror}", path=path) from error
        self._words = memoryview(self._map).cast("q")
        self._rows: dict[tuple[str, tuple[str, ...]], int] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], Count] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        if self._words[0] != _MAGIC:
            self._words[0] = _MAGIC
        self._number = self._words[1]
        for row in range(_FIRST, _FIRST + self._number):
            found = _described(self._map, self._words, row)
            if found is not None:
                self._rows[found.name, tuple(found.labels.values())] = row

    def __len__(self) -> int:
        """Rows so far."""
        return self._number

    def count(self, family: Family, *labels: str) -> Count:
        """The counter or gauge with these values of its labels, made at first use."""
        key = family.name, labels
        found = self._counts.get(key)
        if found is None:
            found = Count(self._words, self._row(family, labels))
            if key in self._rows:  # a name without a row of its own is not remembered: there may be any number
                self._counts[key] = found
        return found

    def histogram(self, family: Family, *labels: str) -> Histogram:
        """The histogram with these values of its labels, made at first use."""
        key = family.name, labels
        found = self._histograms.get(key)
        if found is None:
            found = Histogram(self._words, self._row(family, labels), family)
            if key in self._rows:
                self._histograms[key] = found
        return found

    def reset(self, family: Family) -> None:
        """Set every gauge of ``family`` to 0: what an earlier process left there is not true any more."""
        for (name, _), row in self._rows.items():
            if name == family.name:
                self._words[row * _WORDS + _COUNT] = 0

    def has_row(self, family: Family, *labels: str) -> bool:
        """Whether these labels have a row of their own; if not, what they count goes to one that others share."""
        return (family.name, labels) in self._rows

    def set_all(self, family: Family, values: Mapping[tuple[str, ...], int]) -> None:
        """Set the gauge ``family``: ``values`` by labels, those that share a row added up, and 0 for all others."""
        sums = {row: 0 for (name, _), row in self._rows.items() if name == family.name}
        for labels, value in values.items():
            row = self._row(family, labels)
            sums[row] = sums.get(row, 0) + value
        for row, value in sums.items():
            self._words[row * _WORDS + _COUNT] = value

    def _row(self, family: Family, labels: tuple[str, ...]) -> int:
        if len(labels) != len(family.labels):
            raise ValueError(f"{family.name} has the labels {', '.join(family.labels)}, not {len(labels)} values")
        if len(family.bounds) >= MAX_BUCKETS:
            raise ValueError(f"{family.name} has more than {MAX_BUCKETS} buckets")
        row = self._rows.get((family.name, labels))
        if row is not None:
            return row
        others = (OTHER,) * len(labels)
        try:
            text = _text(family, labels)
        except orjson.JSONEncodeError:  # a name that is no text
            return _LOST
        is_other = labels == others
        if not is_other and (self._number >= self._max_rows or len(text) > _MAX_TEXT):
            return self._row(family, others)
        if self._number >= self._max_rows + _OTHER_ROWS:
            return _LOST
        row = _FIRST + self._number
        try:
            os.posix_fallocate(self._fd, row * BLOCK_BYTES // _PAGE_BYTES * _PAGE_BYTES, _PAGE_BYTES)
        except OSError:
            return _LOST
        start = row * BLOCK_BYTES + _TEXT
        self._map[start : start + len(text)] = text
        self._words[row * _WORDS] = len(text)
        self._number += 1
        self._words[1] = self._number
        self._rows[family.name, labels] = row
        return row

    def close(self) -> None:
        """Unmap; what was counted stays in the file."""
        self._rows.clear()
        self._counts.clear()
        self._histograms.clear()
        with contextlib.suppress(BufferError):
            self._words.release()
            self._map.close()
            os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Described:
    """What a row says of itself. ``bounds`` and ``scale`` as in :class:`Family`."""

    name: str
    kind: Kind
    help: str
    labels: dict[str, str]
    bounds: tuple[float, ...]
    scale: float


class CountReader:
    """Another process's view of one table. Descriptions are read once."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when there is no table."""
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if found.st_size < BLOCK_BYTES:
                raise OSError(f"{path} is not complete yet")
            self.inode = found.st_ino
            self._size = found.st_size
            self._map = mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")
        self._known: list[Described] = []

    @property
    def is_current(self) -> bool:
        """False when the file was replaced, or is of another size now."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_ino, found.st_size) == (self.inode, self._size)

    def rows(self) -> Iterator[tuple[int, Described, list[int]]]:
        """``(number of the row, what it is, its values)`` of each row. The values of a histogram: count, sum, buckets."""
        known, words = self._known, self._words
        for number in range(words[1]):
            row = _FIRST + number
            if number >= len(known):
                found = _described(self._map, words, row)
                if found is None:
                    return  # it is being made
                known.append(found)
            one = known[number]
            at = row * _WORDS + _COUNT
            yield number, one, words[at : at + (3 + len(one.bounds) if one.bounds else 1)].tolist()

    def close(self) -> None:
        self._words.release()
        self._map.close()


def _text(family: Family, labels: tuple[str, ...]) -> bytes:
    described: dict[str, Any] = {
        "name": family.name,
        "kind": family.kind,
        "labels": dict(zip(family.labels, labels, strict=True)),
        "help": family.help,
    }
    if family.bounds:
        described["bounds"] = family.bounds
    if family.scale != 1.0:
        described["scale"] = family.scale
    return orjson.dumps(described)


def _described(mapped: mmap.mmap, words: memoryview[int], row: int) -> Described | None:
    """The description of a row; None for one that is not there, or that nobody can read."""
    length = words[row * _WORDS]
    if not 0 < length <= _MAX_TEXT:
        return None
    start = row * BLOCK_BYTES + _TEXT
    try:
        found = orjson.loads(mapped[start : start + length])
        bounds = tuple(float(bound) for bound in found.get("bounds", ()))
        if len(bounds) >= MAX_BUCKETS:
            return None
        return Described(
            str(found["name"]),
            Kind(found["kind"]),
            str(found["help"]),
            {str(name): str(value) for name, value in found["labels"].items()},
            bounds,
            float(found.get("scale", 1.0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
