"""The tcp ports of a node: a fixed block from ``network.port`` on, one port for each process that clients talk to.

    +0         admin: the address that clients are given; it tells them the others
    +1         writer
    +2         coordinator
    +3         cleanup
    +4 +5 +6   dispatchers of ConsumeQueues, index and memory topics
    +7         reader-0; reader-1 to reader-15 take +8 to +22
    +23 ...    dispatchers of plugins, up to +35
    +36 +37    the movers that clients talk to: pop and transaction

With ``network.port=0`` every process takes a free port, and the same port again after its death. The port lies outside
the range from which the kernel serves outgoing connections: otherwise such a connection, even of a client that looks
for this very process, could have it when the process comes back. Nodes whose blocks do not overlap run side by side; a
node without plugins and with one reader needs the first eight, +36 and +37.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from commitmq.config import NodeConfig
from commitmq.security.start_rule import Listener

PORTS: Final = 38
"""Number of ports in a block."""

_OFFSETS: Final = {"admin": 0, "writer": 1, "coordinator": 2, "cleanup": 3, "pop": 36, "transaction": 37}
_FIRST_DISPATCHER: Final = 4
_BUILT_IN_DISPATCHERS: Final = 3
_FIRST_READER: Final = 7
_FIRST_PLUGIN_DISPATCHER: Final = 23
_FREE_PORTS: Final = range(10_240, 60_000)
_ATTEMPTS: Final = 64
_WILDCARDS: Final = {"0.0.0.0", "::"}
_PATIENCE_S: Final = 0.5
_PATIENCE_WITH_SERVERS_S: Final = 5.0


class _ListenPort(NamedTuple):
    host: str
    port: int
    setting: str
    needs: str

    def meets(self, other: _ListenPort) -> bool:
        """Whether both cannot be listened on, as far as the names of their hosts are known."""
        if self.port != other.port:
            return False
        ours, theirs = ({str(one[4][0]) for one in _addresses(each.host, each.port)} for each in (self, other))
        return bool(ours & theirs or (ours and theirs and _WILDCARDS & (ours | theirs)))


def configured_port(role: str, config: NodeConfig, slot: int = 0) -> int:
    """The tcp port that the configuration gives ``role``; 0 for a free one, or for a role without a socket. ``slot`` is
    a dispatcher's slot in the control block.
    """
    base = config.network.port
    if base == 0:
        return 0
    if role.startswith("reader-"):
        return base + _FIRST_READER + int(role.removeprefix("reader-"))
    if role.startswith("dispatcher-"):
        at = _FIRST_DISPATCHER if slot < _BUILT_IN_DISPATCHERS else _FIRST_PLUGIN_DISPATCHER - _BUILT_IN_DISPATCHERS
        return base + at + slot
    return base + _OFFSETS[role] if role in _OFFSETS else 0


def port_of(role: str, config: NodeConfig, remembered: Mapping[str, int], slot: int = 0) -> int:
    """The tcp port for ``role``: the configured one, else its previous free one, else 0."""
    return configured_port(role, config, slot) or remembered.get(role, 0)


def candidates() -> list[int]:
    """Ports to try, in this order, when the configuration names none; empty: the kernel may choose. Each call draws
    them again, so that nodes that start together do not try the same ones.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first, last = map(int, file.read().split())
    except (OSError, ValueError):
        return []
    outside = [port for port in _FREE_PORTS if not first <= port <= last]
    return random.SystemRandom().sample(outside, min(_ATTEMPTS, len(outside)))


def tcp_port(endpoints: Iterable[str]) -> int:
    """The tcp port among ``endpoints``, 0 when there is none."""
    for endpoint in endpoints:
        _, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and port.isdecimal():
            return int(port)
    return 0


def advertised(endpoints: Iterable[str], config: NodeConfig) -> list[str]:
    """``endpoints`` as clients get them: with ``network.advertised_host`` if it is set."""
    host = config.network.advertised_host
    if not host:
        return list(endpoints)
    host = f"[{host}]" if ":" in host else host
    return [
        f"tcp://{host}:{endpoint.rpartition(':')[2]}" if endpoint.startswith("tcp://") else endpoint
        for endpoint in endpoints
    ]


