"""Where a message was born: the address of the peer that sent it, as the record has it."""

from __future__ import annotations

import ipaddress
from typing import Any, Final

import zmq

from commitmq.format.message_id import pack_host
from commitmq.format.record import Host
from commitmq.network.guard import Guard
from commitmq.security.on_behalf import Vouching
from commitmq.workers.writer.local_sockets import Frames, Payload, Peer
from commitmq.workers.writer.send_checks import Refusal

_MAX_KNOWN_PEERS: Final = 65_536
MAX_CLIENT_CHARACTERS: Final = 255


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


def keeps_hosts(header: dict[str, Any], name: str, frame: zmq.Frame | Payload) -> bool:
    """True for a run of one of the node's own movers or gateways. ``header[name]``, 4 or 6, says how its born hosts
    are laid out.

    They come over ipc, whose sockets are in a folder that only the node's account may enter. Raises Refusal.
    """
    if peer_address(frame) is not None or "producer_id" in header:
        raise Refusal("NO_PERMISSION", f"only a process of this node may append with {name}")
    if header[name] not in (4, 6):
        raise Refusal("INVALID_PARAMETER", f"{name} must be 4 or 6")
    return True


def user_of(guard: Guard | None, vouching: Vouching, header: dict[str, Any], frames: Frames) -> str | None:
    """Whose quotas hold for a send: its user, whom ``guard`` knows, or the one on whose behalf a process of the node sends;
    None for nobody's.
    """
    if guard is not None and (known := guard.user_of(frames[0])):
        return known
    return vouching.user(header)


def client_of(identity: Peer, header: dict[str, Any], frame: zmq.Frame | Payload) -> Peer | str:
    """For whose rates a send counts: the connection, or the ``client`` for which one of the node's gateways sends.

    Raises Refusal for a ``client`` that comes from elsewhere.
    """
    name = header.get("client")
    if name is None:
        return identity
    if peer_address(frame) is not None:
        raise Refusal("NO_PERMISSION", "only a process of this node may send for another client")
    if type(name) is not str or not 0 < len(name) <= MAX_CLIENT_CHARACTERS:
        raise Refusal("INVALID_PARAMETER", f"client must be a string of 1 to {MAX_CLIENT_CHARACTERS} characters")
    return name
