"""Whether a server takes TLS beside, or instead of, plain connections."""

from __future__ import annotations

from commitmq_plugins.rocketmq.doctor.finding import Finding, Report, State
from commitmq_plugins.rocketmq.doctor.peer import Peer
from commitmq_plugins.rocketmq.remoting.errors import RemotingError


async def examine_tls(peer: Peer, report: Report) -> None:
    """Report it. With TLS everything else is encrypted already."""
    if peer.terms.tls:
        report(Finding(State.OK, "TLS", peer.address, "this connection is encrypted; its certificate is not checked"))
        return
    try:
        version = await peer.tls_version()
    except (OSError, RemotingError):
        report(Finding(State.OK, "TLS", peer.address, "plain connections only"))
        return
    report(Finding(State.OK, "TLS", peer.address, f"plain connections, and {version}"))
