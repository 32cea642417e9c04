"""Clients: the members of groups, 8 groups a page. The node knows of no producer that is not sending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commitmq.errors import GroupNotFoundError
from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.values import value

GROUPS_A_PAGE: Final = 8
_MOST_ROWS: Final = 500
_MOST_TOPICS: Final = 20


@dataclass(frozen=True, slots=True)
class ClientsAsked:
    """Which clients."""

    q: str = value("", "Only groups with this text in their name.", longest=255)
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
class Clients:
    """Members of the groups of one page; ``total`` groups have members. ``left_out``: members that are not shown."""

    clients: list[ClientRow]
    page: int
    pages: int
    total: int
    left_out: int


def clients(node: Node, asked: ClientsAsked) -> Clients:
    """The shared figures, and one request for each group of the page."""
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
    return Clients(rows[:_MOST_ROWS], asked.page, pages, len(names), max(0, len(rows) - _MOST_ROWS))
