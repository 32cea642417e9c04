"""Values of properties as numbers, many at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MOST_DIGITS = 18  # each number of so many digits fits 64 bits
_MOST = 1 << 63


def longs(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """``(numbers, good)`` of the texts ``data[starts[i]:starts[i] + lengths[i]]``: Java's Long.parseLong of each.

    ``good`` is False, and the number 0, for an empty text, one that is no number, and one that 64 bits do not hold.
    """
    numbers: NDArray[np.int64] = np.zeros(len(starts), np.int64)
    good: NDArray[np.bool_] = np.zeros(len(starts), np.bool_)
    plain = (lengths > 0) & (lengths <= _MOST_DIGITS)
    which = np.flatnonzero(plain)
    if len(which):
        ends, sizes = starts[which] + lengths[which], lengths[which]
        values: NDArray[np.int64] = np.zeros(len(which), np.int64)
        right: NDArray[np.bool_] = np.ones(len(which), np.bool_)
        for column in range(int(sizes.max()), 0, -1):  # one pass a digit: fewer bytes move than by a matrix
            inside = sizes >= column
            digits = np.where(inside, data[np.where(inside, ends - column, 0)] - np.uint8(48), 0)
            right &= digits <= 9
            values = values * 10 + digits
        numbers[which] = np.where(right, values, 0)
        good[which] = right
    for index in np.flatnonzero((lengths > 0) & ~good).tolist():  # signs, very long numbers, and what is none
        text = data[starts[index] : starts[index] + lengths[index]].tobytes()
        digits_only = text[1:] if text[:1] in (b"+", b"-") else text
        if digits_only.isdigit() and -_MOST <= int(text) < _MOST:
            numbers[index], good[index] = int(text), True
    return numbers, good
