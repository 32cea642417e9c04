"""Goal: the account of a client over loopback is what the kernel says, and of one that has gone nothing is told.

Method: connections of this process to itself.
"""

from __future__ import annotations

import os
import socket

import pytest

from commitmq.network.connection import NO_ACCOUNT, account_of_peer


@pytest.mark.parametrize(("listens", "connects"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_the_account_of_the_other_end(listens: str, connects: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    try:
        server = socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::")
    except (OSError, ValueError):
        pytest.skip("this host has no IPv6")
    with server, socket.create_connection((connects, server.getsockname()[1])) as client:
        accepted, _ = server.accept()
        with accepted:
            assert account_of_peer(accepted) == os.getuid()
            accepted.shutdown(socket.SHUT_RDWR)
            client.close()
            with pytest.raises(OSError, match="not connected"):
                account_of_peer(accepted)


def test_a_peer_elsewhere_has_none() -> None:
    class Elsewhere:
        family = socket.AF_INET

        def getpeername(self) -> tuple[str, int]:
            return "10.1.2.3", 77

        def getsockname(self) -> tuple[str, int]:
            return "10.1.2.4", 7310

    assert account_of_peer(Elsewhere()) == NO_ACCOUNT  # type: ignore[arg-type]
