"""Consumer groups: the list, one group by queues, a reset with its preview, their members, and who is connected.

RocketMQ's clients are shown with their producers too; the node does not know producers of its own protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from commitmq.client.admin_results import lag_of
from commitmq.errors import GroupNotFoundError, TopicNotFoundError
from commitmq_plugins.dashboard.api.node import BadValueError, VisitorNode, command, moment, value
from commitmq_plugins.metrics.figures import Figures, GroupLag

PAGE: Final = 50
_TOPICS: Final = 8
_MOST_QUEUES: Final = 1_000
_MOST_MEMBERS: Final = 200
_RESET_TOPICS: Final = 8
_SHOWS: Final = ("all", "behind", "no_members")
_SORTS: Final = ("name", "-lag", "-age")


@dataclass(frozen=True, slots=True)
class GroupsQuery:
    """Which groups, in which order."""

    q: str = value("", "Only groups with this text in their name.", longest=255)
    show: str = value("all", "All, those behind, or those without members.", choices=_SHOWS)
    sort: str = value("name", "The order: by name, the largest lag first, or the oldest.", choices=_SORTS)
    page: int = value(1, "Pages of 50 begin at 1.", low=1, high=1_000_000)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group: ``lag_messages`` wait for it in all its topics, the oldest since ``lag_s``. Null when not known."""

    name: str
    members: int
    topics: int
    lag_messages: int | None
    lag_s: float | None


@dataclass(frozen=True, slots=True)
class Groups:
    """A page of groups. ``incomplete``: queues whose lags were not read, because there are too many."""

    groups: list[GroupRow]
    page: int
    pages: int
    total: int
    incomplete: int


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """One group. Its topics come 8 a page."""

    group: str = value(doc="The group's name.", longest=255)
    page: int = value(1, "Pages of 8 topics begin at 1.", low=1, high=1_000_000)


@dataclass(frozen=True, slots=True)
class LagRow:
    """A group in one queue. ``committed`` is the next offset that it reads; null when it never committed there."""

    topic: str
    queue: int
    committed: int | None
    begin: int
    end: int
    lag: int
    member: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member of a group."""

    member: str
    topics: list[str]
    queues: int
    heard_ms_ago: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """A group: its members, and its lag by queue. ``topics_not_allowed``: those of the page that the visitor may not read."""

    name: str
    state: str
    members: list[MemberRow]
    lags: list[LagRow]
    lag_on_page: int
    topics: list[str]
    page: int
    pages: int
    queues_left_out: int
    topics_not_allowed: int


@dataclass(frozen=True, slots=True)
class ResetQuery:
    """Where a group shall continue. Without ``topic`` in all topics that it reads, which are 8 at most."""

    group: str = value(doc="The group's name.", longest=255)
    to: str = value(doc="earliest, latest, a time as 2026-06-01T12:00 (UTC), or a queue offset.", longest=64)
    topic: str | None = value(None, "Only this topic.", longest=255)
    queue: int | None = value(None, "Only this queue.", high=65_535)


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """A reset: as its preview, with ``confirm``."""

    group: str = value(doc="The group's name.", longest=255)
    to: str = value(doc="As in the preview.", longest=64)
    confirm: str = value(doc="The group's name, typed.", longest=255)
    topic: str | None = value(None, "As in the preview.", longest=255)
    queue: int | None = value(None, "As in the preview.", high=65_535)


@dataclass(frozen=True, slots=True)
class Move:
    """A queue: the group's offset before and after. ``again``: messages that come again; ``skipped``: that do not."""

    topic: str
    queue: int
    before: int | None
    after: int
    again: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Reset:
    """What a reset does, or with ``done`` did."""

    group: str
    to: str
    done: bool
    members: int
    moves: list[Move]
    again: int
    skipped: int
    command: str


def group_rows(figures: Figures) -> list[GroupRow]:
    """All groups of the shared figures; none while the coordinator is silent."""
    sums: dict[str, GroupLag] = {}
    for (name, _), lag in figures.group_lags.items():
        known = sums.setdefault(name, GroupLag())
        known.messages += lag.messages
        if lag.since_ms is not None and (known.since_ms is None or lag.since_ms < known.since_ms):
            known.since_ms = lag.since_ms
    rows = []
    for name, row in (figures.groups or {}).items():
        found = sums.get(name)
        age = None
        if found is not None:
            age = 0.0 if not found.messages else None
            if found.since_ms is not None:
                age = round(max(0, figures.at_ms - found.since_ms) / 1000, 1)
        messages = None if found is None else found.messages
        rows.append(GroupRow(name, int(row["members"]), len(row["topics"]), messages, age))
    return rows


