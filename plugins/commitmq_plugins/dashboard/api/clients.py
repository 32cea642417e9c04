"""Clients: the members of groups, 8 groups a page, and who is connected, RocketMQ's clients with their producers too.

The node does not know producers of its own protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commitmq.errors import GroupNotFoundError
from commitmq_plugins.dashboard.api.node import Node, value

GROUPS_A_PAGE: Final = 8
_MOST_ROWS: Final = 500
_MOST_TOPICS: Final = 20
_MOST_CONNECTIONS: Final = 200


@dataclass(frozen=True, slots=True)
class ClientsAsked:
    """Which clients."""

    q: str = value(
        "",
        "Only groups with this text in their name, and connections with it in id, group, user or address.",
        longest=255,
    )
    page: int = value(1, "Pages of 8 groups begin at 1.", low=1, high=1_000_000)


@dataclass(frozen=True, slots=True)
class ClientRow:
    """A member of a group, ``heard_ms_ago`` null when not known. ``topics``: 20 at most."""

    group: str
    member: str
    topics: list[str]
    queues: int
    heard_ms_ago: int | None


@dataclass(frozen=True, slots=True)
class ConnectionRow:
    """A client that is connected: ``gateway`` is native or the server's name. ``user``, ``language`` and ``version`` are empty
    where they are not known. ``consumes`` and ``produces`` are groups, 20 of each at most.
    """

    id: str
    gateway: str
    address: str
    user: str
    language: str
    version: str
    consumes: list[str]
    produces: list[str]
    heard_ms_ago: int


@dataclass(frozen=True, slots=True)
class Clients:
    """Members of the groups of one page; ``total`` groups have members. ``left_out``: members that are not shown.

    ``connections``: 200 at most, null for who may not see them (Cluster Get). ``complete``: there are no others.
    """

    clients: list[ClientRow]
    page: int
    pages: int
    total: int
    left_out: int
    connections: list[ConnectionRow] | None
    complete: bool


def clients(node: Node, asked: ClientsAsked) -> Clients:
    """The shared figures, one request for each group of the page, and one or two for the connections."""
    figures = node.figures()
    if figures.groups is None:
        raise node.silent("the coordinator")
    text = asked.q.lower()
    names = sorted(name for name, row in figures.groups.items() if row["members"] and text in name.lower())
    rows = []
    for name in names[(asked.page - 1) * GROUPS_A_PAGE : asked.page * GROUPS_A_PAGE]:
        try:
            members = node.admin.group(name)["members"]
        except GroupNotFoundError:
            continue  # deleted meanwhile
        for one in members:
            topics = [str(topic) for topic in one["topics"][:_MOST_TOPICS]]
            rows.append(ClientRow(name, str(one["member"]), topics, len(one["queues"]), one.get("heard_ms_ago")))
    pages = max(1, -(-len(names) // GROUPS_A_PAGE))
    left_out = max(0, len(rows) - _MOST_ROWS)
    connections, complete = _connections(node, asked.q)
    return Clients(rows[:_MOST_ROWS], asked.page, pages, len(names), left_out, connections, complete)


def _connections(node: Node, text: str) -> tuple[list[ConnectionRow] | None, bool]:
    if not node.rights.may("coordinator", "client.list"):
        return None, False
    found = node.admin.clients(text=text or None, max_clients=_MOST_CONNECTIONS)
    rows = [
        ConnectionRow(
            one.id,
            one.gateway,
            one.address,
            one.user,
            one.language,
            one.version,
            one.consumes[:_MOST_TOPICS],
            one.produces[:_MOST_TOPICS],
            one.heard_ms_ago,
        )
        for one in found.clients
    ]
    return rows, found.complete
