"""The exact half of a tag filter: whether the record at a place has one of the wanted tags, byte for byte.

A ConsumeQueue unit holds only a 32-bit hash of the tag (spec 3.2), so two tags can share a hash. Units that pass the
hash test are compared here with the ``TAGS`` property of the record itself.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.kernels.raw import OK, layout
from commitmq.kernels.words import same_bytes, until_mark, until_two

NO_MATCH = 0
MATCH = 1
NO_RECORD = 2  # the bytes at this place are not a complete record of the expected size

_TAGS = np.frombuffer(b"TAGS", np.uint8)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), "
    "Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def match_tags(log, positions, sizes, wanted, bounds, verdicts):  # type: ignore[no-untyped-def]
    """Compare the records at ``positions`` of ``log`` with the wanted tags; returns how many match.

    ``log`` is part of a mapped segment, ``positions`` and ``sizes`` are bytes in it (equal length). Wanted tag ``k`` is
    ``wanted[bounds[k]:bounds[k + 1]]``; none may be empty. ``verdicts[i]`` becomes NO_MATCH, MATCH or NO_RECORD. A
    record without TAGS, or with an empty one, matches nothing; of several TAGS the last one counts (spec 2.5).
    """
    matched = 0
    tags = bounds.size - 1
    for index in range(positions.size):
        at = positions[index]
        verdicts[index] = NO_RECORD
        if at < 0 or at > log.size:
            continue
        (reason, total, _born, _host, _body, _body_size, _topic, _topic_size, properties, properties_size) = layout(
            log, at, log.size
        )
        if reason != OK or total != sizes[index]:
            continue
        value = np.int64(0)
        value_size = np.int64(0)
        position = properties
        stop = properties + properties_size
        while position < stop:
            name = position
            position = until_mark(log, position, stop)
            if position >= stop or log[position] == 2:
                position += 1
                continue
            name_size = position - name
            position += 1
            start = position
            position = until_two(log, position, stop)
            if name_size == _TAGS.size and position > start and same_bytes(log, name, _TAGS, 0, name_size):
                value = start
                value_size = position - start
            position += 1
        verdicts[index] = NO_MATCH
        if value_size == 0:
            continue
        for tag in range(tags):
            if bounds[tag + 1] - bounds[tag] == value_size and same_bytes(log, value, wanted, bounds[tag], value_size):
                verdicts[index] = MATCH
                matched += 1
                break
    return matched
