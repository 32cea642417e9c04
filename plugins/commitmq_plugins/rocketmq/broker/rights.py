"""What each request needs (remoting 1.11, RocketMQ's DefaultAuthorizationContextBuilder and its headers' annotations).

Where RocketMQ asks for nothing, this table asks for something: lists need List or Get of all of them, a message by its place
needs Sub or Get of all topics, because the place does not tell its topic, and a group's retry topic needs Sub of that group.
Where a handler learns the topic of such a message, it asks again (``Access.lacks``).
Requests that are not here are a super user's.

What the clients of one user may have at this server: connections, and bytes of requests that have no answer yet.

These are the quotas of the node's own protocol (``[flow]`` user_connections and user_pending_bytes, and those of the file of
users). They hold for each process by itself, so also for this server.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from commitmq.errors import ProtocolError
from commitmq.format.constants import RETRY_PREFIX
from commitmq.log import Log
from commitmq.plugin import Actor, AuditLog, Event
from commitmq.security.access_file import LiveAccess, UserQuotas
from commitmq.security.native_rights import (
    ALL_NAMES,
    CREATE,
    DELETE,
    GET,
    LIST,
    PUB,
    SUB,
    SUB_GET,
    SUB_UPDATE,
    UPDATE,
    Actions,
    Need,
    read_need,
    topic_need,
)
from commitmq.security.policy import ACCESS_KEY, Resource, ResourceType, is_signed
from commitmq.semantics.rates import RateLimiter
from commitmq.semantics.reply import reply_topic
from commitmq_plugins.rocketmq import RocketMQSettings
from commitmq_plugins.rocketmq.remoting.bodies import (
    HeartbeatData,
    LockBatchRequestBody,
    QueryAssignmentRequestBody,
    decode_batch_acks,
)
from commitmq_plugins.rocketmq.remoting.codes import V4_9_3, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import MAX_NAME_CHARACTERS, as_list, as_object, as_text, load_object
from commitmq_plugins.rocketmq.remoting.frame import Command, RemotingError
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection, place_of

Needs: TypeAlias = Callable[[Command, str], Iterator[Need]]


def needs_of(command: Command, cluster: str) -> list[Need] | None:
    """All that the sender of ``command`` must be allowed; empty for what each user may do, None for what only super users may.

    Raises BodyError.
    """
    found = _TABLE.get(command.code)
    return None if found is None else list(found(command, cluster))


def used_of(command: Command, needs: list[Need], cluster: str) -> Resource | None:
    """What the audit log names for a request with ``needs``. A reply uses the reply topic, which asks for no right."""
    if needs:
        return needs[0][0]
    return Resource(ResourceType.TOPIC, reply_topic(cluster)) if command.code in _REPLIES else None


def topic_needs(name: str, actions: Actions) -> Iterator[Need]:
    """The need of a topic; for a group's retry topic that of the group."""
    yield topic_need(name, actions)


def _fields(topic: tuple[str, Actions] | None = None, group: tuple[str, Actions] | None = None) -> Needs:
    """What a topic and a group in header fields need. A field that is missing, or empty, needs nothing: its handler refuses,
    or means no topic and no group.
    """

    def needs(command: Command, cluster: str) -> Iterator[Need]:
        if topic is not None and (name := command.ext_fields.get(topic[0], "")):
            yield from topic_needs(name, topic[1])
        if group is not None and (name := command.ext_fields.get(group[0], "")):
            yield Resource(ResourceType.GROUP, name), group[1]

    return needs


def _read(command: Command, cluster: str) -> Iterator[Need]:
    if topic := command.ext_fields.get("topic", ""):
        yield read_need(topic, SUB)
    if group := command.ext_fields.get("consumerGroup", ""):
        yield Resource(ResourceType.GROUP, group), SUB


def _query(command: Command, cluster: str) -> Iterator[Need]:
    if topic := command.ext_fields.get("topic", ""):
        yield read_need(topic, SUB_GET)


def _send(command: Command, cluster: str) -> Iterator[Need]:
    """A send has short or long names of its fields, whatever its code is. One with both needs both."""
    for field in ("topic", "b"):
        if name := command.ext_fields.get(field, ""):
            yield from topic_needs(name, PUB)


