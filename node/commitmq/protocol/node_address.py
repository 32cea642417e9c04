"""The address of a node's supervisor, as a caller or the environment names it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from commitmq.errors import NodeAddressError

DEFAULT_NODE: Final = "tcp://127.0.0.1:7310"
MAX_NODES: Final = 64


def several_addresses(node: str | Iterable[str] | None) -> list[str] | None:
    """The checked addresses that a comma-separated string or a list names; None for one address, as :func:`node_address`
    takes it.

    Raises NodeAddressError.
    """
    if node is None or isinstance(node, str):
        text = node or os.environ.get("COMMITMQ_NODE") or ""
        if "," not in text:
            return None
        node = text.split(",")
    addresses = [node_address(one.strip() or " ") for one in node]
    if not 0 < len(addresses) <= MAX_NODES:
        raise NodeAddressError(f"give 1 to {MAX_NODES} node addresses, not {len(addresses)}")
    if len(set(addresses)) < len(addresses):
        raise NodeAddressError(f"a node address comes twice: {', '.join(addresses)}")
    return addresses


def node_address(node: str | None) -> str:
    """``node``, else the environment's COMMITMQ_NODE, else the local default. Raises NodeAddressError for nonsense."""
    if not isinstance(node, str | None) or "," in (node or os.environ.get("COMMITMQ_NODE") or ""):
        raise NodeAddressError(
            "these are several node addresses, and only Producer and AsyncProducer take several: make a client for each node"
        )
    address = node or os.environ.get("COMMITMQ_NODE") or DEFAULT_NODE
    told = f"node address {address!r}" + (" (from COMMITMQ_NODE)" if address == os.environ.get("COMMITMQ_NODE") else "")
    if "://" not in address:
        address = f"tcp://{address}"
    scheme = address.partition("://")[0]
    if scheme not in ("tcp", "ipc"):
        raise NodeAddressError(f"{told} must start with tcp:// or ipc://, for example {DEFAULT_NODE}")
    if scheme == "tcp":
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise NodeAddressError(f"{told}: {error}") from error
        if not host or not port:
            raise NodeAddressError(f"{told} needs a host and a port, for example {DEFAULT_NODE}")
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
            raise NodeAddressError(f"{told} has more than a host and a port, for example {DEFAULT_NODE}")
    return address