def groups(node: VisitorNode, asked: GroupsQuery) -> Groups:
    """No request of its own: the shared figures have all."""
    figures = node.figures()
    if figures.groups is None:
        raise node.silent("the coordinator")
    text = asked.q.lower()
    rows = [row for row in group_rows(figures) if text in row.name.lower()]
    if asked.show == "behind":
        rows = [row for row in rows if row.lag_messages]
    elif asked.show == "no_members":
        rows = [row for row in rows if not row.members]
    rows.sort(key=lambda row: row.name)
    if asked.sort == "-lag":
        rows.sort(key=lambda row: -(row.lag_messages or 0))
    elif asked.sort == "-age":
        rows.sort(key=lambda row: -(row.lag_s or 0))
    first = (asked.page - 1) * PAGE
    pages = max(1, -(-len(rows) // PAGE))
    return Groups(rows[first : first + PAGE], asked.page, pages, len(rows), figures.positions_left_out)


def group(node: VisitorNode, asked: GroupQuery) -> Group:
    """One request, and one for each of the 8 topics of the page."""
    described = node.admin.group(asked.group)
    committed = {(topic, queue): offset for topic, queue, offset in described["offsets"]}
    holders = {(topic, queue): member for topic, queue, member in described["queues"]}
    names = sorted({topic for topic, _ in (*committed, *holders)})
    shown = names[(asked.page - 1) * _TOPICS : asked.page * _TOPICS]
    rows = []
    readable = [name for name in shown if node.rights.reads_topic(name)]
    for name in readable:
        try:
            bounds = node.admin.offsets(name)
        except TopicNotFoundError:
            continue  # deleted in the meantime
        for one in bounds:
            key = (name, one.queue)
            lag = lag_of(name, one, committed.get(key), holders.get(key))
            row = LagRow(name, one.queue, lag.committed, one.min, one.max, lag.lag, lag.member, lag.problem)
            rows.append(row)
    members = [
        MemberRow(one["member"], list(one["topics"]), len(one["queues"]), one.get("heard_ms_ago"))
        for one in described["members"][:_MOST_MEMBERS]
    ]
    return Group(
        described["name"],
        str(described["state"]),
        members,
        rows[:_MOST_QUEUES],
        sum(row.lag for row in rows),
        names[:_MOST_MEMBERS],
        asked.page,
        max(1, -(-len(names) // _TOPICS)),
        max(0, len(rows) - _MOST_QUEUES),
        len(shown) - len(readable),
    )


def preview_reset(node: VisitorNode, asked: ResetQuery) -> Reset:
    """What a reset would do; nothing changes."""
    return _reset(node, asked, done=False)


def reset(node: VisitorNode, asked: ResetRequest) -> Reset:
    """Move the group's offsets, also under members that run: each continues there with its next heartbeat."""
    if asked.confirm != asked.group:
        raise BadValueError("confirm is the group's name: type it to say that you mean this group")
    return _reset(node, ResetQuery(asked.group, asked.to, asked.topic, asked.queue), done=True)


def _reset(node: VisitorNode, asked: ResetQuery, *, done: bool) -> Reset:
    target = _target(asked.to)
    admin = node.admin
    before: dict[tuple[str, int], int] = {}
    members = 0
    try:
        described = admin.group(asked.group)
        members = len(described["members"])
        before = {(topic, queue): offset for topic, queue, offset in described["offsets"]}
    except GroupNotFoundError:
        if asked.topic is None:
            raise
    topics = None if asked.topic is None else [asked.topic]
    if topics is None and len({topic for topic, _ in before}) > _RESET_TOPICS:
        raise BadValueError(f"the group reads more than {_RESET_TOPICS} topics: name one")
    queues = None if asked.queue is None else [asked.queue]
    try:
        stored = admin.reset_offsets(asked.group, topics, target, queues=queues, running=True, dry_run=not done)
    except ValueError as error:
        raise BadValueError(str(error)) from None
    begins = {(name, one.queue): one.min for name in {one.topic for one in stored} for one in admin.offsets(name)}
    moves = [
        _move(
            one.topic, one.queue, before.get((one.topic, one.queue)), one.offset, begins.get((one.topic, one.queue), 0)
        )
        for one in stored
    ]
    words: Iterable[str | int | None] = ("--queue", asked.queue) if asked.queue is not None else ()
    return Reset(
        asked.group,
        asked.to,
        done,
        members,
        moves[:_MOST_QUEUES],
        sum(one.again for one in moves),
        sum(one.skipped for one in moves),
        command("group", "reset", asked.group, asked.topic, "--to", asked.to, *words),
    )


def _move(topic: str, queue: int, before: int | None, after: int, begin: int) -> Move:
    now = max(begin, before or 0)  # expired messages are neither read again nor skipped
    return Move(topic, queue, before, after, max(0, now - after), max(0, after - now))


def _target(to: str) -> str | int | datetime:
    if to in ("earliest", "latest"):
        return to
    if to.isascii() and to.isdecimal() and len(to) < 20:
        return int(to)
    return moment("to", to)


GROUPS_A_PAGE: Final = 8
_MOST_ROWS: Final = 500
_MOST_TOPICS: Final = 20
_MOST_CONNECTIONS: Final = 200


@dataclass(frozen=True, slots=True)
class ClientsQuery:
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


def clients(node: VisitorNode, asked: ClientsQuery) -> Clients:
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
            continue  # deleted in the meantime
        for one in members:
            topics = [str(topic) for topic in one["topics"][:_MOST_TOPICS]]
            rows.append(ClientRow(name, str(one["member"]), topics, len(one["queues"]), one.get("heard_ms_ago")))
    pages = max(1, -(-len(names) // GROUPS_A_PAGE))
    left_out = max(0, len(rows) - _MOST_ROWS)
    connections, complete = _connections(node, asked.q)
    return Clients(rows[:_MOST_ROWS], asked.page, pages, len(names), left_out, connections, complete)


def _connections(node: VisitorNode, text: str) -> tuple[list[ConnectionRow] | None, bool]:
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
