"""The two identifiers of a message (spec 2.10).

The offset message id names a place in one node's log:

    store address (4 or 16 bytes) + port i4 + physical offset i8: 32 or 56 upper-case hex digits

The unique id (the ``UNIQ_KEY`` property) is made by the producer, singly or in blocks for a whole run, see
:class:`UniqueIds`.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from datetime import UTC, datetime
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


MAX_BLOCK = 16_384
ID_BYTES = 32


class UniqueIds:
    """The text form is that of RocketMQ's client (spec 2.10): upper-case hex of

        address 4 | process id 2 | generator 4 | milliseconds since the month began 4 | counter 2

    The address and generator parts are random for each generator, because many containers share one address and one process
    id, and a store treats the id as opaque text. A forked process needs a new generator; the clients ensure that by
    refusing to work in a child.

    An id repeats only when 65,536 of them are drawn within one millisecond; drawing one takes longer than 15 nanoseconds,
    and a block is at most :data:`MAX_BLOCK` ids, whose encoding takes milliseconds.

    A thread-safe source of ids.
    """

    __slots__ = ("_counter", "_lock", "_month_end_ms", "_month_start_ms", "_prefix", "_stamped")

    def __init__(self) -> None:
        address = secrets.token_bytes(4)
        generator = secrets.token_bytes(4)
        self._prefix = (address + (os.getpid() & 0xFFFF).to_bytes(2, "big") + generator).hex().upper()
        self._counter = secrets.randbelow(0x10000)
        self._lock = threading.Lock()
        self._month_start_ms = 0
        self._month_end_ms = 0
        self._stamped = (-1, "")  # a millisecond, and the first 28 characters of its ids

    def next(self) -> str:
        """One id: 32 characters."""
        return self.at(time.time_ns() // 1_000_000)

    def at(self, now_ms: int) -> str:
        """One id drawn at ``now_ms``, for a caller that has just read the clock (milliseconds since 1970)."""
        stamp_ms, start = self._stamped
        with self._lock:
            counter = self._counter
            self._counter = counter + 1
            if stamp_ms != now_ms:
                start = self._start(now_ms)
                self._stamped = (now_ms, start)
        return f"{start}{counter & 0xFFFF:04X}"

    def block(self, count: int) -> tuple[bytes, int]:
        """The common first 28 bytes of ``count`` ids (at most MAX_BLOCK), and the counter of the first id. Id ``i`` is
        ``first 28 bytes + b"%04X" % ((counter + i) & 0xFFFF)``.
        """
        if not 0 < count <= MAX_BLOCK:
            raise ValueError(f"a block has 1 to {MAX_BLOCK} ids, not {count}")
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            counter = self._counter
            self._counter = counter + count
            return self._start(now_ms).encode(), counter & 0xFFFF

    def _start(self, now_ms: int) -> str:
        if not self._month_start_ms <= now_ms < self._month_end_ms:
            self._turn_month(now_ms)
        return f"{self._prefix}{now_ms - self._month_start_ms & 0xFFFFFFFF:08X}"

    def _turn_month(self, now_ms: int) -> None:
        now = datetime.fromtimestamp(now_ms / 1000, UTC)
        start = datetime(now.year, now.month, 1, tzinfo=UTC)
        end = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        self._month_start_ms = int(start.timestamp() * 1000)
        self._month_end_ms = int(end.timestamp() * 1000)
