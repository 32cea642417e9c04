"""Operations on several bytes at a time: big-endian loads and stores, copies, comparisons, and the ends of properties.

The kernels here use addresses: an index into a numpy array costs a test for negative values for each byte, and passing
an array to a loop costs reference counts. So nothing here checks whether a position is inside the array; callers must.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import extending, njit, types

intrinsic: Any = extending.intrinsic  # numba calls the result with other arguments than the decorated function has
_LITTLE = sys.byteorder == "little"

# memcpy of the C library: several times as fast as the byte loop that a slice assignment is compiled to. Compiled code
# refers to it by name, as it does to the CRC-32 of raw.py.
llvm.add_symbol("commitmq_memcpy", ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value)
_memcpy = types.ExternalFunction("commitmq_memcpy", types.uint64(types.uint64, types.uint64, types.uint64))


@intrinsic
def address_of(typing: Any, buf: Any) -> Any:
    """The address of the first element of an array, int64; the array must outlive its use."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    return types.int64(buf), generate


def _place(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _loader(bits: int) -> Any:
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_place(builder, arguments[0], bits), align=1)
            if _LITTLE:
                value = builder.bswap(value)
            return value if bits == 64 else builder.sext(value, ir.IntType(64))

        return types.int64(types.int64), generate

    return intrinsic(load)


_load2 = _loader(16)
_load4 = _loader(32)
_load8 = _loader(64)


def _storer(bits: int) -> Any:
    def store(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            if _LITTLE:
                value = builder.bswap(value)
            builder.store(value, _place(builder, arguments[0], bits), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(store)


_store2 = _storer(16)
_store4 = _storer(32)
_store8 = _storer(64)


@intrinsic
def word8(typing: Any, address: Any) -> Any:
    """The 8 bytes at ``address`` as uint64, the first byte lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_place(builder, arguments[0], 64), align=1)
        return value if _LITTLE else builder.bswap(value)

    return types.uint64(types.int64), generate


@intrinsic
def _byte(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load(_place(builder, arguments[0], 8)), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _first_hit(typing: Any, hits: Any) -> Any:
    """Index of the first byte of the word ``hits`` (uint64, not 0) that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))
        return builder.lshr(zeros, ir.Constant(ir.IntType(64), 3))

    return types.int64(types.uint64), generate


@njit(inline="always")
def load2(buf, at):  # type: ignore[no-untyped-def]
    """Signed 2-byte big-endian integer at ``at``, as int64."""
    return _load2(address_of(buf) + at)


@njit(inline="always")
def load4(buf, at):  # type: ignore[no-untyped-def]
    """Signed 4-byte big-endian integer at ``at``, as int64."""
    return _load4(address_of(buf) + at)


@njit(inline="always")
def load8(buf, at):  # type: ignore[no-untyped-def]
    """Signed 8-byte big-endian integer at ``at``."""
    return _load8(address_of(buf) + at)


@njit(inline="always")
def store2(buf, at, value):  # type: ignore[no-untyped-def]
    """Store the low 16 bits of ``value``, big-endian."""
    _store2(address_of(buf) + at, value)


@njit(inline="always")
def store4(buf, at, value):  # type: ignore[no-untyped-def]
    """Store the low 32 bits of ``value``, big-endian."""
    _store4(address_of(buf) + at, value)


@njit(inline="always")
def store8(buf, at, value):  # type: ignore[no-untyped-def]
    """Store ``value`` as 8 bytes, big-endian."""
    _store8(address_of(buf) + at, value)


@njit(inline="always")
def copy_bytes(target, target_at, source, source_at, size):  # type: ignore[no-untyped-def]
    """Copy ``source[source_at:source_at + size]`` to ``target[target_at:]``, in any order; they must not overlap."""
    _memcpy(  # type: ignore[call-overload]
        np.uint64(address_of(target) + target_at), np.uint64(address_of(source) + source_at), np.uint64(size)
    )


_ONES = np.uint64(0x0101010101010101)
_TWOS = np.uint64(0x0202020202020202)
_THREES = np.uint64(0x0303030303030303)
HIGH_BITS = np.uint64(0x8080808080808080)


