"""Addresses of name servers and brokers, and the traps in those that a name server gives to clients. Pure."""

from __future__ import annotations

import ipaddress
from typing import Final

from commitmq_plugins.rocketmq.doctor.finding import State
from commitmq_plugins.rocketmq.remoting.errors import RemotingError

NAMESRV_PORT: Final = 9876
_CONTAINERS: Final = ipaddress.ip_network("172.16.0.0/12")
_SAME_NETWORK_BITS: Final = 16
ADVICE: Final = "set the address for clients: plugins.rocketmq.advertised_host, in RocketMQ brokerIP1"

Judgement = tuple[State, str]
_IP = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressError(RemotingError):
    """A text that is no ``host:port``."""


def parse(text: str, port: int | None = None) -> tuple[str, int]:
    """Host and port; ``port`` is for a text without one. Raises AddressError."""
    host, colon, digits = text.strip().rpartition(":")
    if not colon and port is not None:
        host, digits = digits, str(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not digits.isdecimal() or not digits.isascii() or not 0 < int(digits[:6]) <= 65_535:
        raise AddressError(f"{text!r:.100} is no address host:port")
    return host, int(digits)


def parse_all(text: str) -> list[tuple[str, int]]:
    """Name servers, with semicolons or commas between them. Raises AddressError."""
    return [parse(one, NAMESRV_PORT) for one in text.replace(",", ";").split(";") if one.strip()]


def judge(host: str, seen: str | None) -> Judgement:
    """Whether clients can use ``host``, a broker's address. ``seen`` is the IP at which the name server was reached."""
    try:
        address = _plain(ipaddress.ip_address(host))
    except ValueError:
        return State.WARNING, f"{host} is a host name: message ids hold an IP, so look-ups by id may go elsewhere"
    place = None if seen is None else _plain(ipaddress.ip_address(seen.partition("%")[0]))
    if address.is_unspecified:
        return State.FAILED, f"{host} is no address: clients on other machines connect to themselves"
    if address.is_loopback:
        if place is None or place.is_loopback:
            return State.OK, f"{host} is for clients on this machine only"
        return State.FAILED, f"{host} leads each client to its own machine"
    if address.is_link_local:
        return State.WARNING, f"{host} is valid on one network link only"
    if address in _CONTAINERS and (place is None or not _are_neighbours(address, place)):
        return State.WARNING, f"{host} looks like an address inside of a container or a virtual network"
    if address.is_private and place is not None and place.is_global:
        return State.WARNING, f"{host} is private, and the name server's address {seen} is public"
    return State.OK, f"{host} is an address that clients elsewhere may use"


def _plain(address: _IP) -> _IP:
    """An IPv4 address that is mapped into IPv6 counts as IPv4."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _are_neighbours(one: _IP, other: _IP) -> bool:
    shift = one.max_prefixlen - _SAME_NETWORK_BITS
    return one.version == other.version and int(one) >> shift == int(other) >> shift
