"""Connected clients: heartbeats, members of groups, and what they are told (remoting 2.3 to 2.5).

A consumer of RocketMQ chooses its queues itself, from the list of its group's members. For the node's coordinator each of
them is a member of its group, beside the node's own consumers: both have the same rule, so both come to the same result. This
server speaks for its clients there: it joins, tells which queues they read, and passes on when a member came or went.

    * A queue that a client has to give back counts as its own until it has not pulled from it for ``_QUIET_S``.
    * The list of a group has the members of this server and of all others.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq_plugins.rocketmq.broker.codes import refusal_of
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.registry import BROADCASTING, Changes, Registry
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.bodies.heartbeat import CheckClientRequestBody, HeartbeatData
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command, request
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.headers.groups import UnregisterClientRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

EXPIRY_MS: Final = 120_000
_SCAN_S: Final = 10.0
_TURN_S: Final = 0.1
_HEARTBEAT_S: Final = 3.0
_SOON_S: Final = 0.3
_SESSION_MS: Final = 10_000
_QUIET_S: Final = 0.5

Queue = tuple[str, int]


@dataclass(slots=True)
class _Session:
    """One client in one group, as the coordinator knows it."""

    group: str
    client_id: str
    topics: frozenset[str] = frozenset()
    joined: bool = False
    generation: int = 0
    due: float = 0.0
    assigned: set[Queue] = field(default_factory=set)
    told: set[Queue] = field(default_factory=set)
    reading: dict[Queue, float] = field(default_factory=dict)
    """Queues with a pull: when it was answered, 0 while one is under way."""
    others: list[str] = field(default_factory=list)
    """Members of the group that are not clients of this server."""
    is_asking: bool = False


class Clients:
    """See the module."""

    def __init__(self, node: Node, topics: Topics, loop: asyncio.AbstractEventLoop, log: Log) -> None:
        self._node, self._topics, self._loop, self._log = node, topics, loop, log
        self.registry: Registry[Connection] = Registry()
        self.instance = f"rocketmq-{os.getpid()}-{os.urandom(4).hex()}"
        """Names this process among those that speak for clients."""
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._leaving: dict[tuple[Connection, str], _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._no_broadcast: set[str] = set()
        self.leaving: Callable[[str], Awaitable[None]] | None = None
        """Is awaited with the name of a group before a member leaves it: its last offsets are stored as the member's."""
        self.producers_changed: list[Any] = []
        """Functions that are called with the names of producer groups that came or went."""
        self.pops: Callable[[str], bool] = lambda group: False
        """Whether consumers of a group share queues, so that it has no members at the coordinator."""
        self.on_turn: Callable[[], None] | None = None
        self._turning = loop.create_task(self._turn())
        self._next_scan = time.monotonic() + _SCAN_S
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
        for consumer in data.consumers:
            if consumer.message_model != BROADCASTING:
                try:
                    await self._topics.retry_topics(consumer.group_name)
                except ProtocolError as error:
                    if error.code != "NO_PERMISSION":  # the group keeps no failed messages
                        return command.answer(*refusal_of(error))
            elif not data.without_sub:
                await self._ask_broadcast(consumer.group_name)
        if connection.is_closed:  # meanwhile: nobody would ever take such a member out again
            return command.answer()
        known = {one.group_name: self._fingerprint(one.group_name) for one in data.consumers}
        now_ms = time.monotonic_ns() // 1_000_000
        self._apply(self.registry.heartbeat(connection, data, command.language, command.version, now_ms))
        changed = not data.heartbeat_fingerprint or any(one != data.heartbeat_fingerprint for one in known.values())
        return command.answer(
            ext_fields={
                "IS_SUPPORT_HEART_BEAT_V2": "true",
                "IS_SUB_CHANGE": "true" if changed else "false",
            }
        )

    def _fingerprint(self, group: str) -> int:
        found = self.registry.groups.get(group)
        return 0 if found is None else found.fingerprint

    async def _ask_broadcast(self, group: str) -> None:
        try:
            await self._node.ask("coordinator", "group.broadcast", group=group)
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
            session = self._sessions.get((group, client_id))
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
            if "filter is wrong" in error.message:
                return command.answer(ResponseCode.SUBSCRIPTION_PARSE_FAILED, error.message)
            if error.code == "INVALID_PARAMETER" and "filter" in error.message:
                remark = f"The broker does not support consumer to filter message by {subscription.expression_type}"
                return command.answer(ResponseCode.SYSTEM_ERROR, remark)
        return command.answer()

    def closed(self, connection: Connection) -> None:
        """The connection ended."""
        self._apply(self.registry.closed(connection))

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
            session.reading[topic, queue] = time.monotonic()

    def _session_of(self, connection: Connection, group: str) -> _Session | None:
        client_id = self.registry.client_of(connection, group)
        return None if client_id is None else self._sessions.get((group, client_id))

    def member_name(self, connection: Connection, group: str, topic: str) -> str | None:
        """As whom the client commits: a member's name, None for a consumer that is no member of the group."""
        session = self._session_of(connection, group) or self._leaving.get((connection, group))
        return session.client_id if session is not None and session.joined and topic in session.topics else None

    # ------------------------------------------------------------ changes

    def _apply(self, changes: Changes[Connection]) -> None:
        """Tell the coordinator and the clients what changed."""
        for left, client_id, link in changes.left:
            session = self._sessions.pop((left, client_id), None)
            if session is not None and session.joined:
                self._leaving[link, left] = session
                self._spawn(self._leave(session, link))
        for name in changes.groups:
            group = self.registry.groups.get(name)
            if group is None or group.message_model == BROADCASTING:
                continue
            topics = frozenset(group.subscriptions)
            for member in group.members.values():
                self._subscribe(name, member.client_id, topics)
            self.notify(name)
        for listener in self.producers_changed:
            for name in changes.producers:
                listener(name)

    def _subscribe(self, group: str, client_id: str, topics: frozenset[str]) -> None:
        session = self._sessions.get((group, client_id))
        if not topics or self.pops(group):
            return
        if session is None:
            session = self._sessions[group, client_id] = _Session(group, client_id)
        if session.topics != topics:
            session.topics, session.joined, session.due = topics, False, 0.0

    def pops_changed(self, name: str) -> None:
        """The way in which a group receives is another one, perhaps: its members leave or join."""
        if self.pops(name):
            for key in [key for key in self._sessions if key[0] == name]:
                session = self._sessions.pop(key)
                if session.joined:
                    self._spawn(self._leave(session))
        group = self.registry.groups.get(name)
        if group is not None and group.message_model != BROADCASTING:
            for member in group.members.values():
                self._subscribe(name, member.client_id, frozenset(group.subscriptions))
            self.notify(name)

    def notify(self, group: str) -> None:
        """Tell all clients of a group that its members changed."""
        found = self.registry.groups.get(group)
        if found is None:
            return
        for connection in found.members:
            connection.send(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}, oneway=True))

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ sessions with the coordinator

    async def _turn(self) -> None:
        """Send the heartbeats that are due, and end clients that send none."""
        while True:
            await asyncio.sleep(_TURN_S)
            now = time.monotonic()
            if self.on_turn is not None:
                self.on_turn()
            for session in list(self._sessions.values()):
                if session.due <= now and not session.is_asking:
                    session.is_asking = True
                    self._spawn(self._beat(session))
            if now >= self._next_scan:
                self._next_scan = now + _SCAN_S
                for connection in self.registry.silent(time.monotonic_ns() // 1_000_000 - EXPIRY_MS):
                    self._log.info("a client sends no heartbeat", peer=str(connection.peer))
                    connection.close()
                    self.closed(connection)

    def _owned(self, session: _Session) -> set[Queue]:
        """The queues that the client reads, or may begin to read."""
        now = time.monotonic()
        for queue in [queue for queue, at in session.reading.items() if at and now - at > _QUIET_S]:
            if queue not in session.assigned:
                del session.reading[queue]
        return session.assigned | (session.told & session.reading.keys())

    async def _beat(self, session: _Session) -> None:
        """Join, or send one heartbeat."""
        owned = sorted(self._owned(session))
        fields: dict[str, Any] = {
            "group": session.group,
            "member": session.client_id,
            "instance": self.instance,
            "owned": [list(queue) for queue in owned],
            "generation": session.generation,
            "members": True,
        }
        session.due = time.monotonic() + _HEARTBEAT_S
        session.told = set(owned)
        try:
            if session.joined:
                answer = await self._node.ask("coordinator", "group.heartbeat", **fields)
            else:
                fields |= {"topics": sorted(session.topics), "session_timeout_ms": _SESSION_MS}
                answer = await self._node.ask("coordinator", "group.join", **fields)
        except ProtocolError as error:
            self._refused(session, error)
            return
        finally:
            session.is_asking = False
        session.joined = True
        self._take(session, answer)

    def _refused(self, session: _Session, error: ProtocolError) -> None:
        if error.code in ("UNKNOWN_MEMBER", "FENCED"):
            session.joined = False
            session.due = time.monotonic() + _SOON_S
            return
        session.joined = False
        self._log.warning("a client is no member of its group", group=session.group, client=session.client_id,
                          code=error.code, error=error.message)  # fmt: skip

    def _take(self, session: _Session, answer: dict[str, Any]) -> None:
        session.generation = int(answer["generation"])
        before, session.assigned = session.assigned, {(topic, queue) for topic, queue in answer["assigned"]}
        others = session.others
        if "members" in answer:
            session.others = [name for name, instance in answer["members"] if instance != self.instance]
        if session.others != others or session.assigned != before:
            self.notify(session.group)
        if answer["revoke"]:
            session.due = time.monotonic() + _SOON_S

    async def _leave(self, session: _Session, link: Connection | None = None) -> None:
        """The member's last offsets come before its leave, or together with it: clients send them without waiting."""
        try:
            if self.leaving is not None:
                await self.leaving(session.group)
            await self._node.ask(
                "coordinator", "group.leave", group=session.group, member=session.client_id, instance=self.instance
            )
        except ProtocolError as error:
            self._log.debug("a client could not leave its group", group=session.group, error=error.message)
        finally:
            if link is not None:
                self._leaving.pop((link, session.group), None)

    async def close(self) -> None:
        """All clients leave their groups."""
        self._turning.cancel()
        sessions, self._sessions = list(self._sessions.values()), {}
        await asyncio.gather(*(self._leave(session) for session in sessions if session.joined))
