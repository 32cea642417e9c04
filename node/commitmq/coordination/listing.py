"""Answers the operations that list topics, groups, positions and clients: page by page, so that no answer grows with
the node.

A page ends after ``limit`` entries, MAX_ENTRIES at most. The answer's ``next``, sent back as ``after``, begins the
following page; it is null on the last. It names the last entry and no place in a list. So entries that come and go
between two pages are listed or not, and no other entry is omitted or listed twice. Pages of topics are encoded once
and kept until a topic changes: a client that asks again and again costs no more than sending the answer.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from commitmq.coordination import topics as topics_module
from commitmq.coordination.groups import GroupCoordinator, check_name
from commitmq.coordination.membership import AVERAGE, Membership
from commitmq.coordination.offsets import GroupOffsets
from commitmq.coordination.topics import TopicManager
from commitmq.errors import ProtocolError
from commitmq.semantics.rates import FORGET_MS

MAX_ENTRIES: Final = 500
_MAX_KEPT_PAGES: Final = 256
_PARTS: Final = ("members", "queues", "offsets")

Fields = dict[str, Any]
Key = list[Any]  # of ``after`` and ``next``: strings and integers


class Listing:
    """The lists of one coordinator."""

    def __init__(self, topics: TopicManager, groups: GroupCoordinator, offsets: GroupOffsets) -> None:
        self._topics, self._groups, self._offsets = topics, groups, offsets
        self._topic_names = sorted(topics.table.topics)
        self._pages: dict[tuple[str, int], Fields] = {}
        self.who: Callable[[str, str], tuple[str, str]] = lambda group, member: ("", "")
        """User and address of a member's connection; set by who has the connections."""

    def topics_changed(self, names: Iterable[str]) -> None:
        """Drop the encoded pages with these topics, which were created, changed or deleted."""
        self._pages.clear()
        known = self._topic_names
        for name in names:
            place = bisect_left(known, name)
            listed = place < len(known) and known[place] == name
            if listed and name not in self._topics.table.topics:
                del known[place]
            elif not listed and name in self._topics.table.topics:
                insort(known, name)

    def topics(self, after: str, limit: int) -> Fields:
        """``topics``: the settings of each topic."""
        page = self._pages.get((after, limit))
        if page is None:
            if len(self._pages) >= _MAX_KEPT_PAGES:
                self._pages.clear()
            start = bisect_right(self._topic_names, after)
            names = self._topic_names[start : start + limit]
            table = self._topics.table.topics
            rows = [topics_module.describe(table[name]) for name in names if name in table]
            more = start + limit < len(self._topic_names)
            page = {"topics": orjson.Fragment(orjson.dumps(rows)), "next": names[-1] if more else None}
            self._pages[after, limit] = page
        return page

    def groups(self, after: Key, limit: int) -> Fields:
        """``groups``: name, members, topics with offsets. A group with many topics may continue on the next page."""
        table = self._offsets.table

        def entries() -> Iterator[tuple[str, str]]:
            for name in self._groups.names_from(after[0] if after else ""):
                topics = sorted(table.topics_of(name))
                if topics or self._groups.exists(name):
                    # The entry without a topic is the group itself.
                    yield from ((name, topic) for topic in ["", *topics] if [name, topic] > after)

        rows: list[Fields] = []
        page, following = _page(entries(), limit)
        for name, topic in page:
            if not rows or rows[-1]["name"] != name:
                group = self._groups.membership(name)
                rows.append({"name": name, "members": len(group.members) if group else 0, "topics": []})
            if topic:
                rows[-1]["topics"].append(topic)
        return {"groups": rows, "next": following}

    def positions(self, after: Key, limit: int) -> Fields:
        """``positions``: ``[group, topic, queue, next offset]``; 0 for a queue that is read and has no commit."""
        table = self._offsets.table

        def entries() -> Iterator[tuple[str, str, int]]:
            for name in self._groups.names_from(after[0] if after else ""):
                queues = {(topic, queue) for topic, queue, _ in table.of_group(name)}
                group = self._groups.membership(name)
                if group is not None:
                    queues |= group.holders.keys()
                yield from (key for topic, queue in sorted(queues) if [*(key := (name, topic, queue))] > after)

        page, following = _page(entries(), limit)
        rows = [(*key, table.get(*key) or 0) for key in page]
        return {"positions": rows, "next": following}

    def describe_group(self, name: str, after: Key, limit: int, now_ms: int) -> Fields:
        """``group``: state, and a page of its members, then of its queues with their owners, then of its offsets."""
        check_name(name)
        table = self._offsets.table
        group = self._groups.membership(name)
        if not self._groups.exists(name) and not any(table.topics_of(name)):
            raise ProtocolError("GROUP_NOT_EXIST", f"there is no group {name!r}")
        page, following = _page(_entries_of(group, table.of_group(name), after), limit, partial(_weight, group))
        rows: dict[str, list[Any]] = {part: [] for part in _PARTS}
        for part, *key in page:
            if part == "offsets":
                rows[part].append((*key, table.get(name, *key)))
            elif part == "queues" and group is not None:
                rows[part].append([*key, group.holders[key[0], key[1]]])
            elif group is not None:
                rows[part].append({**_member_row(group, key[0], now_ms), "address": self.who(name, key[0])[1]})
        members = 0 if group is None else len(group.members)
        state = "empty" if not members else "stable" if group is not None and group.settled else "rebalancing"
        strategy = AVERAGE if group is None or group.strategy is None else group.strategy
        generation = group.generation if group else None
        described = {"name": name, "state": state, "generation": generation, "strategy": strategy, **rows}
        return {"group": described, "next": following}