def _reply(command: Command, cluster: str) -> Iterator[Need]:
    """Who may receive a request may reply: RocketMQ asks for nothing. Another topic than that of the replies is sent to."""
    free = topic_need(reply_topic(cluster), PUB)
    yield from (need for need in _send(command, cluster) if need != free)


def _popped(command: Command, cluster: str) -> Iterator[Need]:
    """A received message, which may be of a retry topic with the names of the group and of another topic in it."""
    topic, group = command.ext_fields.get("topic", ""), command.ext_fields.get("consumerGroup", "")
    own = RETRY_PREFIX + group
    if topic.startswith((f"{own}_", f"{own}+")):
        topic = topic[len(own) + 1 :]
    if topic:
        yield from topic_needs(topic, SUB)
    yield Resource(ResourceType.GROUP, group), SUB


def _acks(command: Command, cluster: str) -> Iterator[Need]:
    for one in decode_batch_acks(command.body):
        yield Resource(ResourceType.TOPIC, one.topic), SUB
        yield Resource(ResourceType.GROUP, one.consumer_group), SUB


def _heartbeat(command: Command, cluster: str) -> Iterator[Need]:
    for consumer in HeartbeatData.decode(command.body).consumers:
        yield Resource(ResourceType.GROUP, consumer.group_name), SUB
        for one in consumer.subscriptions:
            yield from topic_needs(one.topic, SUB)


def _locks(command: Command, cluster: str) -> Iterator[Need]:
    body = LockBatchRequestBody.decode(command.body)
    yield Resource(ResourceType.GROUP, body.consumer_group), SUB
    for one in body.queues:
        yield from topic_needs(one.topic, SUB)


def _assignment(command: Command, cluster: str) -> Iterator[Need]:
    body = QueryAssignmentRequestBody.decode(command.body)
    yield Resource(ResourceType.GROUP, body.consumer_group), SUB
    yield from topic_needs(body.topic, SUB)


def _group_config(command: Command, cluster: str) -> Iterator[Need]:
    name = as_text(load_object(command.body).get("groupName"), "groupName")
    yield Resource(ResourceType.GROUP, name), CREATE | UPDATE


def _topic_list(command: Command, cluster: str) -> Iterator[Need]:
    """All topics, and each that is named: an entry may except one of them."""
    yield Resource(ResourceType.TOPIC, ALL_NAMES), CREATE
    for one in as_list(load_object(command.body).get("topicConfigList"), "topicConfigList"):
        yield from topic_needs(as_text(as_object(one, "a topic").get("topicName"), "topicName"), CREATE)


def _group_list(command: Command, cluster: str) -> Iterator[Need]:
    yield Resource(ResourceType.GROUP, ALL_NAMES), CREATE | UPDATE
    for one in as_list(load_object(command.body).get("groupConfigList"), "groupConfigList"):
        yield (
            Resource(ResourceType.GROUP, as_text(as_object(one, "a group").get("groupName"), "groupName")),
            CREATE | UPDATE,
        )


def _clone(command: Command, cluster: str) -> Iterator[Need]:
    fields = command.ext_fields
    yield Resource(ResourceType.GROUP, fields.get("srcGroup", "")), SUB_GET
    yield Resource(ResourceType.GROUP, fields.get("destGroup", "")), UPDATE


def _nothing(command: Command, cluster: str) -> Iterator[Need]:
    return iter(())


def _cluster(actions: Actions) -> Needs:
    return lambda command, cluster: iter(((Resource(ResourceType.CLUSTER, cluster), actions),))


def _all(kind: ResourceType, actions: Actions) -> Needs:
    return lambda command, cluster: iter(((Resource(kind, ALL_NAMES), actions),))


