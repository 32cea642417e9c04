"""The address of a node's supervisor, as a caller or the environment names it."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

from commitmq.errors import NodeAddressError

DEFAULT_NODE: Final = "tcp://127.0.0.1:7310"


def node_address(node: str | None) -> str:
    """``node``, else the environment's COMMITMQ_NODE, else the local default. Raises NodeAddressError for nonsense."""
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
