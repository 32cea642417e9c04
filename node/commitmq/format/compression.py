"""Compressed bodies: compresses and decompresses them as the sysFlag says (spec 2.3, 12.11).

    0x001         the body is compressed
    0x000         … with zlib, by clients too old to name the kind
    0x100 LZ4     LZ4 frame, independent blocks: what lz4-java's frame streams read and write
    0x200 ZSTD    zstandard frame
    0x300 ZLIB    zlib

The store never compresses; producers and consumers do. lz4 and zstandard are optional packages.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Final

from commitmq.errors import InvalidMessageError, MissingExtraError
from commitmq.format.constants import SysFlag

_ZLIB_LEVEL: Final = 5
_DEFAULT_MAX_BYTES: Final = 256 * 1024 * 1024

_FLAGS: Final = {
    "zlib": SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZLIB,
    "lz4": SysFlag.COMPRESSED | SysFlag.COMPRESSION_LZ4,
    "zstd": SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZSTD,
}
KINDS: Final = tuple(_FLAGS)


# kind -> its name in messages, and the package it needs.
_PACKAGES: Final = {"lz4": ("LZ4", "lz4"), "zstd": ("ZSTD", "zstandard")}


class CompressionUnavailableError(MissingExtraError):
    """The body needs a package that is not installed."""


def compression_flags(kind: str) -> int:
    """sysFlag bits of a body compressed with ``kind``. Raises ValueError for an unknown kind, and
    CompressionUnavailableError for a kind whose package is not installed: the caller is about to use it.
    """
    flags = _flags(kind)
    if kind == "lz4":
        _lz4()
    elif kind == "zstd":
        _zstandard()
    return flags


def _flags(kind: str) -> int:
    try:
        return _FLAGS[kind]
    except KeyError:
        raise ValueError(f"compression must be one of {', '.join(KINDS)}, not {kind!r}") from None


def _unavailable(kind: str) -> CompressionUnavailableError:
    name, package = _PACKAGES[kind]
    return CompressionUnavailableError(
        f"{name} bodies need the package {package}: pip install 'commitmq[compression]'", name=package
    )


def compress(body: bytes, kind: str) -> bytes:
    """``body`` compressed with ``kind`` (zlib, lz4, zstd). Raises ValueError or CompressionUnavailableError."""
    _flags(kind)
    if kind == "zlib":
        return zlib.compress(body, _ZLIB_LEVEL)
    if kind == "lz4":
        # Java's reader knows independent blocks only, and lz4-java's writer omits the content size.
        frame = _lz4()
        return bytes(frame.compress(body, block_linked=False, store_size=False, block_size=frame.BLOCKSIZE_MAX4MB))
    return bytes(_zstandard().ZstdCompressor().compress(body))


def decompress(body: bytes, sys_flag: int, *, max_bytes: int = _DEFAULT_MAX_BYTES) -> bytes:
    """The original of a stored ``body``: the body itself unless ``sys_flag`` says it is compressed.

    Raises InvalidMessageError for damaged data or more than ``max_bytes`` (a small body can claim gigabytes), and
    CompressionUnavailableError when the package for its kind is missing.
    """
    if not sys_flag & SysFlag.COMPRESSED:
        return body
    kind = sys_flag & SysFlag.COMPRESSION_MASK
    if kind in (0, SysFlag.COMPRESSION_ZLIB):
        decode: Callable[[bytes, int], tuple[bytes, bool]] = _decode_zlib
    elif kind == SysFlag.COMPRESSION_LZ4:
        decode = _decode_lz4
    elif kind == SysFlag.COMPRESSION_ZSTD:
        decode = _decode_zstd
    else:
        raise InvalidMessageError(f"sysFlag {sys_flag:#x} names an unknown compression")
    data, whole = decode(body, max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidMessageError(f"the body decompresses to more than the {max_bytes} bytes allowed")
    if not whole:
        raise InvalidMessageError(f"the compressed body is cut short (sysFlag {sys_flag:#x})")
    return data


# Each decoder returns at most ``limit`` bytes, and whether the compressed data ended properly.


def _decode_zlib(body: bytes, limit: int) -> tuple[bytes, bool]:
    decoder = zlib.decompressobj()
    try:
        return decoder.decompress(body, limit), decoder.eof
    except zlib.error as error:
        raise _damaged("zlib", error) from error


def _decode_lz4(body: bytes, limit: int) -> tuple[bytes, bool]:
    decoder = _lz4().LZ4FrameDecompressor()
    try:
        return decoder.decompress(body, max_length=limit), decoder.eof
    except (RuntimeError, EOFError) as error:
        raise _damaged("LZ4", error) from error


def _decode_zstd(body: bytes, limit: int) -> tuple[bytes, bool]:
    module = _zstandard()
    try:
        data: bytes = module.ZstdDecompressor().stream_reader(body).read(limit)
        if len(data) == limit:
            return data, False
        # A stream reader takes the end of its input for the end of the frame. Where the frame does not state its size
        # (Java writes it as a stream), only a second pass, now known to be small, can tell whether the frame ended.
        size = module.frame_content_size(body)
        if size >= 0:
            return data, size == len(data)
        decoder = module.ZstdDecompressor().decompressobj()
        decoder.decompress(body)
        return data, bool(decoder.eof)
    except module.ZstdError as error:
        raise _damaged("ZSTD", error) from error


def _damaged(kind: str, error: Exception) -> InvalidMessageError:
    return InvalidMessageError(f"the body is no valid {kind} data: {error}")


def _lz4() -> ModuleType:
    try:
        import lz4.frame
    except ImportError:
        raise _unavailable("lz4") from None
    module: ModuleType = lz4.frame
    return module


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise _unavailable("zstd") from None
    return zstandard