_READING: Final = _fields(("topic", SUB_GET))
_RC = RequestCode
_REPLIES: Final = frozenset((_RC.SEND_REPLY_MESSAGE, _RC.SEND_REPLY_MESSAGE_V2))
_TABLE: Final[dict[int, Needs]] = {
    # producers
    _RC.SEND_MESSAGE: _send,
    _RC.SEND_MESSAGE_V2: _send,
    _RC.SEND_BATCH_MESSAGE: _send,
    _RC.RECALL_MESSAGE: _fields(("topic", PUB)),
    _RC.END_TRANSACTION: _fields(("topic", PUB)),
    _RC.SEND_REPLY_MESSAGE: _reply,
    _RC.SEND_REPLY_MESSAGE_V2: _reply,
    # consumers
    _RC.HEART_BEAT: _heartbeat,
    _RC.UNREGISTER_CLIENT: _fields(group=("consumerGroup", SUB)),
    _RC.CHECK_CLIENT_CONFIG: _nothing,
    _RC.GET_ROUTEINFO_BY_TOPIC: _fields(("topic", PUB | SUB | GET)),
    _RC.PULL_MESSAGE: _read,
    _RC.LITE_PULL_MESSAGE: _read,
    _RC.CONSUMER_SEND_MSG_BACK: _fields(group=("group", SUB)),
    _RC.GET_CONSUMER_LIST_BY_GROUP: _fields(group=("consumerGroup", SUB_GET)),
    _RC.QUERY_CONSUMER_OFFSET: _fields(("topic", SUB_GET), ("consumerGroup", SUB_GET)),
    _RC.UPDATE_CONSUMER_OFFSET: _fields(("topic", SUB_UPDATE), ("consumerGroup", SUB_UPDATE)),
    _RC.LOCK_BATCH_MQ: _locks,
    _RC.UNLOCK_BATCH_MQ: _locks,
    _RC.GET_MAX_OFFSET: _READING,
    _RC.GET_MIN_OFFSET: _READING,
    _RC.SEARCH_OFFSET_BY_TIMESTAMP: _READING,
    _RC.GET_EARLIEST_MSG_STORETIME: _READING,
    _RC.QUERY_MESSAGE: _query,
    _RC.VIEW_MESSAGE_BY_ID: _all(ResourceType.TOPIC, SUB_GET),
    _RC.POP_MESSAGE: _read,
    _RC.PEEK_MESSAGE: _read,
    _RC.ACK_MESSAGE: _popped,
    _RC.BATCH_ACK_MESSAGE: _acks,
    _RC.CHANGE_MESSAGE_INVISIBLETIME: _popped,
    _RC.NOTIFICATION: _read,
    _RC.POLLING_INFO: _read,
    _RC.QUERY_ASSIGNMENT: _assignment,
    # topics
    _RC.UPDATE_AND_CREATE_TOPIC: _fields(("topic", CREATE)),
    _RC.UPDATE_AND_CREATE_TOPIC_LIST: _topic_list,
    _RC.DELETE_TOPIC_IN_BROKER: _fields(("topic", DELETE)),
    _RC.GET_TOPIC_CONFIG: _fields(("topic", GET)),
    _RC.GET_TOPIC_STATS_INFO: _fields(("topic", GET)),
    _RC.GET_ALL_TOPIC_CONFIG: _all(ResourceType.TOPIC, LIST),
    _RC.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _all(ResourceType.TOPIC, LIST),
    _RC.QUERY_TOPIC_CONSUME_BY_WHO: _fields(("topic", GET)),
    _RC.QUERY_CONSUME_QUEUE: _fields(("topic", GET), ("consumerGroup", GET)),
    _RC.RESUME_CHECK_HALF_MESSAGE: _all(ResourceType.TOPIC, UPDATE),
    # groups
    _RC.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _group_config,
    _RC.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _group_list,
    _RC.DELETE_SUBSCRIPTIONGROUP: _fields(group=("groupName", DELETE)),
    _RC.GET_SUBSCRIPTIONGROUP_CONFIG: _fields(group=("group", GET)),
    _RC.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _all(ResourceType.GROUP, LIST),
    _RC.GET_CONSUME_STATS: _fields(("topic", GET), ("consumerGroup", GET)),
    _RC.GET_CONSUMER_CONNECTION_LIST: _fields(group=("consumerGroup", GET)),
    _RC.GET_CONSUMER_RUNNING_INFO: _fields(group=("consumerGroup", GET)),
    _RC.QUERY_TOPICS_BY_CONSUMER: _fields(group=("group", GET)),
    _RC.QUERY_SUBSCRIPTION_BY_CONSUMER: _fields(("topic", GET), ("group", GET)),
    _RC.QUERY_CONSUME_TIME_SPAN: _fields(("topic", GET), ("group", GET)),
    _RC.QUERY_CORRECTION_OFFSET: _fields(("topic", GET), ("compareGroup", GET)),
    _RC.INVOKE_BROKER_TO_RESET_OFFSET: _fields(("topic", UPDATE), ("group", UPDATE)),
    _RC.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _fields(("topic", GET), ("group", GET)),
    _RC.CONSUME_MESSAGE_DIRECTLY: _fields(("topic", SUB), ("consumerGroup", SUB)),
    _RC.CLONE_GROUP_OFFSET: _clone,
    _RC.UPDATE_AND_GET_GROUP_FORBIDDEN: _fields(("topic", UPDATE), ("group", UPDATE)),
    # the node
    _RC.GET_BROKER_CONFIG: _cluster(GET),
    _RC.GET_BROKER_RUNTIME_INFO: _cluster(GET),
    _RC.VIEW_BROKER_STATS_DATA: _cluster(GET),
    _RC.GET_BROKER_CONSUME_STATS: _cluster(GET),
    _RC.GET_ALL_PRODUCER_INFO: _cluster(GET),
    _RC.GET_PRODUCER_CONNECTION_LIST: _cluster(GET),
    _RC.GET_ALL_CONSUMER_OFFSET: _cluster(GET),
    _RC.GET_ALL_DELAY_OFFSET: _cluster(GET),
    _RC.GET_ALL_MESSAGE_REQUEST_MODE: _cluster(GET),
    _RC.GET_BROKER_HA_STATUS: _cluster(GET),
    _RC.GET_TIMER_CHECK_POINT: _cluster(GET),
    _RC.GET_TIMER_METRICS: _cluster(GET),
    _RC.SET_MESSAGE_REQUEST_MODE: _cluster(UPDATE),
    _RC.UPDATE_BROKER_CONFIG: _cluster(UPDATE),
    _RC.CLEAN_EXPIRED_CONSUMEQUEUE: _cluster(UPDATE),
    _RC.CLEAN_UNUSED_TOPIC: _cluster(UPDATE),
    _RC.DELETE_EXPIRED_COMMITLOG: _cluster(UPDATE),
}


