"""Verbs that need the extra ``commitmq[node]``: without it they fail with a sentence before they do anything.

``--node``, ``--store`` and ``--timeout``: the options of verbs that ask a node's supervisor.

Sends one request to a node's admin socket, for verbs that need only that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from commitmq.cli.output import DEFAULT_NODE, fail
from commitmq.cli.quantity import seconds
from commitmq.errors import AuthenticationError, NodeUnavailableError
from commitmq.extras import need_node
from commitmq.protocol.channel import Channel, ConnectionLost
from commitmq.protocol.node_address import endpoint_of, node_address
from commitmq.store.layout import StoreLayout
from commitmq.store.store_lock import lock_holder
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.node_files import read_node_file

_Function = TypeVar("_Function", bound=Callable[..., Any])


def node_options(function: _Function) -> _Function:
    """The parameters are called ``node``, ``store`` and ``timeout_s``."""
    for option in (
        click.option(
            "--timeout", "timeout_s", type=seconds(), default=10.0, show_default=True, help="Seconds to wait."
        ),
        click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Store folder of a node here."),
        click.option(
            "--node", metavar="ADDRESS", envvar="COMMITMQ_NODE", help=f"Admin address.  [default: {DEFAULT_NODE}]"
        ),
    ):
        function = option(function)
    return function


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
