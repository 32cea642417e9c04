"""The clients that gateways have told of: who is connected, with its groups. In memory only.

A gateway tells of a client when it comes, when its groups change, and with its heartbeats. What nobody told of for
``FORGET_MS`` is forgotten. So a gateway that died leaves nothing, and a new coordinator knows all clients after one heartbeat
of each. A connection counts as one client, whatever it calls itself. When the table is full, the client that was silent for
longest goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from commitmq.semantics.rates import FORGET_MS

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
class Wanted:
    """Which clients; None for any. ``text``: a part of an id, a group, a user or an address, in small letters."""

    topic: str | None = None
    group: str | None = None
    user: str | None = None
    id: str | None = None
    gateway: str | None = None
    text: str | None = None

    def takes(self, place: Place, name: str, user: str, groups: Iterable[str], topics: Iterable[str]) -> bool:
        """Whether a client is one of them."""
        return (
            self.gateway in (None, place[0])
            and self.id in (None, name)
            and self.user in (None, user)
            and (self.topic is None or self.topic in topics)
            and (self.group is None or self.group in groups)
            and (self.text is None or any(self.text in one.lower() for one in (name, user, place[1], *groups)))
        )


class Clients:
    """See the module. Times are those of the caller's clock."""

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

    def page(self, wanted: Wanted, after: tuple[str, ...], limit: int, now_ms: int) -> tuple[list[Client], bool]:
        """The first ``limit`` clients behind the key ``after``, and whether there are more."""
        self._forget(now_ms)
        found = heapq.nsmallest(limit + 1, self._behind(wanted, after), key=lambda one: one.key)
        return found[:limit], len(found) > limit

    def _behind(self, wanted: Wanted, after: tuple[str, ...]) -> Iterator[Client]:
        for one in self._by_place.values():
            groups = (*one.consumes, *one.produces)
            if one.key > after and wanted.takes(one.place, one.id, one.user, groups, one.topics):
                yield one

    def is_complete(self, wanted: Wanted, now_ms: int) -> bool:
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
