"""Whose is the other end of a TCP connection within this host: the kernel's table of connections says it (proc(5)).

    sl  local_address rem_address   st tx_queue:rx_queue tr:tm->when retrnsmt   uid  timeout inode …
     0: 0100007F:1C8E 0100007F:D2F0 01 00000000:00000000 00:00000000 00000000  1000        0 12345 …

The line of the peer's end has its address first. Addresses are words of four bytes in the machine's order, ports are numbers.
Of a tunnel it is the account of the tunnel's end here.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from typing import Final

UNKNOWN_ACCOUNT: Final = -1
"""Nobody has asked yet."""
NO_ACCOUNT: Final = -2
"""The connection comes from elsewhere, or the kernel does not tell."""

_UID: Final = 7
_TABLES: Final = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}


def account_of_peer(connected: socket.socket) -> int:
    """The uid of the process at the other end over loopback, else NO_ACCOUNT. Raises OSError when the connection has ended."""
    peer, own = connected.getpeername(), connected.getsockname()
    address = ipaddress.ip_address(peer[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_loopback:
        return NO_ACCOUNT
    wanted = [_written(peer), _written(own)]
    # A client with a socket of IPv4 stands in the other table.
    tables = {_TABLES[connected.family]: wanted}
    if mapped is not None:
        tables[_TABLES[socket.AF_INET]] = [one[24:] for one in wanted]
    for path, ends in tables.items():
        with open(path, encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if fields[1:3] == ends:
                    return int(fields[_UID])
    return NO_ACCOUNT


def _written(end: tuple[str, int]) -> str:
    """An address and its port as they stand in the table."""
    packed = ipaddress.ip_address(end[0]).packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{one:08X}' for one in words)}:{end[1]:04X}"
