"""Goal: extension units lie on disk as spec 3.8 says, and no address ever leads to another message's unit.

Method: bytes are compared with a plain encoding; small files roll often; random cuts, losses and restarts are compared
with a list of what was appended.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from commitmq.files.fd_cache import FdCache
from commitmq.format import bloom
from commitmq.store.queues.consume_queue_ext import (
    MAX_ADDRESS,
    ConsumeQueueExt,
    ExtensionReader,
    address_of,
    is_address,
    offset_of,
)

FILE_BYTES = 256
Unit = tuple[int, int, bytes]


def plain(units: list[Unit], file_bytes: int = FILE_BYTES) -> tuple[bytes, list[int]]:
    """The files' bytes, one after the other, and the addresses: written a unit at a time, as the rule is told."""
    data = bytearray()
    addresses = []
    for tags_code, timestamp, bitmap in units:
        unit = struct.pack(">hqqh", 20 + len(bitmap), tags_code, timestamp, len(bitmap)) + bitmap
        rest = file_bytes - len(data) % file_bytes
        if len(unit) > rest - 4:
            data += b"\xff\xff".ljust(rest, b"\0")
        addresses.append(len(data) - 2**63)
        data += unit
    return bytes(data), addresses


def put(ext: ConsumeQueueExt, units: list[Unit]) -> list[int]:
    """Append ``units``, whose bit maps have one length."""
    codes = np.array([one[0] for one in units], np.int64)
    times = np.array([one[1] for one in units], np.int64)
    bitmaps = (
        np.frombuffer(b"".join(one[2] for one in units), np.uint8).reshape(len(units), -1) if units[0][2] else None
    )
    addresses: list[int] = ext.append(codes, times, bitmaps).tolist()
    return addresses


def made(rng: random.Random, count: int, bitmap: bool) -> list[Unit]:
    return [
        (rng.randrange(-(2**31), 2**31), rng.randrange(2**41), rng.randbytes(14) if bitmap else b"")
        for _ in range(count)
    ]


