"""Answers the operations that list topics, groups and positions: page by page, so that no answer grows with the node.

A page ends after ``limit`` entries, MAX_ENTRIES at most. The answer's ``next``, sent back as ``after``, begins the
following page; it is null on the last. It names the last entry and no place in a list. So entries that come and go
between two pages are listed or not, and no other entry is left out or listed twice. Pages of topics are encoded once
and kept until a topic changes: a client that asks again and again costs no more than sending the answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import orjson

from commitmq.coordination import topics as topics_module
from commitmq.coordination.allocation_table import AVERAGE
from commitmq.coordination.group_settings import check_name
from commitmq.coordination.groups import Groups
from commitmq.coordination.membership import Membership
from commitmq.coordination.offsets import GroupOffsets
from commitmq.coordination.topics import Topics
from commitmq.errors import ProtocolError

MAX_ENTRIES: Final = 500
_MAX_KEPT_PAGES: Final = 256
_PARTS: Final = ("members", "queues", "offsets")

Fields = dict[str, Any]
Key = list[Any]  # of ``after`` and ``next``: strings and integers


class Listing:
    """The lists of one coordinator."""

    def __init__(self, topics: Topics, groups: Groups, offsets: GroupOffsets) -> None:
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
        """``groups``: name, number of members, topics with offsets. A group with many topics may continue on the next
        page.
        """
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
        """``positions``: ``[group, topic, queue, next offset]``, with 0 for a queue that a member reads and for which
        the group has no commit.
        """
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