PROTOCOL: Final = "rocketmq"
CHANGES: Final = frozenset(
    (
        _RC.UPDATE_AND_CREATE_TOPIC,
        _RC.UPDATE_AND_CREATE_TOPIC_LIST,
        _RC.DELETE_TOPIC_IN_BROKER,
        _RC.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        _RC.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        _RC.DELETE_SUBSCRIPTIONGROUP,
        _RC.INVOKE_BROKER_TO_RESET_OFFSET,
        _RC.CLONE_GROUP_OFFSET,
        _RC.UPDATE_AND_GET_GROUP_FORBIDDEN,
        _RC.RESUME_CHECK_HALF_MESSAGE,
        _RC.SET_MESSAGE_REQUEST_MODE,
        _RC.UPDATE_BROKER_CONFIG,
        _RC.CLEAN_EXPIRED_CONSUMEQUEUE,
        _RC.CLEAN_UNUSED_TOPIC,
        _RC.DELETE_EXPIRED_COMMITLOG,
    )
)
"""Requests that change the node. Those about users are not among them: the file of users writes its changes down itself."""
_SHOWN: Final = (
    "topic",
    "readQueueNums",
    "writeQueueNums",
    "perm",
    "order",
    "topicFilterType",
    "attributes",
    "group",
    "groupName",
    "srcGroup",
    "destGroup",
    "timestamp",
    "offset",
    "queueId",
    "isForce",
    "readable",
    "msgId",
)
"""Fields of a change that the audit log shows."""
_NAMES: Final = {int(one): one.name for one in RequestCode}


def name_of(code: int) -> str:
    """RocketMQ's name of a request."""
    return _NAMES.get(code) or str(code)


def actor_of(connection: RemotingConnection, command: Command) -> Actor:
    """Who sends a request: the user that has signed it."""
    return Actor(command.ext_fields.get(ACCESS_KEY, ""), PROTOCOL, connection.peer[0])


