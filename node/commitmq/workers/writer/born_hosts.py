"""Where a message was born: the address of the peer that sent it, as the record has it."""

from __future__ import annotations

import ipaddress
from typing import Final

import zmq

from commitmq.format.message_id import pack_host
from commitmq.format.record import Host
from commitmq.workers.writer.local_sockets import Payload, Peer

_MAX_KNOWN_PEERS: Final = 65_536


class BornHosts:
    """The encoded born host of each peer. A peer of this machine counts as 127.0.0.1."""

    def __init__(self) -> None:
        self._local = pack_host(Host("127.0.0.1", 0))
        self._peers: dict[Peer, bytes] = {}

    def of(self, identity: Peer, frame: zmq.Frame | Payload) -> bytes:
        """The born host of messages of ``identity``, one of whose frames is ``frame``."""
        host = self._peers.get(identity)
        if host is None:
            if len(self._peers) >= _MAX_KNOWN_PEERS:
                self._peers.clear()
            address = peer_address(frame)
            try:
                host = pack_host(Host(address, 0)) if address else self._local
            except ValueError:
                host = self._local
            self._peers[identity] = host
        return host


def peer_address(frame: zmq.Frame | Payload) -> str | None:
    """The peer's IP address from ZeroMQ; None over ipc. An IPv4 address mapped into IPv6 counts as IPv4."""
    try:
        text = str(frame.get("Peer-Address"))
        address = ipaddress.ip_address(text.partition("%")[0])
    except (zmq.ZMQError, ValueError, KeyError):
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