def _entries_of(
    group: Membership | None, offsets: Iterable[tuple[str, int, int]], after: Key
) -> Iterator[tuple[Any, ...]]:
    """``(part, key…)`` behind ``after``, of the parts whose entries are small enough to count as one each."""
    done = _PARTS.index(after[0]) if after else 0
    keys: dict[str, Callable[[], list[Any]]] = {
        "members": lambda: [] if group is None else sorted((one,) for one in group.members),
        "queues": lambda: [] if group is None else sorted(group.holders),
        "offsets": lambda: sorted((topic, queue) for topic, queue, _ in offsets),
    }
    for number, part in enumerate(_PARTS[done:], done):
        behind = tuple(after[1:]) if after and number == done else ()
        yield from ((part, *key) for key in keys[part]() if key > behind)


def _member_row(group: Membership, name: str, now_ms: int) -> Fields:
    one = group.members[name]
    return {
        "member": name,
        "topics": sorted(one.topics),
        "queues": sorted(one.held),
        "session_timeout_ms": one.session_timeout_ms,
        "heard_ms_ago": now_ms - one.heard_ms,
    }


def _weight(group: Membership | None, entry: tuple[Any, ...]) -> int:
    """The weight of an entry in a page: a member comes with its topics and queues, which may be thousands."""
    if group is None or entry[0] != "members":
        return 1
    member = group.members[entry[1]]
    return 1 + len(member.topics) + len(member.held)


def _page(
    entries: Iterator[Any], limit: int, weight: Callable[[Any], int] = lambda _entry: 1
) -> tuple[list[Any], Key | None]:
    """The first entries, up to ``limit`` by weight but at least one, and the last of them when there are more."""
    page: list[Any] = []
    for entry in entries:
        page.append(entry)
        limit -= weight(entry)
        if limit <= 0:
            break
    return page, list(page[-1]) if page and next(entries, None) is not None else None


Place = tuple[str, str]
"""A gateway's name, and the address of a connection to it."""
NATIVE: Final = "native"
"""Stands for the node's own protocol, where gateways have their names."""


@dataclass(frozen=True, slots=True)
class Client:
    """``place``: where it is connected. ``left_out``: names of groups and topics beyond the limits of the lists."""

    place: Place
    id: str
    user: str
    language: str
    version: str
    consumes: tuple[str, ...]
    produces: tuple[str, ...]
    topics: tuple[str, ...]
    left_out: int
    heard_ms: int

    @property
    def key(self) -> tuple[str, str, str]:
        """Its place in lists."""
        return self.id, *self.place


