"""From where a client comes: what limits for one address count as one address."""

from __future__ import annotations

import ipaddress


def place_of(host: str) -> str:
    """An IPv4 address as it is, an IPv6 address as its /64, of which one machine may have any address."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host
