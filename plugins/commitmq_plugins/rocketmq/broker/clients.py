"""Connected clients: heartbeats, members of groups, and what they are told (remoting 2.3 to 2.5).

A consumer of RocketMQ chooses its queues itself, from the list of its group's members. The list has the members of this
server and of all others: :class:`GroupSessions` speaks for the clients at the node's coordinator. A topic that other
brokers have too is shared out by RocketMQ's clients alone (:mod:`.name_servers`).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import orjson

from commitmq.errors import ProtocolError
from commitmq.format.constants import Property
from commitmq.log import Log
from commitmq.semantics.rates import FORGET_MS, MAX_CLIENTS_A_REQUEST, shortened
from commitmq_plugins.rocketmq.broker.counting import version_name
from commitmq_plugins.rocketmq.broker.name_servers import Neighbours
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, NodeClient, filter_refusal
from commitmq_plugins.rocketmq.broker.registry import BROADCASTING, Registry, RegistryChanges
from commitmq_plugins.rocketmq.broker.rights import Allowances
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.bodies import CheckClientRequestBody, HeartbeatData
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from commitmq_plugins.rocketmq.remoting.headers import UnregisterClientRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

GATEWAY: Final = "rocketmq"
_LONGEST_ID: Final = 255
_MOST_GONE: Final = 5_000
_ENOUGH_BYTES: Final = 32_768
"""Of clients in one request. Longer requests wait at the coordinator for shorter ones."""


class ClientNews:
    """Tells the coordinator who is connected here, for `commitmq client list` and the dashboard (``client.heard``).

    A client is told of when its groups change and after its heartbeats, at most once a second, and many of them with
    one request. So the cost grows with the clients, and not with what they send. While the coordinator is away nothing
    is kept but who is due. A new coordinator is told of all, and of this process even without clients: it must not take
    its members for native ones.

    ``instance`` names this process. All methods are called in the loop.
    """

    def __init__(self, node: NodeClient, registry: Registry[RemotingConnection], instance: str, log: Log) -> None:
        self._node, self._registry, self._instance, self._log = node, registry, instance, log
        self._due: dict[RemotingConnection, None] = {}
        self._gone: dict[str, None] = {}
        self._line = 0
        self._is_new = True
        self._task: asyncio.Task[None] | None = None

    def changed(self, connection: RemotingConnection) -> None:
        """A heartbeat came, or the client left a group."""
        self._due[connection] = None

    def closed(self, connection: RemotingConnection) -> None:
        """The connection ended."""
        self._due.pop(connection, None)
        if len(self._gone) < _MOST_GONE:  # the coordinator forgets the others a while later
            self._gone[connection.name] = None

    def turn(self) -> None:
        """Tell what is due. It is called once a second."""
        if self._task is not None and not self._task.done():
            return
        connections = self._node.line("coordinator").connections
        if connections != self._line:
            self._line = connections
            self._is_new = True
            self._due |= dict.fromkeys(self._registry.links())
        if self._is_new or self._due or self._gone:
            self._task = asyncio.create_task(self._tell())

    async def close(self) -> None:
        """Tell nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tell(self) -> None:
        while self._is_new or self._due or self._gone:
            told: list[RemotingConnection] = []
            rows: list[dict[str, Any]] = []
            gone, self._gone = list(self._gone), {}
            size_bytes = 0
            while self._due and len(told) < MAX_CLIENTS_A_REQUEST and size_bytes < _ENOUGH_BYTES:
                connection = next(iter(self._due))
                del self._due[connection]
                told.append(connection)
                if (row := self._row(connection)) is None:
                    gone.append(connection.name)
                else:
                    rows.append(row)
                    size_bytes += len(orjson.dumps(row))
            try:
                await self._node.ask(
                    "coordinator", "client.heard", gateway=GATEWAY, instance=self._instance, clients=rows, gone=gone
                )
                self._is_new = False
            except ProtocolError as error:
                self._log.debug("the coordinator was not told who is connected", error=str(error))
                if error.code != SERVICE_NOT_AVAILABLE:
                    self._is_new = False
                    continue
                self._due |= dict.fromkeys(one for one in told if not one.is_closed)
                return  # the coordinator forgets by itself who is gone

    def _row(self, connection: RemotingConnection) -> dict[str, Any] | None:
        """A client as ``client.heard`` has it; None for a connection without a group."""
        consumes, produces, member = self._registry.groups_of(connection)
        if member is None:
            return None
        texts = {
            "id": member.client_id[:_LONGEST_ID],
            "connection": connection.name,
            "user": connection.user[:_LONGEST_ID],
            "language": member.language.name.lower(),
            "version": version_name(member.version)[1:].replace("_", ".", 2),
        }
        names = [one.name for one in consumes], produces, {topic for one in consumes for topic in one.subscriptions}
        (groups, producers, topics), left_out = shortened(sum(map(len, texts.values())), *names)
        return {
            **texts,
            "consumes": groups,
            "produces": producers,
            "topics": topics,
            "left_out": left_out,
            "heard_ms_ago": min(max(0, time.monotonic_ns() // 1_000_000 - member.heard_ms), FORGET_MS),
        }


_HEARTBEAT_S: Final = 3.0
_STEP_S: Final = 0.25
_SOON_S: Final = 0.3
_SESSION_MS: Final = 10_000
_QUIET_S: Final = 0.5
_MEMBERS_A_REQUEST: Final = 100

Queue = tuple[str, int]
Key = tuple[str, str]
"""Group and client id."""


@dataclass(slots=True, eq=False)
class Session:
    """One client in one group, as the coordinator knows it."""

    group: str
    client_id: str
    topics: frozenset[str] = frozenset()
    joined: bool = False
    generation: int = 0
    due: float = 0.0
    assigned: set[Queue] = field(default_factory=set)
    told: set[Queue] = field(default_factory=set)
    is_told: bool = False
    """Whether the coordinator has got ``told``."""
    reading: dict[Queue, float] = field(default_factory=dict)
    """Queues with a pull: when it was answered, 0 while one is under way."""
    others: list[str] = field(default_factory=list)
    """Members of the group that are not clients of this server."""
    is_asking: bool = False

    @property
    def key(self) -> Key:
        return self.group, self.client_id

    def owned(self, now: float) -> set[Queue]:
        """The queues that the client reads, or may begin to read."""
        for queue in [queue for queue, at in self.reading.items() if at and now - at > _QUIET_S]:
            if queue not in self.assigned:
                del self.reading[queue]
        return self.assigned | (self.told & self.reading.keys())


class GroupSessions:
    """Members of groups at the node's coordinator, for which this server speaks: joins, heartbeats, queues, leaves
    (remoting 6.1).

    A consumer of RocketMQ chooses its queues itself, from the list of its group's members. For the coordinator each of
    them is a member of its group, beside the node's own consumers: both have the same rule, so both come to the same
    result.

        * A queue that a client has to return counts as its own until it has not pulled from it for ``_QUIET_S``.
        * Heartbeats are due at whole steps of ``_STEP_S``, and those of one step are few requests. A heartbeat repeats
          the queues of a member only when they are others. So the cost grows with what changes, and hardly with what
          exists.

    ``notify`` is called with a group whose members or queues are others now.
    """

    def __init__(
        self, node: NodeClient, loop: asyncio.AbstractEventLoop, log: Log, notify: Callable[[str], None]
    ) -> None:
        self._node, self._loop, self._log, self._notify = node, loop, log, notify
        self.instance = f"rocketmq-{os.getpid()}-{os.urandom(4).hex()}"
        """Names this process among those that speak for clients."""
        self.leaving: Callable[[str], Awaitable[None]] | None = None
        """Is awaited with the name of a group before a member leaves it: its last offsets are stored as the member's."""
        self._sessions: dict[Key, Session] = {}
        self._due: list[tuple[float, int, Session]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, group: str, client_id: str) -> Session | None:
        """The session of a client in a group."""
        return self._sessions.get((group, client_id))

    def keys_of(self, group: str) -> list[Key]:
        """The sessions of a group."""
        return [key for key in self._sessions if key[0] == group]

    def subscribe(self, group: str, client_id: str, topics: frozenset[str]) -> None:
        """The client reads these topics: it joins soon, unless it has joined with the same."""
        session = self._sessions.get((group, client_id))
        if session is None:
            session = self._sessions[group, client_id] = Session(group, client_id)
        if session.topics != topics:
            session.topics, session.joined = topics, False
            self._plan(session, self._loop.time())

    def take_out(self, group: str, client_id: str) -> Session | None:
        """Forget the session. :meth:`leave` must follow if it has joined."""
        return self._sessions.pop((group, client_id), None)

    def leave(self, session: Session, then: Callable[[], None] | None = None) -> None:
        """Let the member leave, and call ``then``."""
        self._spawn(self._leave(session, then))

    async def close(self) -> None:
        """All clients leave their groups."""
        if self._timer is not None:
            self._timer.cancel()
        sessions, self._sessions = list(self._sessions.values()), {}
        await asyncio.gather(*(self._leave(session) for session in sessions if session.joined))

    # ------------------------------------------------------------ times

    def _plan(self, session: Session, due: float) -> None:
        session.due = due
        heapq.heappush(self._due, (due, next(self._numbers), session))
        self._arm()

    def _later(self) -> float:
        """The time of the next heartbeat: at a whole step, together with others."""
        return math.ceil((self._loop.time() + _HEARTBEAT_S) / _STEP_S) * _STEP_S

    def _arm(self) -> None:
        if not self._due:
            return
        first = self._due[0][0]
        if self._timer is not None:
            if self._timer.when() <= first:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(first, self._turn)

    def _turn(self) -> None:
        """Ask for all sessions that are due."""
        self._timer = None
        now = self._loop.time()
        beating: list[Session] = []
        while self._due and self._due[0][0] <= now:
            due, _, session = heapq.heappop(self._due)
            # An entry is void when another one followed. What is asked for now is planned again when it has its answer.
            if session.due != due or session.is_asking or self._sessions.get(session.key) is not session:
                continue
            session.is_asking = True
            if session.joined:
                beating.append(session)
            else:
                self._spawn(self._join(session))
        for at in range(0, len(beating), _MEMBERS_A_REQUEST):
            self._spawn(self._beat(beating[at : at + _MEMBERS_A_REQUEST]))
        self._arm()

    def _asked(self, session: Session, due: float) -> None:
        """A question for the session has its answer; the next one is ``due``."""
        session.is_asking = False
        if self._sessions.get(session.key) is session:
            self._plan(session, due if session.joined else min(due, session.due))
        elif session.joined:  # it was taken out while it joined
            self.leave(session)

    # ------------------------------------------------------------ questions

    async def _join(self, session: Session) -> None:
        topics, owned = session.topics, session.owned(self._loop.time())
        session.told, session.due = owned, self._later()
        due = session.due
        try:
            answer = await self._node.ask(
                "coordinator",
                "group.join",
                group=session.group,
                member=session.client_id,
                instance=self.instance,
                owned=_listed(owned),
                generation=session.generation,
                members=True,
                topics=sorted(topics),
                session_timeout_ms=_SESSION_MS,
            )
        except ProtocolError as error:
            due = self._refused(session, error)
        else:
            session.joined = session.topics == topics
            session.is_told = True
            due = self._take(session, answer)
        finally:
            self._asked(session, due)

    async def _beat(self, sessions: list[Session]) -> None:
        """One heartbeat of each session."""
        now, members = self._loop.time(), []
        for session in sessions:
            owned = session.owned(now)
            one: dict[str, Any] = {
                "group": session.group,
                "member": session.client_id,
                "generation": session.generation,
            }
            if not session.is_told or owned != session.told:
                one["owned"] = _listed(owned)
            session.told, session.is_told = owned, False
            members.append(one)
            session.due = self._later()
        due = [session.due for session in sessions]
        try:
            answer = await self._node.ask("coordinator", "group.heartbeats", instance=self.instance, members=members)
        except ProtocolError as error:
            for index, session in enumerate(sessions):
                due[index] = self._refused(session, error)
        else:
            for session in sessions:
                session.is_told = True
            for index, fields in answer["changed"]:
                due[index] = self._take(sessions[index], fields)
            for index, code, sentence in answer["refused"]:
                due[index] = self._refused(sessions[index], ProtocolError(code, sentence))
        finally:
            for index, session in enumerate(sessions):
                self._asked(session, due[index])

    def _refused(self, session: Session, error: ProtocolError) -> float:
        """When to ask again."""
        session.is_told = False
        if error.code == SERVICE_NOT_AVAILABLE:  # whether the member is still one its next heartbeat shows
            return self._loop.time() + _SOON_S
        session.joined = False
        if error.code in ("UNKNOWN_MEMBER", "FENCED"):
            return self._loop.time() + _SOON_S
        self._log.warning("a client is no member of its group", group=session.group, client=session.client_id,
                          code=error.code, error=error.message)  # fmt: skip
        return self._later()

    def _take(self, session: Session, answer: dict[str, Any]) -> float:
        """Take an answer. When to ask again."""
        session.generation = int(answer["generation"])
        before, session.assigned = session.assigned, {(topic, queue) for topic, queue in answer["assigned"]}
        others = session.others
        if "members" in answer:
            session.others = [name for name, instance in answer["members"] if instance != self.instance]
        if session.others != others or session.assigned != before:
            self._notify(session.group)
        return self._loop.time() + _SOON_S if answer["revoke"] else self._later()

    async def _leave(self, session: Session, then: Callable[[], None] | None = None) -> None:
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
            if then is not None:
                then()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _listed(queues: set[Queue]) -> list[list[Any]]:
    return [list(queue) for queue in sorted(queues)]


_MOST_REQUESTS: Final = 256
"""Of one connection; the oldest are forgotten."""
_MOST_CHARACTERS: Final = 255

_Request = tuple[str, str]
"""Client id and correlation id."""


class Requesters:
    """Which connection sent a request, whose reply is pushed to it.

    A reply names its requester by the client id, which a client chooses. So another user's client may have the same id,
    by chance or to take the replies: then a reply goes to the connection that sent the request. Without users ids alone
    count, as at RocketMQ.

    ``registry`` knows the client ids.
    """

    def __init__(self, registry: Registry[RemotingConnection]) -> None:
        self._registry = registry
        self._senders: dict[_Request, RemotingConnection] = {}
        self._sent: dict[RemotingConnection, deque[_Request]] = {}

    def sent(self, connection: RemotingConnection, properties: Mapping[str, str]) -> None:
        """A client sends a request with these properties. The first sender counts: who reads a request can send it again."""
        request = _request_of(properties)
        if not connection.user or request in self._senders or sum(map(len, request)) > _MOST_CHARACTERS:
            return
        own = self._sent.setdefault(connection, deque())
        if len(own) >= _MOST_REQUESTS:
            del self._senders[own.popleft()]
        own.append(request)
        self._senders[request] = connection

    def closed(self, connection: RemotingConnection) -> None:
        """The connection ended."""
        for one in self._sent.pop(connection, ()):
            del self._senders[one]

    def link_of(self, properties: Mapping[str, str]) -> RemotingConnection | None:
        """Where the reply with these properties is to be pushed; None when its requester is not connected."""
        request = _request_of(properties)
        named, sender = self._registry.client(request[0]), self._senders.get(request)
        return sender if sender is not None and (named is None or named.user != sender.user) else named


def _request_of(properties: Mapping[str, str]) -> _Request:
    return properties.get(Property.REPLY_TO_CLIENT, ""), properties.get(Property.CORRELATION_ID, "")


EXPIRY_MS: Final = 120_000
_LAST_WORDS_S: Final = 2.0
_SCAN_S: Final = 10.0
_NOTIFY_S: Final = 0.02
_TURN_S: Final = 1.0


class ClientManager:
    """The connected clients of the server."""

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        allowances: Allowances,
        loop: asyncio.AbstractEventLoop,
        log: Log,
    ) -> None:
        self._node, self._topics, self._loop, self._log = node, topics, loop, log
        self._allowances = allowances
        self.registry: Registry[RemotingConnection] = Registry(lambda one, other: one.user == other.user)
        self.requesters = Requesters(self.registry)
        self.sessions = GroupSessions(node, loop, log, self.notify)
        self.news = ClientNews(node, self.registry, self.sessions.instance, log)
        self._leaving: dict[tuple[RemotingConnection, str], Session] = {}
        self._left_at: dict[tuple[RemotingConnection, str], float] = {}
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

    async def heartbeat(self, connection: RemotingConnection, command: Command) -> Command:
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
        if connection.is_closed:  # in the meantime: nobody would ever take such a member out again
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

    def _check(self, connection: RemotingConnection, data: HeartbeatData) -> None:
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

    def charge(self, connection: RemotingConnection, group: str) -> None:
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

    async def unregister(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 35."""
        header = UnregisterClientRequestHeader.decode(command.ext_fields)
        self._apply(self.registry.unregister(connection, header.producer_group, header.consumer_group))
        self.news.changed(connection)
        return command.answer()

    def consumer_list(self, connection: RemotingConnection, command: Command) -> Command:
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

    async def check_config(self, connection: RemotingConnection, command: Command) -> Command:
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

    def closed(self, connection: RemotingConnection) -> None:
        """The connection ended."""
        self._allowances.left(connection)
        self.requesters.closed(connection)
        self._apply(self.registry.closed(connection))
        self.news.closed(connection)

    # ------------------------------------------------------------ pulls

    def pulls(self, connection: RemotingConnection, group: str, topic: str, queue: int) -> None:
        """The client asks for messages of this queue."""
        session = self._session_of(connection, group)
        if session is not None:
            session.reading[topic, queue] = 0.0

    def pulled(self, connection: RemotingConnection, group: str, topic: str, queue: int) -> None:
        """It has its answer."""
        session = self._session_of(connection, group)
        if session is not None and (topic, queue) in session.reading:
            session.reading[topic, queue] = self._loop.time()

    def _session_of(self, connection: RemotingConnection, group: str) -> Session | None:
        client_id = self.registry.client_of(connection, group)
        return None if client_id is None else self.sessions.get(group, client_id)

    def member_name(self, connection: RemotingConnection, group: str, topic: str) -> str | None:
        """As whom the client commits: a member's name, None for a consumer that is no member of the group."""
        session = self._session_of(connection, group) or self._leaving.get((connection, group))
        return session.client_id if session is not None and session.joined and topic in session.topics else None

    # ------------------------------------------------------------ changes

    def _apply(self, changes: RegistryChanges[RemotingConnection]) -> None:
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

    def _left(self, seat: tuple[RemotingConnection, str]) -> None:
        self._leaving.pop(seat, None)
        now = self._loop.time()
        self._left_at.pop(seat, None)
        self._left_at[seat] = now  # the last one, so the oldest are the first
        while self._left_at[oldest := next(iter(self._left_at))] <= now - _LAST_WORDS_S:
            del self._left_at[oldest]

    def is_leaving(self, connection: RemotingConnection, group: str) -> bool:
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
