"""The filter of a pull's messages, and the work that one read may spend on it."""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from commitmq.store.queues.consume_queue_ext import Extensions
from commitmq.store.queues.pull_result import Units

# Budget of one read for a filter that evaluates properties: bytes times terms, some 10 ms. A record has no more bytes
# of properties than this, and each term costs this many bytes again for every array it makes.
JUDGED_BYTES: Final = 16 * 1024 * 1024
_MAX_PROPERTIES_BYTES: Final = 33_000
_TERM_BYTES: Final = 32_768


class RecordFilter(Protocol):
    """Decides which messages a pull wants: first by their units, then by the records themselves.

    ``terms`` is how often it evaluates a record's properties, which determines its cost.
    """

    @property
    def terms(self) -> int: ...

    def may_match(self, units: Units, codes: NDArray[np.int64], extensions: Extensions | None) -> NDArray[np.bool_]:
        """Which units can belong to wanted messages, by their tags ``codes`` and their extension units."""
        ...

    def judge(
        self,
        data: NDArray[np.uint8],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        verdicts: NDArray[np.uint8],
    ) -> None:
        """Set ``verdicts`` to MATCH, NO_MATCH or NO_RECORD for the records at ``positions`` of ``data``, part of a
        segment.
        """
        ...


def affordable(sizes: NDArray[Any], terms: int, work: int) -> int:
    """How many of the records of ``sizes`` may be evaluated for ``work`` bytes times terms."""
    spent = np.minimum(sizes, _MAX_PROPERTIES_BYTES).astype(np.int64).cumsum() * terms
    return int(np.searchsorted(spent, work, side="right"))


def cost_of(sizes: NDArray[Any], terms: int) -> int:
    """The cost of evaluating the records of ``sizes``."""
    return (int(np.minimum(sizes, _MAX_PROPERTIES_BYTES).astype(np.int64).sum()) + _TERM_BYTES) * terms
