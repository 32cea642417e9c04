"""Goal: what looks at eight bytes at once finds what a look at each byte finds, and never touches a byte behind the buffer.

Method: short and long random bytes, of few different values, in a page that ends where the process may not read, against plain
Python; a read beyond the end ends the test run with a segmentation fault.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator

import numpy as np
import pytest

from commitmq.kernels import codes
from commitmq.kernels.compiled import properties_reason, word_comparison, word_loads, word_searches, word_stores
from commitmq.store.log.run_check import FORBIDDEN_PROPERTIES, forbidden_names

_PAGE = mmap.PAGESIZE
_SIZES = (*range(26), 63, 64, 65, 300)


@pytest.fixture
def edge() -> Iterator[np.ndarray]:
    """A page of bytes behind which none may be read."""
    memory = mmap.mmap(-1, 2 * _PAGE)
    array = np.frombuffer(memory, np.uint8)
    behind = ctypes.c_void_p(array.ctypes.data + _PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(behind, ctypes.c_size_t(_PAGE), 0) == 0
    yield array[:_PAGE]
    libc.mprotect(behind, ctypes.c_size_t(_PAGE), mmap.PROT_READ | mmap.PROT_WRITE)


def first(data: bytes, wanted: bytes, at: int, end: int) -> int:
    return next((place for place in range(at, end) if data[place] in wanted), end)


@pytest.mark.parametrize("seed", range(4))
def test_ends_are_found_where_they_are(edge: np.ndarray, seed: int) -> None:
    chance = random.Random(seed)
    alphabet = (bytes(range(256)), b"\x00\x01\x02\x03\x80\x81\x82a", b"ab\x02", b"abc\x03\x04\x7f")[seed]
    for size in _SIZES:
        for _ in range(20):
            data = bytes(chance.choices(alphabet, k=size))
            buf = edge[_PAGE - size :]
            buf[:] = np.frombuffer(data, np.uint8)
            at = chance.randint(0, size)
            end = chance.randint(at, size)
            assert word_searches(buf, at, end) == (
                first(data, b"\0\1\2", at, end),
                first(data, b"\1\2", at, end),
                first(data, b"\2", at, end),
                data[at:end].isascii(),
            ), (seed, data, at, end)


def test_one_byte_that_differs_is_seen_anywhere(edge: np.ndarray) -> None:
    for size in _SIZES[:-1]:
        other = np.frombuffer(bytes(range(1, size + 1)), np.uint8)
        buf = edge[_PAGE - size :]
        buf[:] = other
        assert word_comparison(buf, 0, other, 0, size)
        for place in range(size):
            buf[place] ^= 0x80
            assert not word_comparison(buf, 0, other, 0, size), (size, place)
            assert word_comparison(buf, 0, other, 0, place)
            assert word_comparison(buf, place + 1, other, place + 1, size - place - 1)
            buf[place] ^= 0x80


def test_numbers_are_big_endian_and_signed(edge: np.ndarray) -> None:
    for data in (b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8", b"\x01\x02\x03\x04\x05\x06\x07\x08"):
        edge[-8:] = np.frombuffer(data, np.uint8)
        expected = tuple(int.from_bytes(data[:size], "big", signed=True) for size in (2, 4, 8))
        assert word_loads(edge, _PAGE - 8) == expected
        edge[-8:] = 0
        word_stores(edge, _PAGE - 8, expected[2], 8)
        assert edge[-8:].tobytes() == data
        word_stores(edge, _PAGE - 6, expected[2], 2)
        word_stores(edge, _PAGE - 4, expected[2], 4)
        assert edge[-8:].tobytes() == data[:2] + data[6:] + data[4:]


def reason(data: bytes) -> int:
    """The rules of properties, plainly."""
    at = 0
    while at < len(data):
        name = first(data, b"\0\1\2", at, len(data))
        if name == at or data[name : name + 1] != b"\1":
            return codes.REASON_PROPERTIES
        if data[at:name] in {one.encode() for one in FORBIDDEN_PROPERTIES}:
            return codes.REASON_FORBIDDEN_PROPERTY
        value = first(data, b"\1\2", name + 1, len(data))
        if bytes(512) in data[name + 1 : value]:
            return codes.REASON_ZEROS
        if value == name + 1 or data[value : value + 1] != b"\2":
            return codes.REASON_PROPERTIES
        at = value + 1
    try:
        data.decode()
    except UnicodeDecodeError:
        return codes.REASON_UTF8
    return codes.OK


def test_properties_are_judged_as_their_rules_say(edge: np.ndarray) -> None:
    chance = random.Random(7)
    names, ends = forbidden_names()
    pieces = [
        *FORBIDDEN_PROPERTIES,
        "TAGS",
        "KEYS",
        "DELAX",
        "a",
        "name of some length",
        "\u00fc",
        "\u6d88\u606f",
        "\U0001f600",
    ]
    seen = set()
    for _ in range(3000):
        data = bytearray()
        for _ in range(chance.randint(0, 4)):
            data += chance.choice(pieces[-8:] if chance.random() < 0.9 else pieces).encode() + b"\x01"
            data += (
                chance.choice(pieces) * chance.randint(1, 3) + "\0" * chance.choice((0, 0, 0, 9, 511, 512))
            ).encode() + b"\x02"
        if data and chance.random() < 0.4:
            data[chance.randrange(len(data))] = chance.choice((0, 1, 2, 0x41, 0x80, 0xC0, 0xED, 0xFF))
        buf = edge[_PAGE - len(data) :]
        buf[:] = np.frombuffer(bytes(data), np.uint8)
        expected = reason(bytes(data))
        seen.add(expected)
        assert properties_reason(buf, 0, len(data), names, ends) == expected, bytes(data)
    assert seen == {
        codes.OK,
        codes.REASON_PROPERTIES,
        codes.REASON_FORBIDDEN_PROPERTY,
        codes.REASON_UTF8,
        codes.REASON_ZEROS,
    }
    for name in FORBIDDEN_PROPERTIES:
        data = bytearray(name.encode() + b"\x01v\x02")
        assert properties_reason(np.frombuffer(bytes(data), np.uint8), 0, len(data), names, ends) == (
            codes.REASON_FORBIDDEN_PROPERTY
        )
