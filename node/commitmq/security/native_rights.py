"""What each operation of the native protocol needs, by process and name (protocol/PROTOCOL.md, "Users"), and for whom it is
asked.

A need is a resource and actions, of which one must be allowed; the RocketMQ server's table has the same words. The fields of
a request are a client's: where one has not the right shape, nothing is needed for it, because the operation refuses it.
Operations that are not here are a super user's. A gateway of the node names its user in a request: :class:`Vouching`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import orjson

from commitmq.format.constants import RETRY_PREFIX, WAITING_TOPICS
from commitmq.security.audit import Actor
from commitmq.security.policy import Action, Resource, ResourceType

FIELD: Final = "on_behalf_of"
_LONGEST: Final = 300


class Vouching:
    """On whose behalf a process of the node asks: a gateway names its user in a request, and proves that it may.

        {"op": "topic.create", "on_behalf_of": {"user": "shop", "protocol": "dashboard", "address": "10.1.2.3",
         "proof": "<64 hex>"}, …}

    The proof is an HMAC-SHA256 of operation, user, protocol and address. The supervisor draws its key at each start and gives
    it to the processes that it forks; it is in no file and in no log. So another program cannot make a proof, not even one of
    the node's account. A request whose proof is wrong counts as its sender's own.

    Makes and checks proofs, with the key of this start of the node.
    """

    def __init__(self, key: str) -> None:
        """``key``: of :meth:`draw`. With an empty one nothing is believed, and nobody is named."""
        self._key = key.encode()

    @staticmethod
    def draw() -> str:
        return secrets.token_hex(32)

    def fields(self, operation: str, actor: Actor) -> dict[str, Any]:
        """What a request for ``operation`` carries to be that of ``actor``."""
        if not self._key:
            return {}
        named = (actor.name[:_LONGEST], actor.protocol[:_LONGEST], actor.address[:_LONGEST])
        user, protocol, address = (one.encode(errors="replace").decode() for one in named)
        told = {"user": user, "protocol": protocol, "address": address}
        return {FIELD: {**told, "proof": self._proof(operation, user, protocol, address)}}

    def actor(self, header: dict[str, Any]) -> Actor | None:
        """Whom a request is for; None where it names nobody, or without a right proof."""
        told = header.get(FIELD)
        if type(told) is not dict or not self._key:
            return None
        user, protocol, address, proof = (told.get(one) for one in ("user", "protocol", "address", "proof"))
        if not (type(user) is type(protocol) is type(address) is type(proof) is str):
            return None
        right = self._proof(header["op"], user, protocol, address)
        if not hmac.compare_digest(right.encode(), proof.encode(errors="replace")):
            return None
        return Actor(user, protocol, address)

    def user(self, header: dict[str, Any]) -> str | None:
        """The name of the user whom a request is for; None for nobody's."""
        if FIELD not in header:
            return None
        found = self.actor(header)
        return None if found is None else found.name or None

    def _proof(self, *told: str) -> str:
        return hmac.new(self._key, orjson.dumps(told), hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "Vouching(***)"


Actions: TypeAlias = frozenset[Action]
Need: TypeAlias = tuple[Resource, Actions]

ALL_NAMES: Final = "*"
"""The name of a resource that only patterns of a whole type match."""

PUB: Final = frozenset((Action.PUB,))
SUB: Final = frozenset((Action.SUB,))
GET: Final = frozenset((Action.GET,))
CREATE: Final = frozenset((Action.CREATE,))
UPDATE: Final = frozenset((Action.UPDATE,))
DELETE: Final = frozenset((Action.DELETE,))
PUB_SUB: Final = PUB | SUB
SUB_GET: Final = SUB | GET
SUB_UPDATE: Final = SUB | UPDATE
LIST: Final = frozenset((Action.LIST, Action.GET))
SEEN: Final = PUB | SUB | GET
SHOWN: Final = SUB_GET | CREATE | UPDATE | DELETE
"""Who may make, change or delete something may look at it too: the verbs look first."""
_CHANGES: Final = CREATE | UPDATE | DELETE


def topic_need(name: str, actions: Actions) -> Need:
    """The need of a topic; for a group's retry topic that of the group. Who consumes in the group also sends to it and
    reads it. Only who may make, change or delete the group may do so with it.
    """
    if name.startswith(RETRY_PREFIX):
        changes = actions & _CHANGES
        wanted = changes if changes == actions else changes | SUB
        return Resource(ResourceType.GROUP, name.removeprefix(RETRY_PREFIX)), wanted
    return Resource(ResourceType.TOPIC, name), actions


def read_need(name: str, actions: Actions) -> Need:
    """The need of the messages of a topic. Those of all topics wait in a few of the node, which no entry of topics opens."""
    if name in WAITING_TOPICS:
        return Resource(ResourceType.CLUSTER, ALL_NAMES), UPDATE
    return topic_need(name, actions)


Header: TypeAlias = dict[str, Any]
Needs: TypeAlias = Callable[[Header, str], Iterable[Need]]

SUPER: Final = None
"""Stands for operations that only super users may ask for."""
_DISPATCHED: Final = "INNER_MULTI_DISPATCH"
_OF_GATEWAYS: Final = frozenset(("moved", "forwarded", "client", FIELD))
"""Fields with which a process of the node speaks for others."""


def needs_of(kind: str, header: Header, cluster: str) -> list[Need] | None:
    """All that the sender of ``header`` to a process of ``kind`` must be allowed; None for what only super users may."""
    found = NEEDS.get(kind, {}).get(header["op"])
    if found is None or not _OF_GATEWAYS.isdisjoint(header):
        return None
    return list(found(header, cluster))


def topic_needs(name: object, actions: Actions) -> Iterator[Need]:
    """The need of a topic; for a group's retry topic that of the group."""
    if not isinstance(name, str) or not name:
        return
    yield topic_need(name, actions)


def _topics(names: object, actions: Actions) -> Iterator[Need]:
    """Needs of a list of topics, or of lists that begin with one."""
    for one in dict.fromkeys(_firsts(names)):
        yield from topic_needs(one, actions)


def _firsts(names: object) -> Iterator[str]:
    for one in names if isinstance(names, list) else ():
        first = one[0] if isinstance(one, list) and one else one
        if isinstance(first, str):
            yield first


def _group(name: object, actions: Actions) -> Iterator[Need]:
    if isinstance(name, str) and name:
        yield Resource(ResourceType.GROUP, name), actions


def _nothing(header: Header, cluster: str) -> Iterator[Need]:
    return iter(())


def _fields(topic: Actions | None = None, group: Actions | None = None) -> Needs:
    def needs(header: Header, cluster: str) -> Iterator[Need]:
        if topic is not None:
            yield from topic_needs(header.get("topic"), topic)
        if group is not None:
            yield from _group(header.get("group"), group)

    return needs


def _cluster(actions: Actions) -> Needs:
    return lambda header, cluster: iter(((Resource(ResourceType.CLUSTER, cluster), actions),))


def _all(kind: ResourceType, actions: Actions) -> Needs:
    return lambda header, cluster: iter(((Resource(kind, ALL_NAMES), actions),))


def _send(header: Header, cluster: str) -> Iterable[Need]:
    """No generator, and no list but one: it is asked for each send."""
    topic, properties = header.get("topic"), header.get("properties")
    needs = [topic_need(topic, PUB)] if isinstance(topic, str) and topic else []
    further = properties.get(_DISPATCHED) if isinstance(properties, dict) else None
    if isinstance(further, str):
        needs += _topics(further.split(","), PUB)
    return needs


def _memory_use(header: Header, cluster: str) -> Iterator[Need]:
    yield from topic_needs(header.get("topic"), SUB_GET) if header.get("topic") else _cluster(GET)(header, cluster)


def _pull(header: Header, cluster: str) -> Iterator[Need]:
    grouped = header.get("group")
    yield from _read(header.get("topic"), SUB if grouped else SUB_GET)
    yield from _group(grouped, SUB)


def _query(header: Header, cluster: str) -> Iterator[Need]:
    yield from _read(header.get("topic"), SUB_GET)


def _read(name: object, actions: Actions) -> Iterator[Need]:
    if isinstance(name, str) and name:
        yield read_need(name, actions)


def _pop(header: Header, cluster: str) -> Iterator[Need]:
    yield from _group(header.get("group"), SUB)
    for one in dict.fromkeys(_firsts(header.get("topics"))):
        yield from _read(one, SUB)


def _create(header: Header, cluster: str) -> Iterator[Need]:
    yield from topic_needs(header.get("topic"), UPDATE | CREATE if header.get("update") else CREATE)


def _join(header: Header, cluster: str) -> Iterator[Need]:
    yield from _group(header.get("group"), SUB)
    yield from _topics(header.get("topics"), SUB)


def _heartbeats(header: Header, cluster: str) -> Iterator[Need]:
    members = header.get("members")
    groups = [one.get("group") for one in members if isinstance(one, dict)] if isinstance(members, list) else []
    for one in dict.fromkeys(one for one in groups if isinstance(one, str)):
        yield from _group(one, SUB)


def _group_config(header: Header, cluster: str) -> Iterator[Need]:
    yield from _group(header.get("group"), SHOWN if header.get("set") is None else CREATE | UPDATE)


def _commit(header: Header, cluster: str) -> Iterator[Need]:
    by_hand = bool(header.get("reset")) and header.get("member") is None
    yield from _group(header.get("group"), UPDATE if by_hand else SUB_UPDATE)
    yield from _topics(header.get("offsets"), SUB_UPDATE)


def _fetch(header: Header, cluster: str) -> Iterator[Need]:
    yield from _group(header.get("group"), SUB_GET)
    yield from _topics(header.get("queues"), SUB_GET)


def _settle(header: Header, cluster: str) -> Iterator[Need]:
    yield from _group(header.get("group"), SUB)
    yield from _topics(header.get("receipts"), SUB)


def _end(header: Header, cluster: str) -> Iterator[Need]:
    if header.get("by_person"):
        yield from _cluster(UPDATE)(header, cluster)
    else:
        yield from _group(header.get("group"), PUB_SUB)


def _register(header: Header, cluster: str) -> Iterator[Need]:
    yield from _group(header.get("group"), PUB_SUB)
    for one in dict.fromkeys(_firsts(header.get("groups"))):
        yield from _group(one, PUB_SUB)


_OF_GROUP: Final = _fields(group=SUB)
_CHANGES_NODE: Final = _cluster(UPDATE)
_SENDS: Final[dict[str, Needs | None]] = {"hello": _nothing, "send": _send, "append": _send}

CHANGES: Final = frozenset(
    {
        "topic.create",
        "topic.delete",
        "group.config",
        "group.delete",
        "group.forbid",
        "offset.forget",
        "expire",
        "stop",
        "config.set",
        "config.unset",
        "retry",
        "restart",
        "skip",
        "reset",
    }
)
"""Operations that change the node; the process that carries one out writes it to the audit log."""

NEEDS: Final[Mapping[str, Mapping[str, Needs | None]]] = {
    "admin": {
        "metadata": _nothing,
        "mover.start": _nothing,
        "status": _cluster(GET),
        "set_aside": _cluster(GET),
        "stop": _CHANGES_NODE,
        "config.show": _cluster(GET),
        "config.set": _CHANGES_NODE,
        "config.unset": _CHANGES_NODE,
    },
    "writer": {**_SENDS, "batch": _send, "send_back": _fields(topic=SUB, group=SUB), "recall": _fields(topic=PUB)},
    "memory": _SENDS,
    "reader": {
        "pull": _pull,
        "offsets": _fields(topic=SHOWN),
        "view": _all(ResourceType.TOPIC, SUB_GET),  # the reader asks for that of what it finds
        "query": _query,
        "memory": _memory_use,
    },
    "coordinator": {
        "topic.route": _fields(topic=SEEN),
        "topic.create": _create,
        "topic.own": SUPER,
        "topic.reply": _nothing,
        "topic.list": _all(ResourceType.TOPIC, LIST),
        "topic.describe": _fields(topic=SEEN | SHOWN),
        "topic.delete": _fields(topic=DELETE),
        "group.join": _join,
        "group.heartbeat": _OF_GROUP,
        "group.heartbeats": _heartbeats,
        "group.leave": _OF_GROUP,
        "group.list": _all(ResourceType.GROUP, LIST),
        "group.describe": _fields(group=SHOWN),
        "group.positions": _cluster(GET),
        "group.retry_topics": _OF_GROUP,
        "group.config": _group_config,
        "group.configs": _all(ResourceType.GROUP, LIST),
        "group.delete": _fields(group=DELETE),
        "group.forbid": _fields(topic=UPDATE, group=UPDATE),
        "group.broadcast": _OF_GROUP,
        "group.share": SUPER,
        "client.heard": SUPER,
        "client.list": _cluster(GET),
        "offset.commit": _commit,
        "offset.fetch": _fetch,
        "offset.forget": _fields(group=DELETE | UPDATE),
    },
    "pop": {
        "pop": _pop,
        "ack": _settle,
        "nack": _settle,
        "extend": _settle,
        "blocked": _fields(topic=SUB, group=SUB),
        "in_flight": _fields(group=SUB_GET),
    },
    "transaction": {
        "transaction.end": _end,
        "transaction.register": _register,
        "transaction.leave": _nothing,
        "transaction.list": _cluster(GET),
    },
    "cleanup": {"expire": _CHANGES_NODE},
    "dispatcher": dict.fromkeys(("query", "retry", "restart", "skip", "reset"), _CHANGES_NODE),
}
"""By kind of process, then by operation. ``SUPER``: only super users."""
