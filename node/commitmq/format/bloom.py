"""The Bloom filter in extension units: which consumer groups' expressions match a message (spec 3.8).

RocketMQ sizes it for 32 groups with expressions and 20 % false positives: 3 positions in 112 bits for each
``group#topic``. Bit i is the bit of value ``1 << i % 8`` in byte ``i // 8``.
"""

from __future__ import annotations

from typing import Final

BITS: Final = 112
HASHES: Final = 3
BITMAP_BYTES: Final = BITS // 8

_MASK: Final = (1 << 64) - 1
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


def positions(group: str, topic: str) -> list[int]:
    """The bits of one subscription; two of them may be the same."""
    low = murmur3_128(f"{group}#{topic}".encode("utf-8", "replace"))[0]
    first, second = low & 0xFFFFFFFF, low >> 32
    found = []
    for number in range(1, HASHES + 1):
        combined = (first + number * second) & 0xFFFFFFFF
        if combined >> 31:
            combined ^= 0xFFFFFFFF
        found.append(combined % BITS)
    return found


def mask(group: str, topic: str) -> bytes:
    """The bit map of one subscription alone."""
    value = 0
    for position in positions(group, topic):
        value |= 1 << position
    return value.to_bytes(BITMAP_BYTES, "little")


def murmur3_128(data: bytes) -> tuple[int, int]:
    """MurmurHash3 x64 128 with seed 0, as two unsigned 64-bit halves."""
    first = second = 0
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        first ^= _mixed(int.from_bytes(data[at : at + 8], "little"), _C1, 31, _C2)
        first = (_rotated(first, 27) + second) * 5 + 0x52DCE729 & _MASK
        second ^= _mixed(int.from_bytes(data[at + 8 : at + 16], "little"), _C2, 33, _C1)
        second = (_rotated(second, 31) + first) * 5 + 0x38495AB5 & _MASK
    tail = data[whole:]
    second ^= _mixed(int.from_bytes(tail[8:], "little"), _C2, 33, _C1)
    first ^= _mixed(int.from_bytes(tail[:8], "little"), _C1, 31, _C2)
    first ^= len(data)
    second ^= len(data)
    first = first + second & _MASK
    second = second + first & _MASK
    first, second = _finished(first), _finished(second)
    first = first + second & _MASK
    return first, second + first & _MASK


def _mixed(value: int, before: int, turn: int, after: int) -> int:
    return _rotated(value * before & _MASK, turn) * after & _MASK


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & _MASK


def _finished(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33
