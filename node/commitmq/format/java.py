"""Java semantics that leak into the bytes: String.hashCode and the iteration order of HashMap (spec 0.1, 2.5)."""

from __future__ import annotations

from collections.abc import Iterable


def utf16_units(text: str) -> int:
    """Length of ``text`` as Java's ``String.length()`` counts it: a character outside the BMP is two units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-be", "surrogatepass")) // 2


def java_string_hash(text: str) -> int:
    """``text.hashCode()`` of Java: a signed 32-bit integer over the UTF-16 code units (spec 0.1)."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & 0xFFFFFFFF
    else:
        units = text.encode("utf-16-be", "surrogatepass")
        for index in range(0, len(units), 2):
            value = (31 * value + (units[index] << 8 | units[index + 1])) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def hash_map_order(names: Iterable[str], buckets: int) -> list[str]:
    """``names`` as a Java HashMap that began with ``buckets`` (a power of two) buckets would iterate them.

    The table doubles when it holds more than three quarters of its buckets; names that share a bucket keep the order in
    which they were put in. (Java's conversion of a crowded bucket into a tree keeps that order for iteration too.)
    """
    ordered = list(names)
    while len(ordered) > buckets * 3 // 4:
        buckets *= 2
    mask = buckets - 1
    return sorted(ordered, key=lambda name: _spread(java_string_hash(name)) & mask)


def _spread(value: int) -> int:
    unsigned = value & 0xFFFFFFFF
    return unsigned ^ unsigned >> 16