class Auditing:
    """What RocketMQ's clients and tools leave in the node's audit log: changes, refusals, and first uses.

    A request that only reads or sends costs nothing here but on a node with users. What the node's own processes do for
    a change has lines of theirs too, without the user.
    """

    def __init__(self, audit: AuditLog, cluster: str) -> None:
        self._audit, self._cluster = audit, cluster

    def refused(self, connection: RemotingConnection, command: Command, reason: str, resource: str = "") -> None:
        """Write that a request was refused."""
        actor = actor_of(connection, command)
        self._audit.refused(actor, name_of(command.code), resource, reason, command.opaque)

    def used(self, connection: RemotingConnection, command: Command, user: str, resource: Resource) -> None:
        """Write the first use of a resource by a user in an hour."""
        operation = name_of(command.code)
        if self._audit.is_first(user, operation, resource.name) and command.code not in CHANGES:
            self._audit.used(Event(actor_of(connection, command), operation, str(resource), request=command.opaque))

    def of_change(self, handler: Handler) -> Handler:
        """``handler`` of a request in CHANGES, which goes to the audit log first."""

        def handle(connection: RemotingConnection, command: Command) -> Command | Awaitable[Command | None] | None:
            event = self._event(connection, command)
            self._audit.change(event)
            try:
                found = handler(connection, command)
            except Exception as error:
                self._audit.failed(event, f"{error}")
                raise
            if found is None or isinstance(found, Command):
                return self._judged(event, found)
            return self._later(event, found)

        return handle

    async def _later(self, event: Event, found: Awaitable[Command | None]) -> Command | None:
        try:
            return self._judged(event, await found)
        except Exception as error:
            self._audit.failed(event, f"{error}")
            raise

    def _judged(self, event: Event, answer: Command | None) -> Command | None:
        if answer is not None and answer.code != ResponseCode.SUCCESS:
            self._audit.failed(event, answer.remark or f"code {answer.code}")
        return answer

    def _event(self, connection: RemotingConnection, command: Command) -> Event:
        try:
            needs = needs_of(command, self._cluster) or []
        except RemotingError:
            needs = []
        fields = {name: command.ext_fields[name][:200] for name in _SHOWN if name in command.ext_fields}
        resource = ",".join(str(one) for one, _ in needs)
        actor = actor_of(connection, command)
        return Event(actor, name_of(command.code), resource, request=command.opaque, after=fields or None)


_BURST_S: Final = 60.0
"""An address may make the names of a minute at once: clients of a new application begin together."""
_MOST_ADDRESSES: Final = 10_000


