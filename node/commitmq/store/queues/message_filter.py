"""The input of a plugin's filter: columns of the properties it wants, for many records of one segment.

The reader hands a :class:`FilterBatch` to a compiled filter (:class:`commitmq.plugin.hookspecs.CompiledFilter`), which
answers with one boolean for each record. A kernel finds the properties once, and only those that the filter named;
their values stay bytes in the mapped segment until the filter asks for text.

Tag expressions: ``TagA || TagB`` (spec 12.7), tested on ConsumeQueue units by hash and on records byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.format.java import java_string_hash
from commitmq.kernels import codes, compiled

MAX_TAGS = 1_024
MAX_EXPRESSION_CHARACTERS = 65_536

_LEAST_HASH = -(1 << 31)
_GREATEST_HASH = (1 << 31) - 1
# Up to this number, one comparison for each tag is faster than the sort inside isin.
_FEW = 8


def string_hashes(texts: list[str]) -> NDArray[np.int64]:
    """``text.hashCode()`` of Java for each of ``texts`` (spec 0.1). No text may be empty.

    numpy does the work, because a client chooses the texts: character by character, 60 KB of tags took 6 ms of the
    reader.
    """
    if len(texts) <= _FEW:
        return np.array([java_string_hash(text) for text in texts], np.int64)
    encoded = [text.encode("utf-16-le", "surrogatepass") for text in texts]
    units = np.frombuffer(b"".join(encoded), "<u2").astype(np.uint32)
    ends = np.cumsum([len(one) // 2 for one in encoded])
    sizes = np.diff(ends, prepend=0)
    # A unit counts as often as 31 to the power of the units behind it, all modulo 2**32.
    powers = np.cumprod(np.full(int(sizes.max()), 31, np.uint32), dtype=np.uint32)
    powers = np.concatenate((np.ones(1, np.uint32), powers[:-1]))
    behind = np.repeat(ends, sizes) - 1 - np.arange(len(units))
    return np.add.reduceat(units * powers[behind], ends - sizes, dtype=np.uint32).astype(np.int32).astype(np.int64)


class TagFilter:
    """A set of wanted tags. Hashes and bytes are made when the first unit or record is tested: most pulls find an empty
    queue.
    """

    __slots__ = ("__weakref__", "_codes", "_texts", "tags")

    # A record is read only if its unit has one of the hashes, and then only one property of it.
    terms = 0

    def __init__(self, tags: list[str]) -> None:
        """Raises ValueError for an empty list, an empty tag or more than MAX_TAGS."""
        self.tags = list(dict.fromkeys(tags))
        if not self.tags or not all(self.tags):
            raise ValueError("a tag filter needs at least one tag, and none may be empty")
        if len(self.tags) > MAX_TAGS:
            raise ValueError(f"a tag filter may name {MAX_TAGS} tags at most, not {len(self.tags)}")
        self._codes: NDArray[np.int64] | None = None
        self._texts: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None

    @property
    def codes(self) -> NDArray[np.int64]:
        """The tags' hashes, sorted, each once."""
        if self._codes is None:
            self._codes = np.unique(string_hashes(self.tags))
        return self._codes

    @property
    def texts(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The tags' UTF-8, concatenated; and the begin of each in it, with the end of the last one."""
        if self._texts is None:
            encoded = [tag.encode("utf-8", "surrogatepass") for tag in self.tags]
            bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
            self._texts = np.frombuffer(b"".join(encoded), np.uint8), bounds
        return self._texts

    @classmethod
    def parse(cls, expression: str | None) -> TagFilter | None:
        """The filter for ``expression``; None when it means every message (``*``, empty, absent).

        Tags are split at ``||`` and stripped, empty ones dropped. Raises ValueError when none is left or there are too
        many.
        """
        if expression is None or expression.strip() in ("", "*"):
            return None
        if len(expression) > MAX_EXPRESSION_CHARACTERS:
            raise ValueError(f"a tag expression may have {MAX_EXPRESSION_CHARACTERS} characters at most")
        tags = [tag for part in expression.split("||") if (tag := part.strip())]
        if not tags:
            raise ValueError(f"the tag expression {expression!r} names no tag")
        return cls(tags)

    def may_match(self, units: object, codes: NDArray[np.int64], extensions: object) -> NDArray[np.bool_]:
        """Which units can belong to a wanted tag, by their tags codes.

        A code outside the 32-bit range is not a hash (a delivery time of SCHEDULE_TOPIC_XXXX, spec 3.2, or an address
        that leads to no extension unit, spec 3.8): such a unit passes, and the record itself decides.
        """
        possible: Any = (codes < _LEAST_HASH) | (codes > _GREATEST_HASH)
        wanted = self.codes
        if len(wanted) <= _FEW:
            for code in wanted:
                possible |= codes == code
        else:
            possible |= np.isin(codes, wanted)
        return np.asarray(possible, np.bool_)

    def judge(
        self,
        data: NDArray[np.uint8],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        verdicts: NDArray[np.uint8],
    ) -> None:
        """Set ``verdicts`` to MATCH, NO_MATCH or NO_RECORD, by the tags in the records themselves."""
        # Imported late: consumers parse tag expressions too, and do not need the extra ``node``.
        from commitmq.kernels.compiled import match_tags

        match_tags(data, positions, sizes, *self.texts, verdicts)


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
        """``(values, valid)``: the values parsed as integers within ``limits``, as Java's parsers do.

        An integer is an optional sign and digits; blanks, a point or a number out of range are invalid.
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
