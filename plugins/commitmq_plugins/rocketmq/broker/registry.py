"""Which clients are connected, with their producer and consumer groups (remoting 2.3 to 2.5). Pure: no socket, no clock.

A client is known by its connection. Its id is its own choice, and stays with the user whose client has it. Its groups end with
a heartbeat that leaves them out, with UNREGISTER_CLIENT, with the connection, and when no heartbeat came for ``expiry_ms``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from commitmq_plugins.rocketmq.remoting.bodies import ConsumerData, HeartbeatData, SubscriptionData
from commitmq_plugins.rocketmq.remoting.codes import LanguageCode

BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"

Link = TypeVar("Link")
"""A connection; anything that can be hashed."""


@dataclass(slots=True)
class ClientChannelInfo:
    """One client of a group, or of a producer group."""

    client_id: str
    language: LanguageCode
    version: int
    heard_ms: int


@dataclass(slots=True)
class ConsumerGroup(Generic[Link]):
    """The members of a group, and what the newest heartbeat said of it."""

    name: str
    members: dict[Link, ClientChannelInfo] = field(default_factory=dict)
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = CLUSTERING
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    fingerprint: int = 0

    @property
    def client_ids(self) -> list[str]:
        return sorted(member.client_id for member in self.members.values())


@dataclass(slots=True)
class RegistryChanges(Generic[Link]):
    """What one call changed: groups whose members or topics are others now, and groups without members."""

    groups: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    producers: set[str] = field(default_factory=set)
    """Producer groups that have their first member, or lost their last one."""
    kept: list[tuple[str, Link]] = field(default_factory=list)
    """Client ids that stay with the connections that have them: those of another user asked for them."""
    left: list[tuple[str, str, Link]] = field(default_factory=list)
    """Consumer group, client id and connection of members that are gone."""


class Registry(Generic[Link]):
    """The connected clients, with their producer and consumer groups. ``groups`` and ``producers`` may be read."""

    def __init__(self, same_user: Callable[[Link, Link], bool] = lambda one, other: True) -> None:
        """``same_user``: whether two connections are those of one user, who may take a client id from itself."""
        self._same_user = same_user
        self.groups: dict[str, ConsumerGroup[Link]] = {}
        self.producers: dict[str, dict[Link, ClientChannelInfo]] = {}
        self._consumes: dict[Link, set[str]] = {}
        self._produces: dict[Link, set[str]] = {}
        self._clients: dict[str, Link] = {}
        self._turn = 0

    def __len__(self) -> int:
        """Connections with a group."""
        return len(self.links())

    # ------------------------------------------------------------ changes

    def heartbeat(
        self, link: Link, data: HeartbeatData, language: LanguageCode, version: int, now_ms: int
    ) -> RegistryChanges[Link]:
        """Take a heartbeat. It names all groups of the client that live."""
        changes: RegistryChanges[Link] = RegistryChanges()
        self._rename(link, data.client_id, changes)
        for consumer in data.consumers:
            self._consumer(link, data, consumer, ClientChannelInfo(data.client_id, language, version, now_ms), changes)
        for group in data.producer_groups:
            members = self.producers.get(group)
            if members is None:
                members = self.producers[group] = {}
                changes.producers.add(group)
            members[link] = ClientChannelInfo(data.client_id, language, version, now_ms)
            self._produces.setdefault(link, set()).add(group)
        if data.producer_groups:
            holder = self._clients.setdefault(data.client_id, link)
            if holder == link or self._same_user(holder, link):
                self._clients[data.client_id] = link
            else:
                changes.kept.append((data.client_id, holder))
        return changes

    def _rename(self, link: Link, client_id: str, changes: RegistryChanges[Link]) -> None:
        """A client with another id than before is another member: under its old id it leaves all groups."""
        for name in self._consumes.get(link, ()):
            member = self.groups[name].members[link]
            if member.client_id != client_id:
                changes.left.append((name, member.client_id, link))
                changes.groups.add(name)
                member.client_id = client_id
        for name in self._produces.get(link, ()):
            member = self.producers[name][link]
            if member.client_id != client_id:
                if self._clients.get(member.client_id) == link:
                    del self._clients[member.client_id]
                member.client_id = client_id

    def _consumer(
        self,
        link: Link,
        data: HeartbeatData,
        consumer: ConsumerData,
        member: ClientChannelInfo,
        changes: RegistryChanges[Link],
    ) -> None:
        name = consumer.group_name
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = ConsumerGroup(name)
        if link not in group.members:
            changes.groups.add(name)
        group.members[link] = member
        self._consumes.setdefault(link, set()).add(name)
        group.consume_type, group.message_model = consumer.consume_type, consumer.message_model
        group.consume_from_where = consumer.consume_from_where
        if not data.without_sub:
            if self._subscribe(group, consumer.subscriptions):
                changes.groups.add(name)
            group.fingerprint = data.heartbeat_fingerprint

    @staticmethod
    def _subscribe(group: ConsumerGroup[Link], subscriptions: Iterable[SubscriptionData]) -> bool:
        """Whether the set of topics is another one now."""
        topics = {one.topic: one for one in subscriptions}
        changed = topics.keys() != group.subscriptions.keys()
        for topic, one in topics.items():
            known = group.subscriptions.get(topic)
            if known is None or one.sub_version >= known.sub_version:
                group.subscriptions[topic] = one
        for topic in group.subscriptions.keys() - topics.keys():
            del group.subscriptions[topic]
        return changed

    def unregister(self, link: Link, producer_group: str | None, consumer_group: str | None) -> RegistryChanges[Link]:
        """The client of ``link`` leaves these groups."""
        changes: RegistryChanges[Link] = RegistryChanges()
        if producer_group:
            self._leave_producers(link, producer_group, changes)
        if consumer_group:
            self._leave(link, consumer_group, changes)
        return changes

    def closed(self, link: Link) -> RegistryChanges[Link]:
        """The connection ended."""
        changes: RegistryChanges[Link] = RegistryChanges()
        for group in list(self._produces.get(link, ())):
            self._leave_producers(link, group, changes)
        for group in list(self._consumes.get(link, ())):
            self._leave(link, group, changes)
        return changes

    def silent(self, before_ms: int) -> set[Link]:
        """Connections whose newest heartbeat, of any group, is older: they are to be closed."""
        heard: dict[Link, int] = {}
        for members in (*(group.members for group in self.groups.values()), *self.producers.values()):
            for link, member in members.items():
                heard[link] = max(heard.get(link, 0), member.heard_ms)
        return {link for link, at in heard.items() if at < before_ms}

    def _leave_producers(self, link: Link, group: str, changes: RegistryChanges[Link]) -> None:
        members = self.producers.get(group, {})
        member = members.pop(link, None)
        if member is None:
            return
        if not members:
            del self.producers[group]
            changes.producers.add(group)
        if self._clients.get(member.client_id) == link:
            del self._clients[member.client_id]
        self._forget(self._produces, link, group)

    def _leave(self, link: Link, name: str, changes: RegistryChanges[Link]) -> None:
        group = self.groups.get(name)
        member = None if group is None else group.members.pop(link, None)
        if group is None or member is None:
            return
        changes.groups.add(name)
        changes.left.append((name, member.client_id, link))
        if not group.members:
            del self.groups[name]
            changes.ended.add(name)
        self._forget(self._consumes, link, name)

    @staticmethod
    def _forget(table: dict[Link, set[str]], link: Link, group: str) -> None:
        table[link].discard(group)
        if not table[link]:
            del table[link]

    # ------------------------------------------------------------ look-ups

    def memberships(self, link: Link, data: HeartbeatData) -> int:
        """In how many groups, of consumers and of producers, ``link`` will be after this heartbeat."""
        consumes = {one.group_name for one in data.consumers} | self._consumes.get(link, set())
        return len(consumes) + len(self._produces.get(link, set()).union(data.producer_groups))

    def links(self) -> set[Link]:
        """Connections with a group."""
        return self._consumes.keys() | self._produces.keys()

    def groups_of(self, link: Link) -> tuple[list[ConsumerGroup[Link]], list[str], ClientChannelInfo | None]:
        """The groups in which a client consumes, those in which it produces, and what its newest heartbeat said of itself."""
        consumes = [self.groups[name] for name in self._consumes.get(link, ())]
        produces = list(self._produces.get(link, ()))
        members = [*(one.members[link] for one in consumes), *(self.producers[name][link] for name in produces)]
        return consumes, produces, max(members, key=lambda one: one.heard_ms, default=None)

    def producer(self, group: str, may: Callable[[Link], bool]) -> Link | None:
        """A connection of a producer of ``group`` that ``may`` be asked, another one each time."""
        links = [link for link in self.producers.get(group, ()) if may(link)]
        self._turn += 1
        return links[self._turn % len(links)] if links else None

    def client(self, client_id: str) -> Link | None:
        """The connection of the producer with this client id."""
        return self._clients.get(client_id)

    def member(self, group: str, client_id: str) -> Link | None:
        """The connection of the consumer with this client id."""
        found = self.groups.get(group)
        if found is None:
            return None
        return next((link for link, one in found.members.items() if one.client_id == client_id), None)

    def client_of(self, link: Link, group: str) -> str | None:
        """The client id of ``link`` in ``group``."""
        found = self.groups.get(group)
        member = None if found is None else found.members.get(link)
        return None if member is None else member.client_id
