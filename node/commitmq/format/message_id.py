"""Identifiers of messages (spec 2.10).

    offset message id   store address (4 or 16 bytes) + port i4 + physical offset i8: 32 or 56 upper-case hex digits

This id names a place in one node's log. Producers make the other id: see :mod:`commitmq.format.unique_ids`.
"""

from __future__ import annotations

import socket
import struct
from functools import lru_cache

from commitmq.format.constants import Host

_PORT = struct.Struct(">i")


@lru_cache(maxsize=4096)
def pack_host(host: Host) -> bytes:
    """A host as records hold it: 4 or 16 address bytes, then the port as i4 (spec 2.2). Raises OSError for bad text."""
    family = socket.AF_INET6 if ":" in host.ip else socket.AF_INET
    return socket.inet_pton(family, host.ip) + _PORT.pack(host.port)


@lru_cache(maxsize=4096)
def unpack_host(data: bytes) -> Host:
    """Inverse of :func:`pack_host`: 8 bytes are IPv4, 20 are IPv6."""
    family = socket.AF_INET if len(data) == 8 else socket.AF_INET6
    return Host(socket.inet_ntop(family, data[:-4]), _PORT.unpack(data[-4:])[0])


def offset_message_id(ip: str, port: int, physical_offset: int) -> str:
    """The id of the record at ``physical_offset`` bytes in the log of the node ``ip``:``port``."""
    return f"{_host_hex(ip, port)}{physical_offset & 0xFFFFFFFFFFFFFFFF:016X}"


@lru_cache(maxsize=256)
def _host_hex(ip: str, port: int) -> str:
    return pack_host(Host(ip, port)).hex().upper()


def parse_offset_message_id(message_id: str) -> tuple[Host, int]:
    """``(host, physical offset)`` of an offset message id. Raises ValueError for any other text."""
    if len(message_id) not in (32, 56):
        raise ValueError(f"an offset message id has 32 or 56 hex digits, not {len(message_id)}: {message_id!r}")
    try:
        data = bytes.fromhex(message_id)
    except ValueError as error:
        raise ValueError(f"an offset message id has hex digits only: {message_id!r}") from error
    if 2 * len(data) != len(message_id):  # fromhex skips white space
        raise ValueError(f"an offset message id has hex digits only: {message_id!r}")
    return unpack_host(data[:-8]), int.from_bytes(data[-8:], "big", signed=True)
