"""Verbs that need the extra ``commitmq[node]``, and the request of a verb to the admin socket of a node."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Final

import click

from commitmq.cli.options import DEFAULT_NODE
from commitmq.cli.output import fail
from commitmq.errors import AuthenticationError, NodeUnavailableError
from commitmq.extras import need_node
from commitmq.protocol.channel import Channel, ConnectionLost
from commitmq.protocol.node_address import endpoint_of, node_address
from commitmq.store.access import lock_holder
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.node_files import read_node_file


class NodeVerb(click.Command):
    """A command that needs the extra ``node``. Without the extra it raises MissingExtraError; its help still works."""

    def invoke(self, ctx: click.Context) -> Any:
        need_node(f"`{ctx.command_path}`")
        return super().invoke(ctx)


_PAUSE_S: Final = 0.1


def address_of(store: Path | None, node: str | None) -> str:
    """The address of the node on ``store``, else ``node``, else the default one. Exits with a sentence when no node runs on
    ``store``.
    """
    if store is None:
        return node or DEFAULT_NODE
    layout = StoreLayout(store.absolute())
    admin = read_node_file(layout).get("admin")
    if not lock_holder(layout.lock) or not admin:
        fail(f"no node runs on the store {layout.root}", CliExit.NODE_UNAVAILABLE)
    return str(admin[1])


def request(address: str, op: str, *, timeout_s: float | None, **fields: Any) -> dict[str, Any]:
    """The positive answer to ``op`` with ``fields``; waits ``timeout_s`` seconds (None: for ever).

    Raises NodeUnavailableError when no answer comes, AuthenticationError when the node lets nobody in so, ProtocolError when
    it refuses, NodeAddressError for an invalid address.
    """
    address = node_address(address)
    endpoint, keys = endpoint_of(address)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        channel = Channel(endpoint, keys=keys)
        try:
            return channel.request(op, fields, timeout_s=deadline - time.monotonic())[0]
        except AuthenticationError:
            raise
        except NodeUnavailableError as error:
            # Without a connection nothing was asked yet, and a node that restarts comes back at its address.
            if isinstance(error, ConnectionLost) or time.monotonic() >= deadline:
                waited = "" if timeout_s is None else f" within {timeout_s:g} s"
                raise NodeUnavailableError(f"no answer from {address}{waited}; is a node running there?") from error
            time.sleep(_PAUSE_S)
        finally:
            channel.close()
