"""Goal: bodies of every compression kind come back whole, and damaged ones are a typed error, never a wrong body.

Method: round trips, RocketMQ's golden bodies, and frames that were cut or changed.
"""

from __future__ import annotations

import io
import sys
import zlib

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from commitmq import Producer
from commitmq.errors import InvalidMessageError, MissingExtraError
from commitmq.format.compression import KINDS, CompressionUnavailableError, compress, compression_flags, decompress
from golden_stores import GoldenStore


@given(st.binary(max_size=3000), st.sampled_from(KINDS))
def test_round_trip(body: bytes, kind: str) -> None:
    assert decompress(compress(body, kind), compression_flags(kind)) == body


def test_flags() -> None:
    assert [compression_flags(kind) for kind in ("zlib", "lz4", "zstd")] == [0x301, 0x101, 0x201]
    with pytest.raises(ValueError, match="gzip"):
        compression_flags("gzip")
    with pytest.raises(InvalidMessageError, match="0x701"):
        decompress(b"x", 0x701)


def test_a_body_that_is_not_compressed_is_itself() -> None:
    assert decompress(b"plain", 0x300) == b"plain"


def test_legacy_flag_is_zlib() -> None:
    assert decompress(zlib.compress(b"old"), 0x001) == b"old"


def test_zlib_level_is_rocketmqs() -> None:
    assert compress(b"a" * 2500, "zlib")[:2] == bytes.fromhex("785e")


def test_golden_bodies(golden: GoldenStore) -> None:
    compressed = [message for message in golden.messages if message["sys_flag"] == 0x301]
    assert len(compressed) == 15
    for message in compressed:
        stored = bytes.fromhex(message["body_hex"])
        body = decompress(stored, message["sys_flag"])
        assert len(body) == 2500
        assert len(set(body)) == 1
        assert compress(body, "zlib") == stored


def test_lz4_frames_are_what_java_reads() -> None:
    """lz4-java refuses linked blocks, and writes frames without the content's size."""
    info = lz4.frame.get_frame_info(compress(b"x" * 100_000, "lz4"))
    assert info["block_linked"] is False
    assert info["content_size"] == 0
    streamed = lz4.frame.compress(b"y" * 9_000_000, block_linked=False, store_size=False)
    assert decompress(streamed, 0x101) == b"y" * 9_000_000


def test_zstd_frames_without_a_size() -> None:
    """Java writes a stream, whose frame header does not say how long the content is."""
    target = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(target, closefd=False) as writer:
        writer.write(b"z" * 500_000)
    assert zstandard.frame_content_size(target.getvalue()) == -1
    assert decompress(target.getvalue(), 0x201) == b"z" * 500_000
    with pytest.raises(InvalidMessageError):
        decompress(target.getvalue()[:-3], 0x201)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused(kind: str) -> None:
    good = compress(bytes(range(256)) * 40, kind)
    with pytest.raises(InvalidMessageError):
        decompress(good[:-5], compression_flags(kind))
    with pytest.raises(InvalidMessageError):
        decompress(b"\x00garbage" + good, compression_flags(kind))
    with pytest.raises(InvalidMessageError):
        decompress(b"", compression_flags(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_refused(kind: str) -> None:
    bomb = compress(bytes(50_000_000), kind)
    assert len(bomb) < 250_000
    with pytest.raises(InvalidMessageError, match="more than the 1000000 bytes"):
        decompress(bomb, compression_flags(kind), max_bytes=1_000_000)
    assert len(decompress(bomb, compression_flags(kind), max_bytes=50_000_000)) == 50_000_000


@pytest.mark.parametrize(("kind", "module"), [("lz4", "lz4"), ("zstd", "zstandard")])
def test_a_missing_package_is_named(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = compression_flags(kind)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.frame", None)
    with pytest.raises(CompressionUnavailableError, match=r"commitmq\[compression\]") as caught:
        decompress(b"x", flags)
    assert isinstance(caught.value, MissingExtraError)
    assert caught.value.name == module
    with pytest.raises(CompressionUnavailableError, match=r"commitmq\[compression\]"):
        compress(b"x", kind)
    with pytest.raises(MissingExtraError, match=r"commitmq\[compression\]"):
        Producer("tcp://127.0.0.1:9", compress=kind)
