"""The methods of an administrator's client for who is connected to a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from commitmq.client.admin_results import Row


@dataclass(frozen=True, slots=True, eq=False)
class ClientInfo(Row):
    """A client that is connected, or a member of a group that speaks the node's own protocol.

    ``gateway`` is ``native`` for the latter, whose ``id`` is the member's name, else the server that the client is connected
    to, as ``rocketmq``. ``user`` and ``address`` are empty where they are not known; a member on the node's own host has
    ``process PID`` as its address. ``consumes`` and ``produces`` are names of groups, ``topics`` those that are subscribed to;
    ``left_out`` counts names of these lists that were not kept. ``queues`` is None where the node does not know it.
    ``heard_ms_ago``: since the last heartbeat.
    """

    id: str
    gateway: str
    address: str
    user: str
    language: str
    version: str
    consumes: list[str]
    produces: list[str]
    topics: list[str]
    left_out: int
    queues: int | None
    heard_ms_ago: int


@dataclass(frozen=True, slots=True)
class ConnectedClients:
    """``complete`` is False when the node did not keep all clients, or not all names of the groups and topics asked for."""

    clients: list[ClientInfo]
    complete: bool


class ClientAdmin:
    """A part of :class:`commitmq.Admin`."""

    def clients(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        user: str | None = None,
        client_id: str | None = None,
        gateway: str | None = None,
        text: str | None = None,
        max_clients: int | None = None,
    ) -> ConnectedClients:
        """Who is connected: clients of gateways, producers too, and the members of groups. Each argument leaves out others.

        ``topic``: who subscribes to it. ``group``: who consumes or produces in it. ``text``: a part of an id, a
        group, a user or an address. ``max_clients``: no more than these. The node does not know producers of its own protocol.
        """
        wanted: dict[str, Any] = {
            "topic": topic,
            "group": group,
            "user": user,
            "client_id": client_id,
            "gateway": gateway,
        }
        wanted |= {"text": text, "limit": max_clients}
        fields = {name: value for name, value in wanted.items() if value is not None}
        found: list[ClientInfo] = []
        complete = True
        for page in self._pages("client.list", fields):
            found += map(ClientInfo.of, page["clients"])
            complete = complete and page["complete"]
            if max_clients is not None and (len(found) > max_clients or (len(found) == max_clients and page["next"])):
                return ConnectedClients(found[:max_clients], False)
        return ConnectedClients(found, complete)

    def _pages(self, op: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError
