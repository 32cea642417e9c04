"""The input of a plugin's filter: columns of the properties it wants, for many records of one segment.

The reader hands a :class:`FilterBatch` to a compiled filter (:class:`commitmq.plugin.hookspecs.CompiledFilter`), which
answers with one boolean for each record. A kernel finds the properties once, and only those that the filter named;
their values stay bytes in the mapped segment until the filter asks for text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.kernels import codes, compiled

Flags = NDArray[np.bool_]
INTEGER_RANGE: Final = (-(1 << 31), (1 << 31) - 1)
LONG_RANGE: Final = (-(1 << 63), (1 << 63) - 1)

_WHOLE: Final = re.compile(r"[+-]?\d+")
_DECIMAL: Final = re.compile(r"[+-]?(?:NaN|Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)")
_HEXADECIMAL: Final = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")
# Java strips these characters from both ends before it parses a double: everything up to the blank.
_BLANKS: Final = "".join(map(chr, range(33)))


class PropertyColumn:
    """The values of one property in every record of a batch; ``present`` says which records have it."""

    __slots__ = ("_data", "lengths", "present", "starts")

    def __init__(self, data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self._data = data
        self.starts = starts
        self.lengths = lengths
        self.present: Flags = lengths > 0

    def __len__(self) -> int:
        return len(self.starts)

    def value(self, index: int) -> str | None:
        """The value in record ``index`` as text, None when the record has none."""
        size = int(self.lengths[index])
        start = int(self.starts[index])
        return self._data[start : start + size].tobytes().decode("utf-8", "replace") if size else None

    def values(self) -> list[str | None]:
        """All values as text. Convenient but slow: prefer the tests below, which decode nothing."""
        return [self.value(index) for index in range(len(self))]

    def equals_any(self, texts: Iterable[str]) -> Flags:
        """Where the value is one of ``texts``."""
        return self._test(texts, codes.EQUALS)

    def contains(self, text: str) -> Flags:
        """Where the value contains ``text``, which must not be empty."""
        return self._test([text], codes.CONTAINS)

    def starts_with(self, text: str) -> Flags:
        """Where the value begins with ``text``, which must not be empty."""
        return self._test([text], codes.STARTS_WITH)

    def ends_with(self, text: str) -> Flags:
        """Where the value ends with ``text``, which must not be empty."""
        return self._test([text], codes.ENDS_WITH)

    def equals(self, other: PropertyColumn) -> Flags:
        """Where both columns have a value, and the values are equal."""
        found = np.empty(len(self), np.bool_)
        compiled.same_text(self._data, self.starts, self.lengths, other.starts, other.lengths, found)
        return found

    def _test(self, texts: Iterable[str], how: int) -> Flags:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        needles = np.frombuffer(b"".join(encoded), np.uint8)
        bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        found = np.empty(len(self), np.bool_)
        compiled.text_tests(self._data, self.starts, self.lengths, needles, bounds, how, found)
        return found

    def whole_numbers(self, limits: tuple[int, int] = LONG_RANGE) -> tuple[NDArray[np.int64], Flags]:
        """``(values, valid)``: the values parsed as integers within ``limits``, as Java's parsers do. An integer is an
        optional sign and digits; blanks, a point or a number out of range are invalid.
        """
        values = np.empty(len(self), np.int64)
        states = np.empty(len(self), np.uint8)
        compiled.whole_numbers(self._data, self.starts, self.lengths, limits[0], limits[1], values, states)
        valid: Flags = states == codes.NUMBER
        for index in np.flatnonzero(states == codes.UNDECIDED).tolist():
            number = java_integer(self.value(index) or "", limits)
            if number is not None:
                values[index], valid[index] = number, True
        return values, valid

    def decimal_numbers(self) -> tuple[NDArray[np.float64], Flags]:
        """``(values, valid)``: the values parsed as floating point numbers, as Java's ``Double.valueOf`` does."""
        values = np.empty(len(self), np.float64)
        states = np.empty(len(self), np.uint8)
        compiled.decimal_numbers(self._data, self.starts, self.lengths, values, states)
        valid: Flags = states == codes.NUMBER
        for index in np.flatnonzero(states == codes.UNDECIDED).tolist():
            number = java_double(self.value(index) or "")
            if number is not None:
                values[index], valid[index] = number, True
        return values, valid


def java_integer(text: str, limits: tuple[int, int]) -> int | None:
    """The result of ``Integer.valueOf`` or ``Long.valueOf``, None where it throws."""
    if not _WHOLE.fullmatch(text) or len(text) > 4000 or max(text) > "\uffff":
        return None
    number = int(text)
    return number if limits[0] <= number <= limits[1] else None


def java_double(text: str) -> float | None:
    """The result of ``Double.valueOf``, None where it throws."""
    text = text.strip(_BLANKS)
    if _DECIMAL.fullmatch(text):
        return float(text.rstrip("fFdD") if text[-1:].lower() in ("f", "d") else text)
    hexadecimal = _HEXADECIMAL.fullmatch(text)
    if hexadecimal is None:
        return None
    try:
        return float.fromhex(hexadecimal[1])
    except OverflowError:
        return float("-inf") if text.startswith("-") else float("inf")


class FilterBatch:
    """Records of one segment, with the columns of the properties that the filter named.

    ``sizes`` are bytes, ``positions`` bytes in ``data``. ``len(batch)`` is the number of records. Each name has a
    column, even where no record has the property.
    """

    __slots__ = ("_columns", "data", "positions", "sizes", "whole")

    def __init__(
        self,
        data: NDArray[np.uint8],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        names: tuple[str, ...],
    ) -> None:
        self.data = data
        self.positions = positions
        self.sizes = sizes
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        starts = np.empty((len(names), len(positions)), np.int64)
        lengths = np.empty((len(names), len(positions)), np.int64)
        self.whole: Flags = np.empty(len(positions), np.bool_)
        compiled.find_properties(
            data,
            positions,
            sizes,
            np.frombuffer(b"".join(encoded), np.uint8),
            np.cumsum([0, *map(len, encoded)], dtype=np.int64),
            starts,
            lengths,
            self.whole,
        )
        self._columns = {
            name: PropertyColumn(data, starts[number], lengths[number]) for number, name in enumerate(names)
        }

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, name: str) -> PropertyColumn:
        """The column of a property that the filter named. Raises KeyError for any other."""
        return self._columns[name]

    def record(self, index: int) -> memoryview:
        """The stored bytes of one record (see :func:`commitmq.format.record.decode_record`)."""
        at = int(self.positions[index])
        return self.data[at : at + int(self.sizes[index])].data