class Allowances:
    """What one connection may make of what all share: groups, which have two topics each, and topics.

    The node's limits (``topics.max_topics``, ``groups.max_groups``) are everyone's. So a connection has an allowance of
    its own: it is charged for each name that is new, and gets the allowance back when it ends. All connections of an
    address share a rate, so that a client gains nothing by connecting again. What exists already costs nothing, so a
    gateway that speaks for many groups is not bounded by either.

    Memory is bounded too: a connection is in so many groups, and has so many requests that wait.
    """

    def __init__(self, settings: RocketMQSettings) -> None:
        self._most_groups = settings.max_groups_per_connection
        self._most_topics = settings.max_topics_per_connection
        self._most_memberships = settings.max_memberships_per_connection
        self._most_of_place = settings.max_memberships_per_address
        self._memberships: dict[RemotingConnection, int] = {}
        self._of_place: Counter[str] = Counter()
        self._per_s = settings.max_new_names_per_second
        self._rates = RateLimiter("address", self._per_s, 0, _MOST_ADDRESSES, burst_s=_BURST_S)
        self._groups: WeakKeyDictionary[RemotingConnection, set[str]] = WeakKeyDictionary()
        self._topics: WeakKeyDictionary[RemotingConnection, set[str]] = WeakKeyDictionary()

    def groups(self, connection: RemotingConnection, new: Iterable[str]) -> None:
        """Charge for groups that the node does not know. Raises ProtocolError; nothing is charged then."""
        self._charge(self._groups, connection, set(new), self._most_groups, "groups", "max_groups_per_connection")

    def topic(self, connection: RemotingConnection, new: str) -> None:
        """Charge for a topic that the node does not know. Raises ProtocolError."""
        self._charge(self._topics, connection, {new}, self._most_topics, "topics", "max_topics_per_connection")

    def memberships(self, connection: RemotingConnection, groups: int) -> None:
        """A connection will be in so many groups, of consumers and of producers, until it has :meth:`left`.

        Raises ProtocolError.
        """
        place, known = place_of(connection.peer[0]), self._memberships.get(connection, 0)
        of_place = self._of_place[place] - known + groups
        limits = ((groups, self._most_memberships, "this connection", "max_memberships_per_connection"),
                  (of_place, self._most_of_place, f"the connections of {place}", "max_memberships_per_address"))  # fmt: skip
        for count, most, who, setting in limits:
            if count > most:
                raise ProtocolError(
                    "LIMIT_EXCEEDED",
                    f"{who} would be in {count} groups of consumers and producers, at most {most} are allowed"
                    f" (plugins.rocketmq.{setting})",
                )
        self._memberships[connection] = groups
        self._of_place[place] = of_place

    def left(self, connection: RemotingConnection) -> None:
        """The connection has ended."""
        place, known = place_of(connection.peer[0]), self._memberships.pop(connection, 0)
        self._of_place[place] -= known
        if not self._of_place[place]:
            del self._of_place[place]

    def _charge(
        self,
        table: WeakKeyDictionary[RemotingConnection, set[str]],
        connection: RemotingConnection,
        new: set[str],
        most: int,
        what: str,
        setting: str,
    ) -> None:
        if not new:
            return
        if long := next((name for name in new if len(name) > MAX_NAME_CHARACTERS), None):
            raise ProtocolError(
                "INVALID_PARAMETER", f"a name has at most {MAX_NAME_CHARACTERS} characters: {long:.100}…"
            )
        charged = table.get(connection, set())
        if charged.issuperset(new):
            return
        if len(charged | new) > most:
            raise ProtocolError(
                "LIMIT_EXCEEDED",
                f"this connection would have made {len(charged | new)} {what}, at most {most} are allowed"
                f" (plugins.rocketmq.{setting})",
            )
        if self._per_s:
            place, now_s = place_of(connection.peer[0]), time.monotonic()
            wait_ms = self._rates.wait_ms(place, now_s)
            if wait_ms:
                raise ProtocolError(
                    "SYSTEM_BUSY",
                    f"address {place} makes more than {self._per_s} new groups and topics a second"
                    " (plugins.rocketmq.max_new_names_per_second)",
                    retry_after_ms=wait_ms,
                )
            self._rates.take(place, len(new - charged), 0, now_s)
        table[connection] = charged | new


_END_S: Final = 0.1
"""By then the answer has been sent."""


class UserLimits:
    """Ask while ``quotas.bounds_connections`` only. Connections that began before are counted at their next request."""

    def __init__(self, quotas: UserQuotas) -> None:
        self.quotas = quotas
        self._connections: dict[str, WeakSet[RemotingConnection]] = {}

    def refusal(self, connection: RemotingConnection, user: str) -> str:
        """Why a request that ``user`` has signed is refused; empty when it is not. A connection too many ends afterwards."""
        quota = self.quotas.of(user)
        known = self._connections.get(user)
        if known is None:
            self._forget_users()
            known = self._connections[user] = WeakSet()
        if connection not in known:
            count = sum(not one.is_closed for one in known)
            if quota.connections and count >= quota.connections:
                asyncio.get_running_loop().call_later(_END_S, connection.close)
                return f"user {user} has {count} connections here, the most ([flow] user_connections)"
            known.add(connection)
        most = quota.pending_bytes
        if most and sum(one.request_bytes for one in known) > most:
            return f"more than {most} bytes of user {user} wait to be handled ([flow] user_pending_bytes)"
        return ""

    def _forget_users(self) -> None:
        self._connections = {user: known for user, known in self._connections.items() if known}


_UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
_NOBODY: Final = "a secret that nobody has"
_WRONG: Final = "check signature failed"
_MOST_TOLD: Final = 10
"""Refusals that the log has, of each second."""


