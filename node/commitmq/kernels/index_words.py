"""An index file as 32-bit words: where its parts begin, and the order of bytes in a word.

A file is accessed so because each field below the header is one or two aligned words. A store to a slot is then one
machine access, so a process killed anywhere leaves an old or a new slot, never half of one. The values in the file are
big-endian. Layout and rules: spec 4.1, 4.2; :mod:`commitmq.store.index.index_file`.
"""

from __future__ import annotations

import sys

import numpy as np
from numba import njit

HEADER_WORDS = 10
ITEM_WORDS = 5
_LITTLE = sys.byteorder == "little"


@njit(inline="always")
def swap(value):  # type: ignore[no-untyped-def]
    """Swap the bytes of a 32-bit word between the file's order and the host's; int64."""
    if not _LITTLE:
        return np.int64(np.int32(value))
    word = np.uint32(value)
    return np.int64(
        np.int32(
            (word >> np.uint32(24))
            | ((word >> np.uint32(8)) & np.uint32(0xFF00))
            | ((word << np.uint32(8)) & np.uint32(0xFF0000))
            | (word << np.uint32(24))
        )
    )


@njit(inline="always")
def item_offset(words, item):  # type: ignore[no-untyped-def]
    """Physical offset in the item whose first word is ``item``."""
    return (swap(words[item + 1]) << 32) | (swap(words[item + 2]) & np.int64(0xFFFFFFFF))
