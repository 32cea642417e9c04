"""Sends one request to a node's admin socket, for verbs that need only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from commitmq.cli.output import DEFAULT_NODE, fail
from commitmq.errors import NodeUnavailableError
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id, set_keys
from commitmq.protocol.node_address import endpoint_of, node_address
from commitmq.store.layout import StoreLayout
from commitmq.store.store_lock import lock_holder
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.node_files import read_node_file


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

    Raises NodeUnavailableError when no answer comes, ProtocolError when the node refuses, NodeAddressError for an
    invalid address.
    """
    address = node_address(address)
    endpoint, keys = endpoint_of(address)
    context = zmq.Context(io_threads=1)
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, new_routing_id())
        if endpoint.startswith("tcp://["):
            dealer.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            set_keys(dealer, keys)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            raise NodeUnavailableError(f"{address!r} is no address of a node: {error.strerror}") from error
        dealer.send(wire.pack({"op": op, "id": 1, **fields}))
        if not dealer.poll(None if timeout_s is None else int(timeout_s * 1000)):
            raise NodeUnavailableError(
                f"no answer from {address} within {timeout_s:g} s; is a node running there? A node with keys wants"
                " commitmq://PROFILE@host:port, and on its own machine takes ipc://STORE"
            )
        answer = wire.parse_answer(dealer.recv())
    finally:
        context.destroy(linger=0)
    if not answer["ok"]:
        raise wire.refusal(answer)
    return answer
