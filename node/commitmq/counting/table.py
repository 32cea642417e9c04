"""A worker's counts: one mapped file for each process, ``run/ROLE.counts``, which outlives the process.

Layout: blocks of 1024 bytes; words are signed, 8 bytes, in host byte order (the file never leaves the machine).

    block 0        words: magic, number of rows; the rest is zero
    block 1        takes what is counted in rows that could not be made; nobody reads it
    block 2..      one row each:
        word 0         length of the description; stored last, so a reader sees whole rows or none
        words 1..31    the values: one of a counter or gauge; count, sum and one for each bucket (+Inf too) of a histogram
        bytes 256..    the description: a JSON object with name, kind, help, labels and, of a histogram, bounds and scale

Why a file: a worker that died goes on counting where its predecessor was, so counters do not fall while a node runs; and
reading costs the worker nothing. Why rows describe themselves: a reader needs to know no worker, so what a plugin's worker
counts is shown like the node's own. Why single words: as in :mod:`commitmq.control`, a load or store is one machine access.
Count and buckets of a histogram are separate words, so a reader may see an observation in one and not yet in the other.

The file has holes: a row takes space when it is made, a page at a time, by posix_fallocate. A store into a hole would end the
process (SIGBUS) where the disk is full; so without space the row is not made, and what it would count is lost. Rows are
never removed while the node runs; with ``max_rows`` of them, further ones are counted in a row of the same family whose
labels are all ``_other``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq.counting.families import Family, Kind
from commitmq.errors import StoreError

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
        """The value of a gauge."""
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
        """Set every gauge of ``family`` to 0: what a former process left there is not true any more."""
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
