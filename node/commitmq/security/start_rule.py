"""The start rule: nobody on a network meets a node that lets everybody in.

A listener on another address than loopback needs both: it asks each client who it is, and every connection is encrypted.
Otherwise the node does not start, unless ``security.insecure_listeners`` names the listener; then ``status`` shows it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

NATIVE: Final = "native"
"""The listener of the node's own protocol: all its tcp ports."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A server's address. ``name``: as in ``security.insecure_listeners``. ``encrypts``: every connection; false where clients
    may also connect without. ``asks``: each client must prove who it is; with ``open_without_users`` once the node has users.

    ``ports``: a start is refused when another process of the node is given one of them, and with ``is_vital`` when another
    program has one. ``setting``: the key that chooses the first of them.

    ``remedy``: what helps beside loopback and the word, for the sentence that refuses a start; empty where nothing does.
    """

    name: str
    host: str
    encrypts: bool = False
    asks: bool = False
    open_without_users: bool = False
    ports: tuple[int, ...] = ()
    setting: str = ""
    remedy: str = ""
    is_vital: bool = False

    def authenticates(self, *, has_users: bool) -> bool:
        """Whether each client must prove who it is."""
        return self.asks and (has_users or not self.open_without_users)


def is_loopback(host: str) -> bool:
    """True when only programs on this machine can reach ``host``."""
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    if not host or host == "*":
        return False
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False  # an interface's name, or nothing: assume the world
    return all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


def exposed(listeners: Iterable[Listener], *, has_users: bool) -> list[Listener]:
    """Those that a network reaches, and that let everybody in or do not encrypt."""
    return [
        one
        for one in listeners
        if not (one.encrypts and one.authenticates(has_users=has_users)) and not is_loopback(one.host)
    ]


def allowed_names(setting: str) -> frozenset[str]:
    """The names in ``security.insecure_listeners``."""
    return frozenset(one.strip() for one in setting.replace(",", ";").split(";") if one.strip())


def lacks(listener: Listener, *, has_users: bool) -> str:
    """``WITHOUT AUTHENTICATION OR ENCRYPTION``: what an exposed listener lacks."""
    found = [
        *([] if listener.authenticates(has_users=has_users) else ["AUTHENTICATION"]),
        *([] if listener.encrypts else ["ENCRYPTION"]),
    ]
    return f"WITHOUT {' OR '.join(found)}"


def warning(listener: Listener, *, has_users: bool) -> str:
    """The sentence of ``status`` about an exposed listener that is allowed."""
    return (
        f"the listener {listener.name} is open on {listener.host} {lacks(listener, has_users=has_users)}: everyone who reaches"
        " that address can use it (security.insecure_listeners)"
    )


def refusal(listeners: Iterable[Listener], allowed: Collection[str], *, has_users: bool) -> str:
    """The sentence that refuses the start; empty when the rule holds."""
    wrong = [one for one in exposed(listeners, has_users=has_users) if one.name not in allowed]
    if not wrong:
        return ""
    named = "; ".join(f"{one.name} on {one.host} {lacks(one, has_users=has_users)}" for one in wrong)
    remedies = "".join(f", or {one.remedy}" for one in wrong if one.remedy)
    word = ";".join([*sorted(allowed), *(one.name for one in wrong)])
    return (
        f"this node would listen for everyone on a network: {named}. Keep it on loopback (127.0.0.1){remedies}, or say that it"
        f" is meant so: --set 'security.insecure_listeners={word}' (docs/security.md)"
    )
