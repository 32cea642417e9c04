"""Identifiers of messages (spec 2.10).

    offset message id   store address (4 or 16 bytes) + port i4 + physical offset i8: 32 or 56 upper-case hex digits
    unique id           address (4) + pid i2 + process hash i4 + ms since the start of the month i4 + counter i2: 32

The first names a place in one node's log; the second is made by a producer and is opaque to the store.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import struct
import time
import weakref
from functools import lru_cache

from commitmq.store.format import Host

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
    """``(host, physical offset)`` of an offset message id. Raises ValueError when it is none."""
    if len(message_id) not in (32, 56):
        raise ValueError(f"an offset message id has 32 or 56 hex digits, not {len(message_id)}: {message_id!r}")
    try:
        data = bytes.fromhex(message_id)
    except ValueError as error:
        raise ValueError(f"an offset message id has hex digits only: {message_id!r}") from error
    if 2 * len(data) != len(message_id):  # fromhex skips white space
        raise ValueError(f"an offset message id has hex digits only: {message_id!r}")
    return unpack_host(data[:-8]), int.from_bytes(data[-8:], "big", signed=True)


class UniqueIdGenerator:
    """Makes unique ids; one object may be used by all threads of a process.

    Uniqueness rests on the random process hash, the millisecond and a 16-bit counter: a process would have to make
    65,536 ids within one millisecond to repeat one. A forked child gets a hash of its own.
    """

    def __init__(self) -> None:
        self._month_start_ms = 0
        self._month_end_ms = 0
        # next() on an itertools.count is one bytecode into C, so threads share it without a lock.
        self._counter = itertools.count()
        self._reseed()
        _generators.add(self)

    def _reseed(self) -> None:
        head = _local_address() + struct.pack(">H", os.getpid() & 0xFFFF) + secrets.token_bytes(4)
        self._prefix = head.hex().upper()

    def next(self) -> str:
        """One id of 32 upper-case hex digits."""
        now_ms = time.time_ns() // 1_000_000
        if not self._month_start_ms <= now_ms < self._month_end_ms:
            self._month_start_ms, self._month_end_ms = _month_bounds_ms(now_ms)
        return f"{self._prefix}{now_ms - self._month_start_ms:08X}{next(self._counter) & 0xFFFF:04X}"

    def take(self, count: int) -> list[str]:
        """``count`` ids at once, for a batch."""
        return [self.next() for _ in range(count)]


_generators: weakref.WeakSet[UniqueIdGenerator] = weakref.WeakSet()


def _reseed_all() -> None:
    for generator in _generators:
        generator._reseed()


os.register_at_fork(after_in_child=_reseed_all)


def _month_bounds_ms(now_ms: int) -> tuple[int, int]:
    now = time.localtime(now_ms / 1000)
    start = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((now.tm_year, now.tm_mon + 1, 1, 0, 0, 0, 0, 0, -1))
    return int(start * 1000), int(end * 1000)


def _local_address() -> bytes:
    """The address other hosts see, or random bytes without a network. Connecting a UDP socket sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return socket.inet_aton(probe.getsockname()[0])
    except OSError:
        return secrets.token_bytes(4)
