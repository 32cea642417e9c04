"""Sizes and tags codes of a run's records, for their ConsumeQueue units, without reading the log."""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.kernels.java_hash import string_hash
from commitmq.kernels.raw import OK, layout
from commitmq.kernels.words import same_bytes, until_mark, until_two

_TAGS = np.frombuffer(b"TAGS", np.uint8)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def tags_codes(run, ends, codes):  # type: ignore[no-untyped-def]
    """``codes[i]`` becomes the tags code of record i, which ends at ``run[ends[i]]``: the hash of its TAGS, or 0.

    As in the walk of the log, the last pair of a name counts and a pair needs a value (spec 2.5, 3.2). Returns the
    number of good records; those behind the first bad one are not examined.
    """
    at = np.int64(0)
    for index in range(ends.size):
        (why, _, _, _, _, _, _, _, properties, properties_size) = layout(run, at, ends[index])
        if why != OK:
            return np.int64(index)
        codes[index] = 0
        position = properties
        stop = properties + properties_size
        while position < stop:
            name = position
            position = until_mark(run, position, stop)
            name_size = position - name
            if position >= stop or run[position] == 2:
                position += 1
                continue
            position += 1
            value = position
            position = until_two(run, position, stop)
            if name_size == 4 and position > value and same_bytes(run, name, _TAGS, 0, 4):
                codes[index] = string_hash(run, value, position)
            position += 1
        at = ends[index]
    return np.int64(ends.size)
