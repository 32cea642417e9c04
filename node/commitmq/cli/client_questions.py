"""Questions to RocketMQ's clients, through the node's RocketMQ server: ``group members --stack``, ``client verify``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import click

from commitmq.cli.options import in_turn, timeout_option
from commitmq.cli.output import fail, read_secret
from commitmq.supervision.exit_codes import CliExit

GATEWAY: Final = "rocketmq"
NO_QUESTIONS: Final = "it speaks the node's own protocol, in which clients are asked nothing"
_ROLE: Final = "worker-rocketmq_broker"


question_options = in_turn(
    click.option(
        "--access-key", metavar="USER", help="Ask the RocketMQ server as this user; standard input has the secret."
    ),
    click.option("--tls", is_flag=True, help="Ask the RocketMQ server with TLS. Certificates are not checked."),
    timeout_option(
        5.0, "Seconds to wait for the RocketMQ server, beyond the 10 s that it waits for a client.", least_s=0.05
    ),
)
"""The parameters are called ``access_key``, ``tls`` and ``timeout_s``."""


class Questions:
    """Asks clients through the RocketMQ server of the node that ``admin`` speaks with, at the address ``node``."""

    def __init__(self, admin: Any, node: str, *, access_key: str | None, tls: bool, timeout_s: float) -> None:
        """Exits with a sentence when the node has no such server."""
        from commitmq.cli.main import VERB_PLUGINS

        self._host, self._port = _server(admin, node)
        # The node does not know RocketMQ's protocol; its plugin does, as for the verb `rocketmq`.
        self._asking = import_module(f"{VERB_PLUGINS[GATEWAY]}.doctor")
        keys = None if access_key is None else self._asking.SessionCredentials(access_key, read_secret())
        self._terms = self._asking.PeerOptions(timeout_s, tls, keys)

    def stacks(self, group: str, client_ids: Sequence[str]) -> list[tuple[str | None, str | None]]:
        """For each of these consumers its stack; or None, and the reason."""
        import asyncio

        asked = self._asking.stacks(self._host, self._port, group, client_ids, self._terms)
        return list(asyncio.run(asked))

    def handled(self, group: str, client_id: str, message_id: str) -> tuple[str, str | None, int | None]:
        """What a consumer made of one message: result, remark, milliseconds. Raises CommitMQError."""
        import asyncio

        result, remark, spent_ms = asyncio.run(
            self._asking.handled(self._host, self._port, group, client_id, message_id, self._terms)
        )
        return result, remark, spent_ms


def _server(admin: Any, node: str) -> tuple[str, int]:
    """Host and port of the node's RocketMQ server."""
    from commitmq.protocol.node_address import endpoint_of, node_address

    row = next((one for one in admin.status()["processes"] if one["role"] == _ROLE), None)
    endpoints = [] if row is None else row.get("endpoints") or []
    if not endpoints:
        fail("the node serves no clients of RocketMQ; a start with --rocketmq does", CliExit.FAILURE)
    host, _, port = str(endpoints[0]).removeprefix("tcp://").rpartition(":")
    if host in ("0.0.0.0", "::", "[::]"):  # it listens everywhere: it is where the node is
        asked, _ = endpoint_of(node_address(node))
        host = asked.removeprefix("tcp://").rpartition(":")[0] if asked.startswith("tcp://") else "127.0.0.1"
    return host.strip("[]"), int(port)
