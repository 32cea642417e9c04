"""A node's description of itself: its store, the endpoints of its processes, and whether it is on this host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commitmq.errors import NodeUnavailableError


@dataclass(frozen=True, slots=True)
class Metadata:
    """The node's description of itself, and whether it is on this host."""

    node: str
    epoch: int
    store: Path
    segment_bytes: int
    properties_crc: bool
    same_host: bool
    endpoints: dict[str, list[list[str]]]
    raw: dict[str, Any]

    @property
    def store_id(self) -> str:
        """The id that tells the store from every other one; empty when the node sends none."""
        return str(self.raw.get("store_id", ""))

    def is_same_host_still(self) -> bool:
        """``same_host``, checked again: a node that was stopped or started since has another token."""
        return self.same_host and token_matches(self.store, str(self.raw["token"]))

    def endpoint(self, role: str, index: int = 0) -> str:
        """The best endpoint of the ``index``-th process of ``role`` (modulo their number): ipc on the same host, else
        tcp.
        """
        choices = self.endpoints.get(role) or []
        if not choices:
            raise NodeUnavailableError(f"the node {self.node} has no {role} at the moment")
        tcp_or_ipc = choices[index % len(choices)]
        if self.same_host:
            for one in tcp_or_ipc:
                if one.startswith("ipc://") and os.access(one.removeprefix("ipc://"), os.W_OK):
                    return one
        for one in tcp_or_ipc:
            if one.startswith("tcp://"):
                return one
        raise NodeUnavailableError(f"the {role} of the node {self.node} cannot be reached from this host")

    def count(self, role: str) -> int:
        """Number of processes of ``role``."""
        return len(self.endpoints.get(role) or [])


def parse_metadata(answer: dict[str, Any], address: str, *, may_be_local: bool = True) -> Metadata:
    """The metadata in the supervisor's ``answer``, which came from ``address``. Not ``may_be_local``: as of another host."""
    store = Path(answer["store"])
    endpoints: dict[str, list[list[str]]] = {}
    for role, value in answer["endpoints"].items():
        # A single process is given as [tcp, ipc], several processes of a role as a list of such pairs.
        several = value if value and isinstance(value[0], list) else [value]
        endpoints[role] = [[_reachable(one, address) for one in pair if one] for pair in several if pair]
    return Metadata(
        node=str(answer["node"]),
        epoch=int(answer["epoch"]),
        store=store,
        segment_bytes=int(answer["segment_bytes"]),
        properties_crc=bool(answer["properties_crc"]),
        same_host=may_be_local and token_matches(store, str(answer["token"])),
        endpoints=endpoints,
        raw=answer,
    )


def _reachable(endpoint: str, address: str) -> str:
    """``endpoint`` with the host of ``address`` when the node only says that it listens everywhere."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
        if endpoint.startswith(wildcard) and address.startswith("tcp://"):
            host = address.removeprefix("tcp://").rpartition(":")[0]
            return f"tcp://{host}:{endpoint.removeprefix(wildcard)}"
    return endpoint


def token_matches(store: Path, token: str) -> bool:
    """True when the store's token file can be read here and equals the node's token: same host, same file system.

    The token is random for each start of the node, so a copy of the store on another host does not match.
    """
    try:
        return bool(token) and (store / "run" / "token").read_text(encoding="ascii").strip() == token
    except (OSError, UnicodeDecodeError):
        return False