# The three functions below test eight bytes at once, as long as the buffer has eight. In (x - 0x0101..) & ~x & 0x8080..
# the lowest bit set belongs to the first byte of x that is 0; bits above it may be false, by a borrow.
@njit("int64(int64, int64, int64, int64)", cache=True, nogil=True)
def _until_low(base, size, position, end):  # type: ignore[no-untyped-def]
    while position < end:
        if position + 8 <= size:
            word = word8(base + position)
            hits = (word - _THREES) & ~word & HIGH_BITS
            if hits:
                position += _first_hit(hits)
                break
            position += 8
        elif _byte(base + position) <= 2:
            break
        else:
            position += 1
    return min(position, end)


@njit("int64(int64, int64, int64, int64)", cache=True, nogil=True)
def _until_mark(base, size, position, end):  # type: ignore[no-untyped-def]
    while position < end:
        if position + 8 <= size:
            word = word8(base + position)
            one = word ^ _ONES
            two = word ^ _TWOS
            hits = (((one - _ONES) & ~one) | ((two - _ONES) & ~two)) & HIGH_BITS
            if hits:
                position += _first_hit(hits)
                break
            position += 8
        elif 1 <= _byte(base + position) <= 2:
            break
        else:
            position += 1
    return min(position, end)


@njit("int64(int64, int64, int64, int64)", cache=True, nogil=True)
def _until_two(base, size, position, end):  # type: ignore[no-untyped-def]
    while position < end:
        if position + 8 <= size:
            two = word8(base + position) ^ _TWOS
            hits = (two - _ONES) & ~two & HIGH_BITS
            if hits:
                position += _first_hit(hits)
                break
            position += 8
        elif _byte(base + position) == 2:
            break
        else:
            position += 1
    return min(position, end)


@njit(inline="always")
def until_low(buf, at, end):  # type: ignore[no-untyped-def]
    """Position of the first byte of ``buf[at:end]`` that is 0, 1 or 2; ``end`` without one."""
    return _until_low(address_of(buf), np.int64(buf.size), np.int64(at), np.int64(end))


@njit(inline="always")
def until_mark(buf, at, end):  # type: ignore[no-untyped-def]
    """Position of the first byte of ``buf[at:end]`` that is 1 or 2: where a property's name ends; ``end`` without one."""
    return _until_mark(address_of(buf), np.int64(buf.size), np.int64(at), np.int64(end))


@njit(inline="always")
def until_two(buf, at, end):  # type: ignore[no-untyped-def]
    """Position of the first byte of ``buf[at:end]`` that is 2: where a property's value ends; ``end`` without one."""
    return _until_two(address_of(buf), np.int64(buf.size), np.int64(at), np.int64(end))


@njit("boolean(int64, int64, int64)", cache=True, nogil=True)
def _same(left, right, size):  # type: ignore[no-untyped-def]
    if size >= 8:
        end = left + size - 8
        last = right + size - 8
        while left < end:
            if word8(left) != word8(right):
                return False
            left += 8
            right += 8
        return word8(end) == word8(last)  # the rest, and some bytes once more
    if size >= 4:
        return _load4(left) == _load4(right) and _load4(left + size - 4) == _load4(right + size - 4)
    for index in range(size):
        if _byte(left + index) != _byte(right + index):
            return False
    return True


@njit(inline="always")
def same_bytes(left, left_at, right, right_at, size):  # type: ignore[no-untyped-def]
    """Whether the ``size`` bytes at both places are equal."""
    return _same(address_of(left) + left_at, address_of(right) + right_at, np.int64(size))


@njit("boolean(int64, int64)", cache=True, nogil=True)
def _is_ascii(at, end):  # type: ignore[no-untyped-def]
    found = np.uint64(0)
    if end - at >= 8:
        last = end - 8
        while at < last:
            found |= word8(at)
            at += 8
        found |= word8(last)
    else:
        while at < end:
            found |= np.uint64(_byte(at))
            at += 1
    return found & HIGH_BITS == 0


@njit(inline="always")
def is_ascii(buf, start, end):  # type: ignore[no-untyped-def]
    """Whether all of ``buf[start:end]`` is below 0x80."""
    return _is_ascii(address_of(buf) + start, address_of(buf) + end)
