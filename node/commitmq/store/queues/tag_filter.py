"""Tag expressions: ``TagA || TagB`` (spec 12.7), tested on ConsumeQueue units by hash and on records byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from commitmq.format.java import java_string_hash

MAX_TAGS = 1_024
MAX_EXPRESSION_CHARACTERS = 65_536

_LEAST_HASH = -(1 << 31)
_GREATEST_HASH = (1 << 31) - 1
# Up to this number, one comparison for each tag is faster than the sort inside isin.
_FEW = 8


def string_hashes(texts: list[str]) -> NDArray[np.int64]:
    """``text.hashCode()`` of Java for each of ``texts`` (spec 0.1). No text may be empty. numpy does the work, because
    a client chooses the texts: character by character, 60 KB of tags took 6 ms of the reader.
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
    """A set of wanted tags. Hashes and bytes are made at the first test: most pulls find an empty queue."""

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
        """The filter for ``expression``; None when it means every message (``*``, empty, absent). Tags are split at
        ``||`` and stripped, empty ones dropped. Raises ValueError when none is left or there are too many.
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