def stored(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def opened(folder: Path, file_bytes: int = FILE_BYTES) -> ConsumeQueueExt:
    ext = ConsumeQueueExt(folder, file_bytes, FdCache(8))
    ext.recover()
    return ext


def test_addresses() -> None:
    assert address_of(0) == -(2**63)
    assert offset_of(address_of(12_345)) == 12_345
    assert is_address(-2_147_483_649)
    assert MAX_ADDRESS == -2_147_483_649
    assert not any(is_address(code) for code in (-2_147_483_648, -1, 0, 2_147_483_647, 1_795_229_125_513))


@pytest.mark.parametrize("bitmap", [False, True], ids=["plain", "bit maps"])
def test_bytes_and_rolling(bitmap: bool, tmp_path: Path) -> None:
    rng = random.Random(7)
    units = made(rng, 100, bitmap)
    ext = opened(tmp_path / "q")
    addresses: list[int] = []
    at = 0
    while at < len(units):
        step = rng.randint(1, 30)
        addresses += put(ext, units[at : at + step])
        at += step
    ext.flush()
    data, expected = plain(units)
    assert addresses == expected
    assert stored(tmp_path / "q") == data.ljust(-(-len(data) // FILE_BYTES) * FILE_BYTES, b"\0")
    assert opened(tmp_path / "q").end == ext.end


def test_units_of_different_sizes_follow_each_other(tmp_path: Path) -> None:
    rng = random.Random(3)
    units = [unit for _ in range(20) for unit in made(rng, rng.randint(1, 6), rng.random() < 0.5)]
    ext = opened(tmp_path / "q")
    assert [put(ext, [unit])[0] for unit in units] == plain(units)[1]
    assert opened(tmp_path / "q").end == ext.end


def test_look_ups(tmp_path: Path) -> None:
    """Addresses in any order, from units with and without bit maps, hashes between them, and addresses of nothing."""
    rng = random.Random(5)
    units = [*made(rng, 40, False), *made(rng, 40, True)]
    folder = tmp_path / "ext" / "t" / "0"
    ext = opened(folder)
    addresses = put(ext, units[:40]) + put(ext, units[40:])
    reader = ExtensionReader(tmp_path / "ext", FILE_BYTES, FdCache(2))
    assert reader.resolve("t/0", np.array([0, 5, -7], np.int64)) is None
    nothing = [address_of(ext.end), address_of(10**9), -(2**63) + 1]
    for _ in range(50):
        chosen = [rng.choice([*range(80), None, -1, -2, -3]) for _ in range(rng.randint(1, 60))]
        codes = [77 if one is None else nothing[one] if one < 0 else addresses[one] for one in chosen]
        found = reader.resolve("t/0", np.array(codes, np.int64))
        assert (found is None) == all(one is None for one in chosen)
        if found is None:
            continue
        for row, one in enumerate(chosen):
            if one is None or one < 0:
                assert found.codes[row] == codes[row]
                assert not found.has_bitmap[row]
            else:
                assert found.codes[row] == units[one][0]
                assert found.has_bitmap[row] == (one >= 40)
                assert not units[one][2] or found.bitmaps[row].tobytes() == units[one][2]
    assert np.array_equal(reader.resolve("t/1", np.array(addresses)).codes, addresses)  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(30))
def test_cuts_and_restarts(seed: int, tmp_path: Path) -> None:
    """Whatever is cut and appended in turn, every address that is still pointed to leads to its own unit."""
    rng = random.Random(seed)
    folder = tmp_path / "ext" / "t" / "0"
    ext = opened(folder)
    kept: list[tuple[int, int]] = []  # address and tags code of what a ConsumeQueue would point to
    first = 0
    for _ in range(40):
        match rng.randrange(5):
            case 0 | 1:
                units = made(rng, rng.randint(1, 12), rng.random() < 0.5)
                kept += list(zip(put(ext, units), [one[0] for one in units], strict=True))
            case 2 if len(kept) - first > 2:
                del kept[rng.randint(first + 1, len(kept)) :]
                ext.truncate_behind(kept[-1][0])
            case 3:
                ext.flush()
                ext = opened(folder)
                if kept:
                    ext.truncate_behind(kept[-1][0])
            case _ if kept:
                first = rng.randint(first, len(kept) - 1)
                ext.delete_below(kept[first][0])
    reader = ExtensionReader(tmp_path / "ext", FILE_BYTES, FdCache(2))
    live = kept[first:]
    if live:
        found = reader.resolve("t/0", np.array([address for address, _ in live]))
        assert found is not None
        assert found.codes.tolist() == [code for _, code in live], seed
        files = sorted(int(path.name) for path in folder.iterdir())
        assert files[0] == offset_of(live[0][0]) // FILE_BYTES * FILE_BYTES or len(files) == 1


def test_lost_units_are_never_replaced_by_others(tmp_path: Path) -> None:
    """The files went, the ConsumeQueue still points into them: new units must not come to lie at those addresses."""
    rng = random.Random(1)
    folder = tmp_path / "ext" / "t" / "0"
    old = put(opened(folder), made(rng, 50, False))
    for path in sorted(folder.iterdir())[2:]:
        path.unlink()
    ext = opened(folder)
    ext.truncate_behind(old[-1])
    new = put(ext, made(rng, 50, False))
    assert min(new) > max(old)
    found = ExtensionReader(tmp_path / "ext", FILE_BYTES, FdCache(2)).resolve("t/0", np.array([*old, *new]))
    assert found is not None
    assert found.codes[:50].tolist() == old
    assert all(-(2**31) <= code < 2**31 for code in found.codes[50:].tolist())
    assert opened(folder).end == ext.end


def test_what_a_crash_leaves(tmp_path: Path) -> None:
    """A torn last unit, a file of no size, a file made for nothing: recovered to the last whole unit, the rest zero."""
    rng = random.Random(2)
    units = made(rng, 25, False)
    ext = opened(tmp_path / "q")
    put(ext, units)
    end = ext.end
    last = sorted((tmp_path / "q").iterdir())[-1]
    data = bytearray(last.read_bytes())
    data[end % FILE_BYTES : end % FILE_BYTES + 6] = struct.pack(">h", 9) + b"torn"
    last.write_bytes(data)
    (tmp_path / "q" / f"{int(last.name) + FILE_BYTES:020d}").write_bytes(b"")
    assert opened(tmp_path / "q").end == end
    assert stored(tmp_path / "q") == plain(units)[0].ljust(-(-end // FILE_BYTES) * FILE_BYTES, b"\0")
    assert opened(tmp_path / "q", 512).end == 0, "files of another size are torn"
    assert not any((tmp_path / "q").iterdir())


def test_destroy(tmp_path: Path) -> None:
    ext = opened(tmp_path / "q")
    put(ext, made(random.Random(1), 50, True))
    ext.destroy()
    assert not (tmp_path / "q").exists()


def test_bloom_filter() -> None:
    """Vectors of MurmurHash3 x64 128, from its author's verification and from RocketMQ's classes."""
    assert bloom.murmur3_128(b"") == (0, 0)
    assert bloom.murmur3_128(b"hello") == (0xCBD8A7B341BD9B02, 0x5B1E906A48AE1D19)
    assert bloom.murmur3_128(b"The quick brown fox jumps over the lazy dog") == (0xE34BBC7BBC071B6C, 0x7A433CA9C49A9347)
    for group, topic, places, mask in (
        ("g", "t", [22, 87, 58], "0000400000000004000080000000"),
        ("CID_abc", "Topic_1", [4, 90, 79], "1000000000000000008000040000"),
        ("żółw", "🚀", [48, 34, 11], "0008000004000100000000000000"),
    ):
        assert bloom.positions(group, topic) == places
        assert bloom.mask(group, topic).hex() == mask
