"""Properties of many records as columns: finds their values, and tests them, without decoding any.

A column is two arrays: the position of each record's value in the buffer, and its size in bytes; size 0 means that the
record has no such property (an empty value cannot be stored, spec 2.5).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.kernels.raw import OK, layout
from commitmq.kernels.words import same_bytes, until_mark, until_two

# Results of parsing a value as a number.
ABSENT = 0
NUMBER = 1
NO_NUMBER = 2
UNDECIDED = 3  # rare forms, left to the caller: digits that are not ASCII, many digits, NaN

# Modes of text_tests.
EQUALS = 0
CONTAINS = 1
STARTS_WITH = 2
ENDS_WITH = 3

_TENS = np.array([10.0**power for power in range(23)], np.float64)
_EXACT = np.int64(1 << 53)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), "
    "Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 2, 'C'), Array(int64, 2, 'C'), "
    "Array(bool, 1, 'C'))",
    cache=True,
    nogil=True,
)
def find_properties(log, positions, sizes, names, bounds, starts, lengths, whole):  # type: ignore[no-untyped-def]
    """Find the values of some properties in the records at ``positions`` of ``log``; returns how many records are whole.

    Name ``k`` is ``names[bounds[k]:bounds[k + 1]]``; its value in record ``i`` becomes
    ``log[starts[k, i]:starts[k, i] + lengths[k, i]]``, the last one when there are several (spec 2.5). ``whole[i]`` says
    whether a record of ``sizes[i]`` bytes lies there at all.
    """
    good = 0
    wanted = bounds.size - 1
    for index in range(positions.size):
        at = positions[index]
        whole[index] = False
        for number in range(wanted):
            starts[number, index] = 0
            lengths[number, index] = 0
        if at < 0 or at > log.size:
            continue
        (reason, total, _born, _host, _body, _body_size, _topic, _topic_size, properties, properties_size) = layout(
            log, at, log.size
        )
        if reason != OK or total != sizes[index]:
            continue
        whole[index] = True
        good += 1
        position = properties
        stop = properties + properties_size
        while position < stop:
            name = position
            position = until_mark(log, position, stop)
            name_size = position - name
            if position >= stop or log[position] == 2:
                position += 1
                continue
            position += 1
            value = position
            position = until_two(log, position, stop)
            value_size = position - value
            position += 1
            if name_size == 0 or value_size == 0:
                continue
            for number in range(wanted):
                begin = bounds[number]
                if bounds[number + 1] - begin == name_size and same_bytes(log, name, names, begin, name_size):
                    starts[number, index] = value
                    lengths[number, index] = value_size
                    break
    return good


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), "
    "Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), int64, Array(bool, 1, 'C'))",
    cache=True,
    nogil=True,
)
def text_tests(log, starts, lengths, needles, bounds, how, found):  # type: ignore[no-untyped-def]
    """Whether each value equals, contains, begins or ends with one of ``needles`` (by ``how``); absent ones never do."""
    count = bounds.size - 1
    for index in range(starts.size):
        size = lengths[index]
        found[index] = False
        if size == 0:
            continue
        at = starts[index]
        for number in range(count):
            begin = bounds[number]
            needle_size = bounds[number + 1] - begin
            if needle_size > size:
                continue
            if how == EQUALS:
                hit = needle_size == size and same_bytes(log, at, needles, begin, size)
            elif how == STARTS_WITH:
                hit = same_bytes(log, at, needles, begin, needle_size)
            elif how == ENDS_WITH:
                hit = same_bytes(log, at + size - needle_size, needles, begin, needle_size)
            else:
                hit = False
                for shift in range(size - needle_size + 1):
                    if same_bytes(log, at + shift, needles, begin, needle_size):
                        hit = True
                        break
            if hit:
                found[index] = True
                break


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int64, 1, 'C'), "
    "Array(int64, 1, 'C'), Array(bool, 1, 'C'))",
    cache=True,
    nogil=True,
)
def same_text(log, starts, lengths, other_starts, other_lengths, found):  # type: ignore[no-untyped-def]
    """Whether the values of two columns are both present and equal."""
    for index in range(starts.size):
        size = lengths[index]
        found[index] = (
            size > 0 and size == other_lengths[index] and same_bytes(log, starts[index], log, other_starts[index], size)
        )


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), int64, int64, "
    "Array(int64, 1, 'C'), Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def whole_numbers(log, starts, lengths, least, greatest, values, states):  # type: ignore[no-untyped-def]
    """Read values as integers in [least, greatest]: an optional sign and digits, nothing else, as Java's parsers do.

    ``states[i]`` becomes ABSENT, NUMBER (then ``values[i]`` holds it), NO_NUMBER or UNDECIDED.
    """
    for index in range(starts.size):
        size = lengths[index]
        values[index] = 0
        if size == 0:
            states[index] = ABSENT
            continue
        at = starts[index]
        stop = at + size
        negative = log[at] == 45
        if negative or log[at] == 43:
            at += 1
        state = NO_NUMBER if at == stop else NUMBER
        value = np.int64(0)  # counted downwards: the least integer has no positive counterpart
        while at < stop:
            byte = log[at]
            if byte >= 128:
                state = UNDECIDED
                break
            digit = np.int64(byte) - 48
            if digit < 0 or digit > 9:
                state = NO_NUMBER
                # A character further on that is not ASCII changes nothing: this one is not a digit.
                break
            if value < -922337203685477580 or (value == -922337203685477580 and digit > 8):
                state = UNDECIDED
                break
            value = value * 10 - digit
            at += 1
        if state == NUMBER:
            if not negative:
                if value == np.int64(-9223372036854775808):
                    state = NO_NUMBER
                value = -value
            if value < least or value > greatest:
                state = NO_NUMBER
        states[index] = state
        values[index] = value


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(float64, 1, 'C'), "
    "Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def decimal_numbers(log, starts, lengths, values, states):  # type: ignore[no-untyped-def]
    """Read values as floating point numbers: digits with an optional sign, point and exponent.

    This function decides values that one exact multiplication or division gives correctly rounded: up to 2**53 of
    digits, powers of ten up to 22. All other values, and forms that only Java knows (``5d``, ``NaN``, surrounding
    blanks), are UNDECIDED.
    """
    for index in range(starts.size):
        size = lengths[index]
        values[index] = 0.0
        if size == 0:
            states[index] = ABSENT
            continue
        at = starts[index]
        stop = at + size
        states[index] = UNDECIDED
        negative = log[at] == 45
        if negative or log[at] == 43:
            at += 1
        mantissa = np.int64(0)
        digits = np.int64(0)
        scale = np.int64(0)
        point = False
        while at < stop and mantissa < _EXACT:
            byte = log[at]
            if byte == 46 and not point:
                point = True
            elif 48 <= byte <= 57:
                mantissa = mantissa * 10 + np.int64(byte) - 48
                digits += 1
                scale -= 1 if point else 0
            else:
                break
            at += 1
        if digits == 0 or mantissa >= _EXACT:
            continue
        if at < stop and (log[at] == 69 or log[at] == 101):
            at += 1
            down = at < stop and log[at] == 45
            if at < stop and (log[at] == 45 or log[at] == 43):
                at += 1
            exponent = np.int64(0)
            first = at
            while at < stop and 48 <= log[at] <= 57 and exponent < 1000:
                exponent = exponent * 10 + np.int64(log[at]) - 48
                at += 1
            if at == first:
                continue
            scale += -exponent if down else exponent
        if at < stop or scale < -22 or scale > 22:
            continue
        value = np.float64(mantissa)
        value = value * _TENS[scale] if scale >= 0 else value / _TENS[-scale]
        values[index] = -value if negative else value
        states[index] = NUMBER
