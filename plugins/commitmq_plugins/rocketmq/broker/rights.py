"""What each request needs (remoting 1.11, RocketMQ's DefaultAuthorizationContextBuilder and its headers' annotations).

Where RocketMQ asks for nothing, this table asks for something: lists need List or Get of all of them, a message by its place
needs Sub or Get of all topics, because the place does not tell its topic, and a group's retry topic needs Sub of that group.
Where a handler learns the topic of such a message, it asks again (``Access.lacks``).
Requests that are not here are a super user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from commitmq.format.constants import RETRY_PREFIX
from commitmq.security.needs import (
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
from commitmq.security.resource import Resource, ResourceType
from commitmq.semantics.reply import reply_topic
from commitmq_plugins.rocketmq.remoting.bodies.heartbeat import HeartbeatData
from commitmq_plugins.rocketmq.remoting.bodies.locks import LockBatchRequestBody
from commitmq_plugins.rocketmq.remoting.bodies.pop import QueryAssignmentRequestBody, decode_batch_acks
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import as_list, as_object, as_text, load_object

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
