"""The operations on connected clients: ``client.heard`` is a gateway's, ``client.list`` says who is connected.

A list has the clients of gateways (:mod:`.clients`), then the members of groups that speak the node's own protocol.
Producers of that protocol tell nobody of themselves, so no list has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from commitmq.coordination import requests
from commitmq.coordination.answers import Answer, Fields, Operations
from commitmq.coordination.clients import NATIVE, Client, Clients, Wanted, shown
from commitmq.coordination.groups import Groups
from commitmq.coordination.requests import Header
from commitmq.semantics.client_limits import (
    FORGET_MS,
    MAX_CHARACTERS,
    MAX_CLIENTS_A_REQUEST,
    MAX_NAMES,
    shortened,
)

_MOST_ROWS = 200
_MOST_GONE = 10_000
_PARTS = ("clients", "members")


class ClientOperations:
    """See the module; :attr:`operations` has them by name."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.clients = Clients(lambda: groups.config.max_listed_clients)
        self.who: Callable[[str, str], tuple[str, str]] = lambda group, member: ("", "")
        """User and address of a member that speaks the node's own protocol."""
        self.operations: Operations = {"client.heard": self._heard, "client.list": self._list}

    def _heard(self, header: Header, now_ms: int) -> Answer:
        gateway, instance = requests.text(header, "gateway"), requests.text(header, "instance")
        if gateway == NATIVE:
            raise requests.refuse("gateway", f"another name than {NATIVE}", gateway)
        told = requests.objects(header, "clients", MAX_CLIENTS_A_REQUEST)
        gone = header.get("gone") or []
        if type(gone) is not list or len(gone) > _MOST_GONE or not all(type(one) is str for one in gone):
            raise requests.refuse("gone", f"a list of at most {_MOST_GONE} connections", gone)
        clients = sorted((_client(gateway, one, now_ms) for one in told), key=lambda one: one.heard_ms)
        self.clients.tell(gateway, instance, clients, gone, now_ms)
        return Answer(dict)

    def _list(self, header: Header, now_ms: int) -> Answer:
        names = {field: requests.optional_text(header, field) for field in ("topic", "group", "user", "gateway")}
        client_id, text = requests.optional_text(header, "client_id"), requests.optional_text(header, "text")
        wanted = Wanted(**names, id=client_id, text=None if text is None else text.lower())
        after, limit = requests.cursor(header, str, str, str, str), requests.limit(header, _MOST_ROWS)
        if after and after[0] not in _PARTS:
            raise requests.refuse("after", "the value of next in the page before", after)
        return Answer(lambda: self._page(wanted, after, limit, now_ms))

    def _page(self, wanted: Wanted, after: list[str], limit: int, now_ms: int) -> Fields:
        part, *key = after or [_PARTS[0], "", "", ""]
        rows: list[Fields] = []
        complete = self.clients.is_complete(wanted, now_ms)
        if part == "clients":
            found, more = self.clients.page(wanted, tuple(key), limit, now_ms)
            rows = [shown(one, now_ms) for one in found]
            if more:
                return {"clients": rows, "complete": complete, "next": ["clients", *found[-1].key]}
            key = ["", "", ""]
        behind = key[0], key[1]
        for place, row in self._members(wanted, behind, now_ms):
            if len(rows) == limit:
                return {"clients": rows, "complete": complete, "next": ["members", *behind, ""]}
            rows.append(row)
            behind = place
        return {"clients": rows, "complete": complete, "next": None}

    def _members(
        self, wanted: Wanted, behind: tuple[str, str], now_ms: int
    ) -> Iterator[tuple[tuple[str, str], Fields]]:
        """Group and name of each member behind these, and its row. A gateway's members are in the table of clients."""
        if wanted.gateway not in (None, NATIVE):
            return
        for name in self._groups.names_from(behind[0]) if wanted.group is None else (wanted.group,):
            group = self._groups.membership(name)
            for member in () if group is None else sorted(group.members):
                assert group is not None
                one = group.members[member]
                if (name, member) <= behind or self.clients.speaks_through(one.instance):
                    continue
                user, address = self.who(name, member)
                if wanted.takes((NATIVE, address), member, user, (name,), one.topics):
                    [topics], left_out = shortened(0, one.topics)
                    row = {
                        **dict.fromkeys(("language", "version"), ""),
                        "id": member,
                        "gateway": NATIVE,
                        "address": address,
                        "user": user,
                        "consumes": [name],
                        "produces": [],
                        "topics": topics,
                        "left_out": left_out,
                        "queues": len(one.held),
                        "heard_ms_ago": now_ms - one.heard_ms,
                    }
                    yield (name, member), row


def _client(gateway: str, told: Header, now_ms: int) -> Client:
    """What a gateway tells of one client. Raises ProtocolError."""
    fields = {name: told.get(name) for name in ("id", "connection", "user", "language", "version")}
    lists = {name: told.get(name) for name in ("consumes", "produces", "topics")}
    ago_ms = requests.integer(told, "heard_ms_ago", 0, FORGET_MS)
    left_out = requests.integer(told, "left_out", 0, 1 << 31)
    for field, value in fields.items():
        if type(value) is not str:
            raise requests.refuse(field, "a string", value)
    for field, names in lists.items():
        if type(names) is not list or len(names) > MAX_NAMES or not all(type(one) is str for one in names):
            raise requests.refuse(field, f"a list of at most {MAX_NAMES} names", names)
    texts = [*fields.values(), *(one for names in lists.values() for one in names or ())]
    if sum(len(one) for one in texts if one) > MAX_CHARACTERS:
        raise requests.refuse("clients", f"of clients with at most {MAX_CHARACTERS} characters each", told)
    return Client(
        (gateway, str(fields["connection"])),
        str(fields["id"]),
        str(fields["user"]),
        str(fields["language"]),
        str(fields["version"]),
        tuple(lists["consumes"] or ()),
        tuple(lists["produces"] or ()),
        tuple(lists["topics"] or ()),
        left_out,
        now_ms - ago_ms,
    )