def in_use(port: int, role: str, config: NodeConfig) -> str:
    """The sentence for a port that ``role`` needs and that another program has."""
    base = config.network.port
    who, needs = holder_of(port), "admin socket" if role == "admin" else role
    taken = f"port {port} is in use by {who or 'another program'}, and this node's {needs} needs it"
    if base == 0:
        return f"{taken}, as it had it before"
    place = "network.port itself" if port == base else f"network.port + {port - base}"
    return (
        f"{taken} ({place}; a node takes some of the ports {base} to {base + PORTS - 1}). End that program, or choose another"
        " block with --set network.port=PORT"
    )


def first_in_use(wanted: Iterable[tuple[str, int]], config: NodeConfig) -> str:
    """The sentence for the lowest port of ``wanted`` (roles and their slots) that another program has; "" when all are
    free. A node that is just ending is waited for.
    """
    for port, role in sorted((configured_port(name, config, slot), name) for name, slot in wanted):
        deadline = time.monotonic() + _PATIENCE_S
        while port and not is_free(config.network.host, port):
            if time.monotonic() >= deadline:
                return in_use(port, role, config)
            time.sleep(0.02)
    return ""


def clash(listeners: Iterable[Listener], wanted: Iterable[tuple[str, int]], config: NodeConfig) -> str:
    """The sentence for the first port that two settings assign: to a server of ``listeners``, and to a process of the node
    (``wanted``: roles and their slots) or to another server; "" when there is none.
    """
    base, taken = config.network.port, list[_ListenPort]()
    for name, slot in wanted:
        if port := configured_port(name, config, slot):
            needs = "the admin socket" if name == "admin" else name
            setting = f"network.port={base}" if port == base else f"network.port={base} (+{port - base})"
            taken.append(_ListenPort(config.network.host, port, setting, needs))
    for listener in listeners:
        main = next(iter(listener.ports), 0)
        for port in filter(None, listener.ports):
            setting = f"{listener.setting}={main}" + (f" ({port - main:+d})" if port != main else "")
            place = _ListenPort(listener.host, port, setting, listener.name)
            for other in taken:
                if other.meets(place):
                    return (
                        f"port {port} is assigned twice: {other.setting} gives it to {other.needs}, and {place.setting} to"
                        f" {place.needs}. Choose another port for one of them (a node takes some of the ports from"
                        f" network.port to +{PORTS - 1})"
                    )
            taken.append(place)
    return ""


def require_free(listeners: Iterable[Listener]) -> str:
    """The sentence for the first port of ``listeners`` that another program has, where they may not do without; "" when all
    are free. A server of this store that is just ending is waited for.
    """
    for listener in listeners:
        for port in listener.ports if listener.is_vital else ():
            deadline = time.monotonic() + _PATIENCE_WITH_SERVERS_S
            while port and not is_free(listener.host, port):
                if time.monotonic() >= deadline:
                    who = holder_of(port) or "another program"
                    return (
                        f"port {port} is in use by {who}, and {listener.name} needs it. End that program, or choose another"
                        f" port with --set {listener.setting}=PORT"
                    )
                time.sleep(0.02)
    return ""


def is_free(host: str, port: int) -> bool:
    """Whether no program listens on ``port`` of ``host`` right now; True where that is unknown."""
    return why_not(host, port) != errno.EADDRINUSE


def why_not(host: str, port: int) -> int:
    """The errno with which the system refuses to listen on ``port`` of ``host`` right now; 0 when it does not refuse."""
    for family, kind, protocol, _, address in _addresses(host, port):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            # As libzmq does: the remains of closed connections do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return error.errno
    return 0


def holder_of(port: int) -> str:
    """``process 4711 (nginx)``: the process that listens on ``port``, as far as the system shows it; else ""."""
    import psutil  # only for this message of a start that failed

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f"process {one.pid} ({psutil.Process(one.pid).name()})"
    return ""


def _addresses(
    host: str, port: int
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    """The addresses of ``network.host`` when it is an address or a name; only libzmq understands an interface's name."""
    host = "0.0.0.0" if host == "*" else host
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # type: ignore[return-value]
    except OSError:
        return []