@dataclass(frozen=True, slots=True)
class ClientFilter:
    """Which clients; None for any. ``text``: a part of an id, a group, a user or an address, in small letters."""

    topic: str | None = None
    group: str | None = None
    user: str | None = None
    id: str | None = None
    gateway: str | None = None
    text: str | None = None

    def takes(self, place: Place, name: str, user: str, groups: Iterable[str], topics: Iterable[str]) -> bool:
        return (
            self.gateway in (None, place[0])
            and self.id in (None, name)
            and self.user in (None, user)
            and (self.topic is None or self.topic in topics)
            and (self.group is None or self.group in groups)
            and (self.text is None or any(self.text in one.lower() for one in (name, user, place[1], *groups)))
        )


class GatewayClients:
    """The clients that gateways have told of: who is connected, with its groups. In memory only.

    A gateway tells of a client when it comes, when its groups change, and with its heartbeats. What nobody told of for
    ``FORGET_MS`` is forgotten. So a gateway that died leaves nothing, and a new coordinator knows all clients after one
    heartbeat of each. A connection counts as one client, whatever it calls itself. When the table is full, the client that
    was silent for longest goes.

    Times are those of the caller's clock.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        """``most``: clients that are kept, ``groups.max_listed_clients``."""
        self._most = most
        self._instances: dict[str, str] = {}
        self._by_place: dict[Place, Client] = {}  # the one that was silent for longest is the first
        self._full_ms: int | None = None

    def __len__(self) -> int:
        return len(self._by_place)

    def tell(self, gateway: str, instance: str, clients: Iterable[Client], gone: Iterable[str], now_ms: int) -> None:
        """What the process ``instance`` of ``gateway`` says. Clients of its processes before are gone with them."""
        if self._instances.get(gateway) != instance:
            self._instances[gateway] = instance
            for place in [place for place in self._by_place if place[0] == gateway]:
                del self._by_place[place]
        for connection in gone:
            self._by_place.pop((gateway, connection), None)
        for one in clients:
            self._by_place.pop(one.place, None)
            self._by_place[one.place] = one
        self._forget(now_ms)

    def _forget(self, now_ms: int) -> None:
        while self._by_place:
            place, oldest = next(iter(self._by_place.items()))
            if len(self._by_place) > self._most():
                self._full_ms = now_ms
            elif oldest.heard_ms > now_ms - FORGET_MS:
                return
            del self._by_place[place]

    def speaks_through(self, instance: str) -> bool:
        """Whether a member of a group that joined as one of ``instance`` is a client of a gateway, and so in this table."""
        return bool(instance) and instance in self._instances.values()

    def page(self, wanted: ClientFilter, after: tuple[str, ...], limit: int, now_ms: int) -> tuple[list[Client], bool]:
        """The first ``limit`` clients behind the key ``after``, and whether there are more."""
        self._forget(now_ms)
        found = heapq.nsmallest(limit + 1, self._behind(wanted, after), key=lambda one: one.key)
        return found[:limit], len(found) > limit

    def _behind(self, wanted: ClientFilter, after: tuple[str, ...]) -> Iterator[Client]:
        for one in self._by_place.values():
            groups = (*one.consumes, *one.produces)
            if one.key > after and wanted.takes(one.place, one.id, one.user, groups, one.topics):
                yield one

    def is_complete(self, wanted: ClientFilter, now_ms: int) -> bool:
        """Whether the table has all that is ``wanted``: it was not full lately, and no list that was asked for was cut."""
        if self._full_ms is not None and self._full_ms > now_ms - FORGET_MS:
            return False
        names = wanted.topic is not None or wanted.group is not None or wanted.text is not None
        return not (names and any(one.left_out for one in self._by_place.values()))


def shown(one: Client, now_ms: int) -> dict[str, Any]:
    """A client as the answer to ``client.list`` has it."""
    return {
        "id": one.id,
        "gateway": one.place[0],
        "address": one.place[1],
        "user": one.user,
        "language": one.language,
        "version": one.version,
        "consumes": one.consumes,
        "produces": one.produces,
        "topics": one.topics,
        "left_out": one.left_out,
        "queues": None,
        "heard_ms_ago": max(0, now_ms - one.heard_ms),
    }