class Access:
    """Who sends a request, and may they: the signatures of RocketMQ's clients (AK/SK) and the node's users.

    A node without users asks nobody. There is no time and no number in a signature: who reads a request on the wire can repeat
    it, so a network that others can read needs TLS too.
    """

    def __init__(
        self,
        live: LiveAccess,
        cluster: str,
        log: Log,
        auditing: Auditing | None = None,
        limits: UserLimits | None = None,
    ) -> None:
        self._live, self._cluster, self._log, self._auditing, self._limits = live, cluster, log, auditing, limits
        self._second = self._told = self._untold = 0

    def refusal(self, connection: RemotingConnection, command: Command) -> Command | None:
        """The answer to a request that must not be handled. Raises BodyError."""
        table = self._live.table()
        if table.is_open:
            return None
        fields = command.ext_fields
        name = fields.get(ACCESS_KEY, "")
        user = table.users.get(name)
        # Clients up to 4.9.3 add this field after they have signed.
        without = _UNIQUE_KEY_QUERY if command.version <= V4_9_3 else ""
        secret = _NOBODY if user is None else user.secret.reveal()
        # An unknown user and a wrong signature look the same, and take the same time.
        if not is_signed(fields, command.body, secret, without=without) or user is None:
            return self._refuse(connection, command, name, _WRONG if name else "the request has no AccessKey")
        if not user.is_enabled:
            return self._refuse(connection, command, name, f"user {name} is disabled")
        if connection.user not in ("", name):
            # Its groups, and requests that still wait, would be judged by the rights of whoever signed last.
            reason = "this connection is another user's; a user needs a connection of its own"
            return self._refuse(connection, command, name, reason)
        needs = needs_of(command, self._cluster)
        if user.is_super:
            needs = needs or []
        elif needs is None:
            return self._refuse(connection, command, name, f"only super users may send request {command.code}")
        address = connection.peer[0]
        for resource, actions in () if user.is_super else needs:
            decision = table.decide(name, resource, actions, address)
            if not decision.allowed:
                reason = f"{decision.reason}; from {address}"
                return self._refuse(connection, command, name, reason, str(resource))
        if self._auditing is not None and (used := used_of(command, needs, self._cluster)) is not None:
            self._auditing.used(connection, command, name, used)
        if connection.user != name:
            connection.user = name
            connection.memo.clear()  # what is remembered of its sends has the user before
        limits = self._limits
        if limits is not None and limits.quotas.bounds_connections and (why := limits.refusal(connection, name)):
            return command.answer(ResponseCode.SYSTEM_BUSY, why)
        return None

    def asks(self, connection: RemotingConnection) -> bool:
        """Whether rights count for the user of ``connection``: there are users, and it is no super user that is enabled."""
        table = self._live.table()
        user = table.users.get(connection.user)
        return not table.is_open and (user is None or not (user.is_super and user.is_enabled))

    def may(self, connection: RemotingConnection, topic: str, actions: Actions) -> bool:
        """Whether the user of ``connection`` may do one of ``actions`` on ``topic``."""
        return self._denied(connection, (topic,), actions) is None

    def lacks(
        self, connection: RemotingConnection, command: Command, topics: Iterable[str], actions: Actions
    ) -> Command | None:
        """The answer to ``command`` when its user may do none of ``actions`` on one of ``topics``; None when it may.

        For messages that a request names by their place: what the client says of their topic proves nothing.
        """
        denied = self._denied(connection, topics, actions)
        return None if denied is None else self._refuse(connection, command, connection.user, *denied)

    def _denied(
        self, connection: RemotingConnection, topics: Iterable[str], actions: Actions
    ) -> tuple[str, str] | None:
        """The reason and the resource."""
        if not self.asks(connection):
            return None
        table, address = self._live.table(), connection.peer[0]
        for topic in topics:
            resource, wanted = topic_need(topic, actions)
            decision = table.decide(connection.user, resource, wanted, address)
            if not decision.allowed:
                return f"{decision.reason}; from {address}", str(resource)
        return None

    def _refuse(
        self, connection: RemotingConnection, command: Command, name: str, reason: str, resource: str = ""
    ) -> Command:
        if self._auditing is not None:
            self._auditing.refused(connection, command, reason, resource)
        second = time.monotonic_ns() // 1_000_000_000
        if second != self._second:
            if self._untold:
                self._log.warning("more requests were refused", count=self._untold)
            self._second, self._told, self._untold = second, 0, 0
        if self._told < _MOST_TOLD:
            self._told += 1
            code = name_of(command.code)
            self._log.warning(
                "a request was refused", user=name[:128], request=code, peer=connection.name, reason=reason
            )
        else:
            self._untold += 1
        return command.answer(ResponseCode.NO_PERMISSION, reason)
