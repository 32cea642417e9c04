"""Connected clients: heartbeats, members of groups, and what they are told (remoting 2.3 to 2.5).

A consumer of RocketMQ chooses its queues itself, from the list of its group's members. The list has the members of this server
and of all others: :mod:`.sessions` speaks for the clients at the node's coordinator. A topic that other brokers have too is
shared out by RocketMQ's clients alone (:mod:`.neighbours`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq_plugins.rocketmq.broker.allowances import Allowances
from commitmq_plugins.rocketmq.broker.client_news import ClientNews
from commitmq_plugins.rocketmq.broker.codes import filter_refusal
from commitmq_plugins.rocketmq.broker.neighbours import Neighbours
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.registry import BROADCASTING, Changes, Registry
from commitmq_plugins.rocketmq.broker.requesters import Requesters
from commitmq_plugins.rocketmq.broker.sessions import Session, Sessions
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.bodies.heartbeat import CheckClientRequestBody, HeartbeatData
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command, request
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.headers.groups import UnregisterClientRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

EXPIRY_MS: Final = 120_000
_LAST_WORDS_S: Final = 2.0
_SCAN_S: Final = 10.0
_NOTIFY_S: Final = 0.02
_TURN_S: Final = 1.0


class Clients:
    """See the module."""

    def __init__(
        self, node: Node, topics: Topics, allowances: Allowances, loop: asyncio.AbstractEventLoop, log: Log
    ) -> None:
        self._node, self._topics, self._loop, self._log = node, topics, loop, log
        self._allowances = allowances
        self.registry: Registry[Connection] = Registry(lambda one, other: one.user == other.user)
        self.requesters = Requesters(self.registry)
        self.sessions = Sessions(node, loop, log, self.notify)
        self.news = ClientNews(node, self.registry, self.sessions.instance, log)
        self._leaving: dict[tuple[Connection, str], Session] = {}
        self._left_at: dict[tuple[Connection, str], float] = {}
        self._changed: set[str] = set()
        self._no_broadcast: set[str] = set()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.producers_changed: list[Any] = []
        """Functions that are called with the names of producer groups that came or went."""
        self.pops: Callable[[str], bool] = lambda group: False
        """Whether consumers of a group share queues, so that it has no members at the coordinator."""
        self.neighbours: Neighbours | None = None
        """Knows the topics that other brokers have too: groups have no members for them at the coordinator."""
        self.on_turn: Callable[[], None] | None = None
        """Is called every second."""
        self._scanner = loop.call_later(_SCAN_S, self._scan)
        self._turner = loop.call_later(_TURN_S, self._turn)
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_config,
        }

    # ------------------------------------------------------------ requests

    async def heartbeat(self, connection: Connection, command: Command) -> Command:
        """Request 34."""
        data = HeartbeatData.decode(command.body)
        if connection.is_closed:  # it has left already
            return command.answer()
        self._check(connection, data)
        made = False
        for consumer in data.consumers:
            if consumer.message_model != BROADCASTING:
                try:
                    made |= await self._topics.retry_topics(consumer.group_name, user=connection.user, tells=False)
                except ProtocolError as error:
                    if error.code != "NO_PERMISSION":  # the group keeps no failed messages
                        raise
            elif not data.without_sub:
                await self._look_at_broadcast(consumer.group_name, connection.user)
        if made:
            await self._topics.tell()
        if self.neighbours is not None:
            await self.neighbours.learn({one.topic for consumer in data.consumers for one in consumer.subscriptions})
        if connection.is_closed:  # meanwhile: nobody would ever take such a member out again
            return command.answer()
        known = {one.group_name: self._fingerprint(one.group_name) for one in data.consumers}
        now_ms = time.monotonic_ns() // 1_000_000
        changes = self.registry.heartbeat(connection, data, command.language, command.version, now_ms)
        for client_id, holder in changes.kept:
            log = self._log.warning
            log("a client has the id of another user's", id=client_id[:255], user=connection.user, holder=holder.user)
        self._apply(changes)
        self.news.changed(connection)
        changed = not data.heartbeat_fingerprint or any(one != data.heartbeat_fingerprint for one in known.values())
        return command.answer(
            ext_fields={
                "IS_SUPPORT_HEART_BEAT_V2": "true",
                "IS_SUB_CHANGE": "true" if changed else "false",
            }
        )

    def _check(self, connection: Connection, data: HeartbeatData) -> None:
        """Raises ProtocolError for more groups than a connection may make or be in, or too many topics."""
        most = self._node.config.groups.max_topics_per_member
        for consumer in data.consumers:
            if len(consumer.subscriptions) > most:
                raise ProtocolError(
                    "LIMIT_EXCEEDED",
                    f"group {consumer.group_name:.100} subscribes to {len(consumer.subscriptions)} topics, at most {most} are"
                    " allowed (groups.max_topics_per_member)",
                )
        self._allowances.groups(connection, [one.group_name for one in data.consumers if self.is_new(one.group_name)])
        self._allowances.memberships(connection, self.registry.memberships(connection, data))

    def is_new(self, group: str) -> bool:
        """Whether nobody seems to have used the group yet."""
        return group not in self.registry.groups and self._topics.get(f"%RETRY%{group}") is None

    def charge(self, connection: Connection, group: str) -> None:
        """A request names ``group``, which the node makes if there is none. Raises ProtocolError."""
        if self.is_new(group):
            self._allowances.groups(connection, (group,))

    def _fingerprint(self, group: str) -> int:
        found = self.registry.groups.get(group)
        return 0 if found is None else found.fingerprint

    async def _look_at_broadcast(self, group: str, user: str) -> None:
        """Whether the group may broadcast. Only its first heartbeat waits for the answer.

        A client sends its second heartbeat at the moment in which it takes its queues, and drops the one that would tell about
        them while it waits for the answer to the other: it would receive nothing for 30 s.
        """
        known = self.registry.groups.get(group)
        if known is None or known.message_model != BROADCASTING:
            await self._ask_broadcast(group, user)
        elif group not in self._asking:
            task = self._asking[group] = self._loop.create_task(self._ask_broadcast(group, user))
            task.add_done_callback(lambda _: self._asking.pop(group, None))

    async def _ask_broadcast(self, group: str, user: str) -> None:
        try:
            await self._node.ask(
                "coordinator", "group.broadcast", group=group, **self._node.on_behalf_of("group.broadcast", user)
            )
            self._no_broadcast.discard(group)
        except ProtocolError as error:
            if error.code == "NO_PERMISSION":
                self._no_broadcast.add(group)

    def may_broadcast(self, group: str) -> bool:
        return group not in self._no_broadcast

    async def unregister(self, connection: Connection, command: Command) -> Command:
        """Request 35."""
        header = UnregisterClientRequestHeader.decode(command.ext_fields)
        self._apply(self.registry.unregister(connection, header.producer_group, header.consumer_group))
        self.news.changed(connection)
        return command.answer()

    def consumer_list(self, connection: Connection, command: Command) -> Command:
        """Request 38: all members of a group."""
        group = command.ext_fields.get("consumerGroup", "")
        ids = self.member_ids(group)
        if not ids:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return command.answer(body=dumps({"consumerIdList": ids}))

    def member_ids(self, group: str) -> list[str]:
        """The client ids of a group's members, those of the node's own consumers included."""
        found = self.registry.groups.get(group)
        ids = set() if found is None else set(found.client_ids)
        for client_id in list(ids):
            session = self.sessions.get(group, client_id)
            if session is not None:
                ids.update(session.others)
        return sorted(ids)

    async def check_config(self, connection: Connection, command: Command) -> Command:
        """Request 46: whether a filter can be compiled."""
        body = CheckClientRequestBody.decode(command.body)
        subscription = body.subscription_data
        if subscription is None or subscription.expression_type in ("", "TAG"):
            return command.answer()
        fields = {"topic": subscription.topic, "queue": 0, "offset": 0, "max_messages": 1,
                  "filter": subscription.sub_string, "filter_type": subscription.expression_type}  # fmt: skip
        try:
            await self._node.exchange(self._node.reader_of(subscription.topic, 0), "pull", fields)
        except ProtocolError as error:
            refused = filter_refusal(error.code, error.message, subscription.expression_type)
            if refused is not None:
                return command.answer(*refused)
        return command.answer()

    def closed(self, connection: Connection) -> None:
        """The connection ended."""
        self._allowances.left(connection)
        self.requesters.closed(connection)
        self._apply(self.registry.closed(connection))
        self.news.closed(connection)

    # ------------------------------------------------------------ pulls

    def pulls(self, connection: Connection, group: str, topic: str, queue: int) -> None:
        """The client asks for messages of this queue."""
        session = self._session_of(connection, group)
        if session is not None:
            session.reading[topic, queue] = 0.0

    def pulled(self, connection: Connection, group: str, topic: str, queue: int) -> None:
        """It has its answer."""
        session = self._session_of(connection, group)
        if session is not None and (topic, queue) in session.reading:
            session.reading[topic, queue] = self._loop.time()

    def _session_of(self, connection: Connection, group: str) -> Session | None:
        client_id = self.registry.client_of(connection, group)
        return None if client_id is None else self.sessions.get(group, client_id)

    def member_name(self, connection: Connection, group: str, topic: str) -> str | None:
        """As whom the client commits: a member's name, None for a consumer that is no member of the group."""
        session = self._session_of(connection, group) or self._leaving.get((connection, group))
        return session.client_id if session is not None and session.joined and topic in session.topics else None

    # ------------------------------------------------------------ changes

    def _apply(self, changes: Changes[Connection]) -> None:
        """Tell the coordinator and the clients what changed."""
        for left, client_id, link in changes.left:
            session = self.sessions.take_out(left, client_id)
            if session is not None and session.joined:
                seat = link, left
                self._leaving[seat] = session
                self.sessions.leave(session, partial(self._left, seat))
        for name in changes.groups:
            group = self.registry.groups.get(name)
            if group is None or group.message_model == BROADCASTING:
                continue
            self._subscribe_all(name)
            self.notify(name)
        for listener in self.producers_changed:
            for name in changes.producers:
                listener(name)

    def _left(self, seat: tuple[Connection, str]) -> None:
        self._leaving.pop(seat, None)
        now = self._loop.time()
        self._left_at.pop(seat, None)
        self._left_at[seat] = now  # the last one, so the oldest are the first
        while self._left_at[oldest := next(iter(self._left_at))] <= now - _LAST_WORDS_S:
            del self._left_at[oldest]

    def is_leaving(self, connection: Connection, group: str) -> bool:
        """Whether the client leaves the group now, or left a moment ago: its last offsets come beside its leave."""
        seat = connection, group
        return seat in self._leaving or self._left_at.get(seat, 0.0) > self._loop.time() - _LAST_WORDS_S

    def subscribed(self) -> set[str]:
        """The topics of all groups whose members share them."""
        return {topic for group in self.registry.groups.values() if group.message_model != BROADCASTING
                for topic in group.subscriptions}  # fmt: skip

    def spread_changed(self, topics: set[str]) -> None:
        """These topics are at other brokers too now, or at this one alone."""
        for name, group in self.registry.groups.items():
            if group.message_model != BROADCASTING and not topics.isdisjoint(group.subscriptions):
                self._subscribe_all(name)
                self.notify(name)

    def _subscribe_all(self, name: str) -> None:
        """Each member of the group joins at the coordinator, for the topics that are at this broker only."""
        group, known = self.registry.groups[name], self.neighbours
        topics = frozenset(one for one in group.subscriptions if known is None or not known.is_spread(one))
        if topics and not self.pops(name):
            for member in group.members.values():
                self.sessions.subscribe(name, member.client_id, topics)
            return
        for key in self.sessions.keys_of(name):
            session = self.sessions.take_out(*key)
            if session is not None and session.joined:
                self.sessions.leave(session)

    def pops_changed(self, name: str) -> None:
        """The way in which a group receives is another one, perhaps: its members leave or join."""
        group = self.registry.groups.get(name)
        if group is not None and group.message_model != BROADCASTING:
            self._subscribe_all(name)
            self.notify(name)

    def notify(self, group: str) -> None:
        """Tell all clients of a group soon that its members changed: once for the changes of a moment."""
        if not self._changed:
            self._loop.call_later(_NOTIFY_S, self._notify_all)
        self._changed.add(group)

    def _notify_all(self) -> None:
        changed, self._changed = self._changed, set()
        for group in changed:
            found = self.registry.groups.get(group)
            for connection in () if found is None else found.members:
                connection.send(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}, oneway=True))

    def _scan(self) -> None:
        """End clients that send no heartbeats."""
        self._scanner = self._loop.call_later(_SCAN_S, self._scan)
        for connection in self.registry.silent(time.monotonic_ns() // 1_000_000 - EXPIRY_MS):
            self._log.info("a client sends no heartbeat", peer=str(connection.peer))
            connection.close()
            self.closed(connection)

    def _turn(self) -> None:
        self._turner = self._loop.call_later(_TURN_S, self._turn)
        self.news.turn()
        if self.on_turn is not None:
            self.on_turn()

    async def close(self) -> None:
        """All clients leave their groups."""
        self._scanner.cancel()
        self._turner.cancel()
        await self.news.close()
        await self.sessions.close()
