"""The addresses behind the host name of an endpoint: a client tries one after the other until one takes its connection.

ZeroMQ itself takes the first address of a name, and IPv4 alone unless it is told otherwise. So ``localhost`` would never lead
to a node that listens on ``::1``, nor any name to a host of which one address is out of reach.
"""

from __future__ import annotations

import socket
from typing import Final

import zmq

_REFUSED_S: Final = 0.2
_SILENT_S: Final = 0.25
_MOST_DOUBLINGS: Final = 4
_MOST_ENDPOINTS: Final = 4_096

# By endpoint: the address that the last connection came to. A further one begins there.
_first: dict[str, str] = {}


class NameAddresses:
    """Of one connection. Not thread-safe. A name is looked up again after each round: its host may be elsewhere by then."""

    __slots__ = ("_addresses", "_at", "_has_stood", "_is_reached", "_is_refused", "_rounds", "_since_s", "endpoint")

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._addresses: list[str] = []
        self._at = self._rounds = -1
        self._is_reached = self._is_refused = self._has_stood = False
        self._since_s = 0.0

    @staticmethod
    def has_name(endpoint: str) -> bool:
        """Whether the host of ``endpoint`` is a name; else it is an address, or a file."""
        if not endpoint.startswith("tcp://") or "[" in endpoint:
            return False
        host, _, _ = endpoint.removeprefix("tcp://").rpartition(":")
        return not host.replace(".", "").isdigit()

    def next(self, now_s: float) -> str:
        """The endpoint to try from now on, with an address; with the name itself when it has none, which ZeroMQ reports."""
        self._at += 1
        if self._at >= len(self._addresses):
            self._addresses, self._at = self._look_up(), 0
            self._rounds += 1
        self._since_s, self._is_reached, self._is_refused = now_s, False, False
        self._remember(self._at)
        return self._addresses[self._at]

    def is_over(self, now_s: float) -> bool:
        """Whether it is time for the next address: this one refused the connection, or is silent."""
        if self._is_reached:
            return False
        passed_s = now_s - self._since_s
        if self._is_refused:
            return not self._rounds or passed_s >= _REFUSED_S
        # The way to a host may be long: each round has more patience than the one before.
        return passed_s >= _SILENT_S * (1 << min(self._rounds, _MOST_DOUBLINGS))

    def note(self, event: int) -> bool:
        """Take note of an event of ZeroMQ's monitor. True when it says nothing else."""
        if event == zmq.EVENT_CONNECTED:
            self._is_reached = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._is_refused, self._is_reached = True, False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_stood = True
        elif event == zmq.EVENT_DISCONNECTED and not self._has_stood:
            self._remember(self._at + 1)  # another program has this port of this address
        return event in (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_RETRIED)

    def _remember(self, at: int) -> None:
        if len(_first) >= _MOST_ENDPOINTS:
            _first.clear()
        _first[self.endpoint] = self._addresses[at % len(self._addresses)]

    def _look_up(self) -> list[str]:
        """From the address on that the last connection came to; IPv4 before IPv6 otherwise, as most nodes listen."""
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return [self.endpoint]
        found.sort(key=lambda one: one[0] != socket.AF_INET)
        hosts = dict.fromkeys(str(one[4][0]) for one in found)
        addresses = [f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in hosts]
        first = _first.get(self.endpoint, "")
        at = addresses.index(first) if first in addresses else 0
        return [*addresses[at:], *addresses[:at]] or [self.endpoint]
