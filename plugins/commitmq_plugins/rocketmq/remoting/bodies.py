"""The bodies of requests and answers, as fastjson writes them: topics, routes, registrations, heartbeats, connections, locks,
POP, offsets and rates.

Large ones are read in :data:`Steps`, between which an event loop can serve others: a generator that yields after each
fraction of a millisecond, and returns what the work gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

import orjson

from commitmq_plugins.rocketmq.remoting.codes import V5_0_0, LanguageCode
from commitmq_plugins.rocketmq.remoting.fastjson import (
    RemotingMessageQueue,
    as_bool,
    as_int,
    as_list,
    as_map,
    as_name,
    as_object,
    as_text,
    dumps,
    load_object,
    loads,
    queue_map,
    without_none,
)
from commitmq_plugins.rocketmq.remoting.frame import BodyError
from commitmq_plugins.rocketmq.remoting.headers import java_name

_Found = TypeVar("_Found")
_Item = TypeVar("_Item")
Steps = Generator[None, None, _Found]

_ITEMS: Final = 64
_SLICE_S: Final = 0.003
"""How long an event loop's turn may do steps: others wait so long."""


def in_steps(items: Iterable[_Item]) -> Generator[_Item | None]:
    """``items``, and None where a step ends. No item may be None."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % _ITEMS:
            yield None


def finish(steps: Steps[_Found]) -> _Found:
    """Do all the steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: _Found = done.value
            return found


def begin(steps: Steps[_Found]) -> tuple[_Found] | None:
    """Do the steps of one turn; what the work gives, if that was all."""
    end = time.perf_counter() + _SLICE_S
    try:
        while time.perf_counter() < end:
            next(steps)
    except StopIteration as done:
        return (done.value,)
    return None


async def beside_others(steps: Steps[_Found]) -> _Found:
    """Do the steps in turns of the event loop. What they make stays: Python's collector, which would look at all of it again
    and again for a tenth of a second while it grows, never does.
    """
    with _uncollected():
        while (found := begin(steps)) is None:
            await asyncio.sleep(0)
    return found[0]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Body:
    """A dataclass whose fields are the members of a JSON object, under their names in Java's spelling."""

    __slots__ = ()
    _names: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._names = tuple(sorted((java_name(name), name) for name in cls.__annotations__))

    def to_json(self) -> dict[str, Any]:
        """The members, in the order of their names."""
        return {member: getattr(self, name) for member, name in self._names}


@dataclass(frozen=True, slots=True)
class RemotingDataVersion(Body):
    """``timestamp`` in ms is the time of the last change, ``counter`` the number of changes."""

    timestamp: int = 0
    counter: int = 0
    state_version: int = 0

    @classmethod
    def from_json(cls, value: Any) -> RemotingDataVersion:
        if value is None:
            return cls()
        members = as_object(value, "a data version")
        return cls(
            as_int(members.get("timestamp", 0), "timestamp"),
            as_int(members.get("counter", 0), "counter"),
            as_int(members.get("stateVersion", 0), "stateVersion"),
        )


MAX_FILTER_CHARACTERS: Final = 65_536
MAX_TAGS: Final = 1_024


@dataclass(slots=True)
class SubscriptionData(Body):
    """One topic of a group. ``sub_version`` grows with each change; ``code_set`` are the hashes of the tags."""

    topic: str
    sub_string: str = "*"
    tags_set: list[str] = field(default_factory=list)
    code_set: list[int] = field(default_factory=list)
    sub_version: int = 0
    expression_type: str = "TAG"
    class_filter_mode: bool = False

    @classmethod
    def from_json(cls, value: Any) -> SubscriptionData:
        """Elements of ``codeSet`` may be texts: the Go client's are (remoting 1.13)."""
        members = as_object(value, "a subscription")
        tags = as_list(members.get("tagsSet"), "tagsSet"), as_list(members.get("codeSet"), "codeSet")
        if max(map(len, tags)) > MAX_TAGS:
            raise BodyError(f"a subscription has {max(map(len, tags))} tags, at most {MAX_TAGS} are allowed")
        return cls(
            as_name(members.get("topic"), "topic"),
            as_text(members.get("subString") or "*", "subString"),
            [as_name(one, "a tag") for one in tags[0]],
            [as_int(one, "a tag's code") for one in tags[1]],
            as_int(members.get("subVersion", 0), "subVersion"),
            as_name(members.get("expressionType") or "TAG", "expressionType"),
            as_bool(members.get("classFilterMode"), "classFilterMode"),
        )


@dataclass(slots=True)
class ConsumerData:
    """One consumer group of a client."""

    group_name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscriptions: list[SubscriptionData] = field(default_factory=list)
    unit_mode: bool = False

    @classmethod
    def from_json(cls, value: Any) -> ConsumerData:
        members = as_object(value, "a consumer group")
        subscriptions = as_list(members.get("subscriptionDataSet"), "subscriptionDataSet")
        texts = sum(len(str(one.get("subString", ""))) for one in subscriptions if isinstance(one, dict))
        if texts > MAX_FILTER_CHARACTERS:
            raise BodyError(
                f"the filters of a group have {texts} characters, at most {MAX_FILTER_CHARACTERS} are allowed"
            )
        return cls(
            as_name(members.get("groupName"), "groupName"),
            as_name(members.get("consumeType") or "CONSUME_PASSIVELY", "consumeType"),
            as_name(members.get("messageModel") or "CLUSTERING", "messageModel"),
            as_name(members.get("consumeFromWhere") or "CONSUME_FROM_LAST_OFFSET", "consumeFromWhere"),
            [SubscriptionData.from_json(one) for one in subscriptions],
            as_bool(members.get("unitMode"), "unitMode"),
        )


@dataclass(slots=True)
class HeartbeatData:
    """The body of 34. With ``without_sub`` the subscriptions are omitted and must not replace known ones."""

    client_id: str
    producer_groups: list[str] = field(default_factory=list)
    consumers: list[ConsumerData] = field(default_factory=list)
    heartbeat_fingerprint: int = 0
    without_sub: bool = False

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> HeartbeatData:
        """Raises BodyError."""
        members = load_object(data)
        producers = as_list(members.get("producerDataSet"), "producerDataSet")
        consumers = as_list(members.get("consumerDataSet"), "consumerDataSet")
        return cls(
            as_name(members.get("clientID"), "clientID"),
            [as_name(as_object(one, "a producer group").get("groupName"), "groupName") for one in producers],
            [ConsumerData.from_json(one) for one in consumers],
            as_int(members.get("heartbeatFingerprint", 0), "heartbeatFingerprint"),
            as_bool(members.get("withoutSub"), "withoutSub"),
        )


@dataclass(slots=True)
class CheckClientRequestBody:
    """The body of 46."""

    client_id: str
    group: str
    subscription_data: SubscriptionData | None = None

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> CheckClientRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        subscription = members.get("subscriptionData")
        return cls(
            as_text(members.get("clientId") or "", "clientId"),
            as_text(members.get("group") or "", "group"),
            None if subscription is None else SubscriptionData.from_json(subscription),
        )


@dataclass(slots=True)
class ClientConnection:
    """One client of a group. ``client_addr`` is ``ip:port``."""

    client_id: str
    client_addr: str
    language: LanguageCode
    version: int
    last_update_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "clientAddr": self.client_addr,
            "clientId": self.client_id,
            "language": self.language.name,
            "version": self.version,
        }


@dataclass(slots=True)
class ConsumerConnection:
    """A consumer group with its live clients."""

    connections: list[ClientConnection] = field(default_factory=list)
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"

    def encode(self) -> bytes:
        return dumps(
            {
                "connectionSet": [one.to_json() for one in self.connections],
                "consumeFromWhere": self.consume_from_where,
                "consumeType": self.consume_type,
                "messageModel": self.message_model,
                "subscriptionTable": {topic: one.to_json() for topic, one in self.subscriptions.items()},
            }
        )


def producer_connection(connections: Iterable[ClientConnection]) -> bytes:
    """The answer to 204."""
    return dumps({"connectionSet": [one.to_json() for one in connections]})


def producer_table(groups: Mapping[str, Iterable[ClientConnection]]) -> bytes:
    """The answer to 328: all producer groups with their clients."""
    return dumps(
        {
            "data": {
                group: [
                    {
                        "clientId": one.client_id,
                        "language": one.language.name,
                        "lastUpdateTimestamp": one.last_update_ms,
                        "remoteIP": f"/{one.client_addr}",
                        "version": one.version,
                    }
                    for one in clients
                ]
                for group, clients in groups.items()
            }
        }
    )


def consumer_list(client_ids: Iterable[str]) -> bytes:
    """The answer to 38."""
    return dumps({"consumerIdList": list(client_ids)})


@dataclass(slots=True)
class LockBatchRequestBody:
    """Which queues ``client_id`` locks or unlocks for its group."""

    consumer_group: str
    client_id: str
    queues: list[RemotingMessageQueue] = field(default_factory=list)
    only_this_broker: bool = False

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> LockBatchRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        return cls(
            as_name(members.get("consumerGroup"), "consumerGroup"),
            as_name(members.get("clientId"), "clientId"),
            [RemotingMessageQueue.from_json(one) for one in as_list(members.get("mqSet"), "mqSet")],
            as_bool(members.get("onlyThisBroker"), "onlyThisBroker"),
        )


def lock_answer(queues: Iterable[RemotingMessageQueue]) -> bytes:
    """The body of the answer to 41: the queues that the client has locked."""
    return dumps({"lockOKMQSet": [queue.to_json() for queue in queues]})


@dataclass(frozen=True, slots=True)
class BatchAck:
    """Acks of one check point. ``bits`` is Base64; bit i stands for ``start_offset`` + i."""

    consumer_group: str
    topic: str
    retry: str
    start_offset: int
    queue_id: int
    revive_queue_id: int
    pop_time: int
    invisible_time: int
    bits: str

    @classmethod
    def from_json(cls, value: Any) -> BatchAck:
        """Members may have their short or their long names."""
        members = as_object(value, "an ack")

        def member(short: str, long: str) -> Any:
            return members.get(short, members.get(long))

        return cls(
            as_name(member("c", "consumerGroup"), "consumerGroup"),
            as_name(member("t", "topic"), "topic"),
            as_text(member("r", "retry") or "0", "retry"),
            as_int(member("so", "startOffset"), "startOffset"),
            as_int(member("q", "queueId"), "queueId"),
            as_int(member("rq", "reviveQueueId"), "reviveQueueId"),
            as_int(member("pt", "popTime"), "popTime"),
            as_int(member("it", "invisibleTime"), "invisibleTime"),
            as_text(member("b", "bitSet"), "bitSet"),
        )


def decode_batch_acks(data: bytes | bytearray | memoryview) -> list[BatchAck]:
    """The body of 200151. Raises BodyError."""
    return [BatchAck.from_json(one) for one in as_list(load_object(data).get("acks"), "acks")]


@dataclass(frozen=True, slots=True)
class QueryAssignmentRequestBody:
    """The body of 400."""

    topic: str
    consumer_group: str
    client_id: str
    strategy_name: str
    message_model: str

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> QueryAssignmentRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        return cls(
            as_name(members.get("topic"), "topic"),
            as_name(members.get("consumerGroup"), "consumerGroup"),
            as_name(members.get("clientId"), "clientId"),
            as_text(members.get("strategyName") or "AVG", "strategyName"),
            as_text(members.get("messageModel") or "CLUSTERING", "messageModel"),
        )


def assignments(queues: Iterable[tuple[RemotingMessageQueue, str]]) -> bytes:
    """The answer to 400: queues with the mode, POP or PULL, in which they are read."""
    return dumps(
        {"messageQueueAssignments": [{"messageQueue": queue.to_json(), "mode": mode} for queue, mode in queues]}
    )


@dataclass(frozen=True, slots=True)
class SetMessageRequestModeRequestBody(Body):
    """The body of 401."""

    topic: str
    consumer_group: str
    mode: str
    pop_share_queue_num: int

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> SetMessageRequestModeRequestBody:
        """Raises BodyError."""
        members = load_object(data)
        return cls(
            as_name(members.get("topic"), "topic"),
            as_name(members.get("consumerGroup"), "consumerGroup"),
            as_text(members.get("mode") or "PULL", "mode"),
            as_int(members.get("popShareQueueNum", 0), "popShareQueueNum"),
        )


@dataclass(slots=True)
class QueueData(Body):
    """The queues of one topic on one broker. ``perm``: 4 readable, 2 writable."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_sys_flag: int = 0

    @classmethod
    def from_json(cls, value: Any) -> QueueData:
        members = as_object(value, "queue data")
        return cls(
            as_text(members.get("brokerName"), "brokerName"),
            as_int(members.get("readQueueNums", 0), "readQueueNums"),
            as_int(members.get("writeQueueNums", 0), "writeQueueNums"),
            as_int(members.get("perm", 0), "perm"),
            as_int(members.get("topicSysFlag", 0), "topicSysFlag"),
        )


@dataclass(slots=True)
class BrokerData:
    """The members of one broker's group: ``broker_addrs`` has their addresses by broker id, 0 is the master."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str] = field(default_factory=dict)
    enable_acting_master: bool = False
    zone_name: str | None = None

    def to_json(self) -> dict[str, Any]:
        return without_none(
            {
                "brokerAddrs": {
                    str(broker_id): self.broker_addrs[broker_id] for broker_id in sorted(self.broker_addrs)
                },
                "brokerName": self.broker_name,
                "cluster": self.cluster,
                "enableActingMaster": self.enable_acting_master,
                "zoneName": self.zone_name,
            }
        )

    @classmethod
    def from_json(cls, value: Any) -> BrokerData:
        members = as_object(value, "broker data")
        addresses = as_object(members.get("brokerAddrs") or {}, "brokerAddrs")
        return cls(
            as_text(members.get("cluster", ""), "cluster"),
            as_text(members.get("brokerName"), "brokerName"),
            {as_int(broker_id, "a broker id"): as_text(one, "an address") for broker_id, one in addresses.items()},
            as_bool(members.get("enableActingMaster"), "enableActingMaster"),
            members.get("zoneName"),
        )


@dataclass(slots=True)
class TopicRouteData:
    """The answer to 105."""

    queue_datas: list[QueueData] = field(default_factory=list)
    broker_datas: list[BrokerData] = field(default_factory=list)
    filter_server_table: dict[str, list[str]] = field(default_factory=dict)
    order_topic_conf: str | None = None
    topic_queue_mapping_by_broker: dict[str, Any] | None = None

    def encode(self) -> bytes:
        return dumps(
            without_none(
                {
                    "brokerDatas": [one.to_json() for one in self.broker_datas],
                    "filterServerTable": self.filter_server_table,
                    "orderTopicConf": self.order_topic_conf,
                    "queueDatas": [one.to_json() for one in self.queue_datas],
                    "topicQueueMappingByBroker": self.topic_queue_mapping_by_broker,
                }
            )
        )

    @classmethod
    def from_json(cls, value: Any) -> TopicRouteData:
        members = as_object(value, "a route")
        return cls(
            [QueueData.from_json(one) for one in as_list(members.get("queueDatas"), "queueDatas")],
            [BrokerData.from_json(one) for one in as_list(members.get("brokerDatas"), "brokerDatas")],
            order_topic_conf=members.get("orderTopicConf"),
        )


@dataclass(slots=True)
class ClusterInfo:
    """The answer to 106: all brokers by name, and the names by cluster."""

    broker_addr_table: dict[str, BrokerData] = field(default_factory=dict)
    cluster_addr_table: dict[str, list[str]] = field(default_factory=dict)

    def encode(self) -> bytes:
        return dumps(
            {
                "brokerAddrTable": {name: one.to_json() for name, one in self.broker_addr_table.items()},
                "clusterAddrTable": self.cluster_addr_table,
            }
        )

    @classmethod
    def from_json(cls, value: Any) -> ClusterInfo:
        members = as_object(value, "cluster info")
        brokers = as_object(members.get("brokerAddrTable") or {}, "brokerAddrTable")
        clusters = as_object(members.get("clusterAddrTable") or {}, "clusterAddrTable")
        return cls(
            {name: BrokerData.from_json(one) for name, one in brokers.items()},
            {name: [as_text(one, "a broker") for one in as_list(names, name)] for name, names in clusters.items()},
        )


def topic_list(topics: list[str], broker_addr: str | None = None) -> bytes:
    """A TopicList body."""
    return dumps(without_none({"brokerAddr": broker_addr, "topicList": topics}))


def kv_table(table: dict[str, str]) -> bytes:
    """A KVTable body."""
    return dumps({"table": table})


@dataclass(frozen=True, slots=True)
class TopicOffset(Body):
    """One queue of a topic: offsets, and the time of its newest message in ms (0 without one)."""

    min_offset: int
    max_offset: int
    last_update_timestamp: int


def topic_stats_table(offsets: Mapping[RemotingMessageQueue, TopicOffset], put_tps: float = 0.0) -> bytes:
    """The answer to 202."""
    table = queue_map({queue: one.to_json() for queue, one in offsets.items()})
    return dumps({"offsetTable": table, "topicPutTps": put_tps})


@dataclass(frozen=True, slots=True)
class OffsetWrapper(Body):
    """The progress of a group in one queue; ``last_timestamp`` is the time of the last consumed message in ms."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_timestamp: int


@dataclass(slots=True)
class ConsumeStats:
    """The answer to 208."""

    offset_table: dict[RemotingMessageQueue, OffsetWrapper] = field(default_factory=dict)
    consume_tps: float = 0.0

    def to_json(self) -> dict[str, Any]:
        table = queue_map({queue: one.to_json() for queue, one in self.offset_table.items()})
        return {"consumeTps": self.consume_tps, "offsetTable": table}

    def encode(self) -> bytes:
        return dumps(self.to_json())


def reset_offset_body(offsets: Mapping[RemotingMessageQueue, int]) -> bytes:
    """The answer to 222 and the body of 220."""
    return dumps({"offsetTable": queue_map(offsets)})


@dataclass(frozen=True, slots=True)
class StatsItem(Body):
    """A count within a window: ``tps`` its rate, ``avgpt`` its mean value."""

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0


def broker_stats_data(minute: StatsItem, hour: StatsItem, day: StatsItem) -> bytes:
    """The answer to 315."""
    return dumps({"statsDay": day.to_json(), "statsHour": hour.to_json(), "statsMinute": minute.to_json()})


PERM_READ: Final = 4
PERM_WRITE: Final = 2


@dataclass(slots=True)
class RemotingTopicConfig(Body):
    """A topic as topics.json has it. ``perm``: 4 readable, 2 writable, 1 inherited."""

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = PERM_READ | PERM_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Any) -> RemotingTopicConfig:
        members = as_object(value, "a topic")
        attributes = as_map(members.get("attributes"), "attributes", lambda one: as_text(one, "an attribute"))
        return cls(
            as_text(members.get("topicName"), "topicName"),
            as_int(members.get("readQueueNums", 16), "readQueueNums"),
            as_int(members.get("writeQueueNums", 16), "writeQueueNums"),
            as_int(members.get("perm", 6), "perm"),
            as_text(members.get("topicFilterType") or "SINGLE_TAG", "topicFilterType"),
            as_int(members.get("topicSysFlag", 0), "topicSysFlag"),
            as_bool(members.get("order"), "order"),
            attributes,
        )

    def to_text(self) -> str:
        """The short form of a compressed registration: ``name read write perm filterType attributes`` (spec 14)."""
        attributes = orjson.dumps(self.attributes).decode()
        return " ".join(
            [
                self.topic_name,
                str(self.read_queue_nums),
                str(self.write_queue_nums),
                str(self.perm),
                self.topic_filter_type,
                attributes,
            ]
        )

    @classmethod
    def from_text(cls, text: str) -> RemotingTopicConfig:
        """From the short form. Attributes that cannot be read are omitted, as RocketMQ does. Raises BodyError."""
        parts = text.split(" ", 5)
        if len(parts) < 5:
            raise BodyError(f"a topic has {len(parts)} parts, it needs 5: {text!r:.200}")
        read, write, perm = (as_int(part, "a number of a topic") for part in parts[1:4])
        attributes: dict[str, str] = {}
        if len(parts) == 6:
            try:
                attributes = {str(name): str(one) for name, one in orjson.loads(parts[5]).items()}
            except (ValueError, AttributeError):
                attributes = {}
        return cls(parts[0], read, write, perm, parts[4], attributes=attributes)


@dataclass(slots=True)
class TopicConfigSerializeWrapper:
    """All topics of a broker with their version; the answer to 21 and a part of 103."""

    topic_config_table: dict[str, RemotingTopicConfig] = field(default_factory=dict)
    data_version: RemotingDataVersion = field(default_factory=RemotingDataVersion)
    mapping_info: dict[str, Any] = field(default_factory=dict)
    """topicQueueMappingInfoMap of static topics, unread."""

    def to_json(self) -> dict[str, Any]:
        return {
            "dataVersion": self.data_version.to_json(),
            "mappingDataVersion": self.data_version.to_json(),
            "topicConfigTable": {name: one.to_json() for name, one in self.topic_config_table.items()},
            "topicQueueMappingDetailMap": {},
            "topicQueueMappingInfoMap": self.mapping_info,
        }

    @classmethod
    def from_json(cls, value: Any) -> TopicConfigSerializeWrapper:
        return finish(cls.reading(value))

    @classmethod
    def reading(cls, value: Any) -> Steps[TopicConfigSerializeWrapper]:
        """:meth:`from_json` in steps."""
        members = as_object(value, "the topics")
        table: dict[str, RemotingTopicConfig] = {}
        for item in in_steps(as_map(members.get("topicConfigTable"), "topicConfigTable", lambda one: one).items()):
            if item is None:
                yield
            else:
                table[item[0]] = RemotingTopicConfig.from_json(item[1])
        return cls(
            table,
            RemotingDataVersion.from_json(members.get("dataVersion")),
            as_map(members.get("topicQueueMappingInfoMap"), "topicQueueMappingInfoMap", lambda one: one),
        )


_INT: Final = struct.Struct(">i")
_COMPRESSION_LEVEL: Final = 9


@dataclass(slots=True)
class RegisterBrokerBody:
    """The topics of a broker, and its filter servers (a feature that RocketMQ has removed)."""

    topics: TopicConfigSerializeWrapper = field(default_factory=TopicConfigSerializeWrapper)
    filter_servers: list[str] = field(default_factory=list)

    def encode(self, *, compressed: bool = False) -> bytes:
        if not compressed:
            return dumps(
                {"filterServerList": self.filter_servers, "topicConfigSerializeWrapper": self.topics.to_json()}
            )
        parts = [dumps(self.topics.data_version.to_json())]
        topics = [one.to_text().encode() for one in self.topics.topic_config_table.values()]
        mappings = [dumps(one) for one in self.topics.mapping_info.values()]
        parts = [*_sized(parts), _INT.pack(len(topics)), *_sized(topics), *_sized([dumps(self.filter_servers)])]
        parts += [_INT.pack(len(mappings)), *_sized(mappings)]
        return zlib.compress(b"".join(parts), _COMPRESSION_LEVEL)

    @classmethod
    def decode(
        cls, data: bytes | bytearray | memoryview, *, compressed: bool, version: int, max_bytes: int
    ) -> RegisterBrokerBody:
        """From a body of a broker of ``version``; at most ``max_bytes`` after decompression. Raises BodyError."""
        return finish(cls.decoding(data, compressed=compressed, version=version, max_bytes=max_bytes))

    @classmethod
    def decoding(
        cls, data: bytes | bytearray | memoryview, *, compressed: bool, version: int, max_bytes: int
    ) -> Steps[RegisterBrokerBody]:
        """:meth:`decode` in steps. That a body which is not compressed is JSON is one of them: 0.1 s for 16 MiB."""
        if not data:
            return cls()
        if compressed:
            return (yield from _Inflated(_inflate(data, max_bytes)).body(version))
        members = load_object(data)
        yield
        topics = yield from TopicConfigSerializeWrapper.reading(members.get("topicConfigSerializeWrapper", {}))
        return cls(topics, _texts(members.get("filterServerList")))


def _texts(value: Any) -> list[str]:
    return [as_text(one, "a filter server") for one in as_list(value, "filterServerList")]


def _sized(parts: list[bytes]) -> list[bytes]:
    return [_INT.pack(len(part)) + part for part in parts]


def _inflate(data: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, max_bytes)
    except zlib.error as error:
        raise BodyError(f"the body is not compressed with zlib: {error}") from error
    if not stream.eof and len(plain) < max_bytes:
        raise BodyError("the compressed body ends too early")
    if not stream.eof:
        raise BodyError(f"the body has more than {max_bytes} bytes after decompression")
    return plain


class _Inflated:
    """Reads the parts of a compressed body."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def body(self, version: int) -> Steps[RegisterBrokerBody]:
        data_version = RemotingDataVersion.from_json(loads(self._part("the data version")))
        table = {}
        for number in in_steps(self._count()):
            if number is None:
                yield
                continue
            config = RemotingTopicConfig.from_text(self._part("a topic").decode("utf-8", "replace"))
            table[config.topic_name] = config
        filter_servers = _texts(loads(self._part("the filter servers")))
        mappings: dict[str, Any] = {}
        if version >= V5_0_0:
            for number in in_steps(self._count()):
                if number is None:
                    yield
                    continue
                info = as_object(loads(self._part("a mapping")), "a mapping")
                mappings[as_text(info.get("topic"), "topic")] = info
        return RegisterBrokerBody(TopicConfigSerializeWrapper(table, data_version, mappings), filter_servers)

    def _int(self, what: str) -> int:
        if len(self._data) - self._at < 4:
            raise BodyError(f"the body ends at byte {len(self._data)}, before {what}")
        value: int = _INT.unpack_from(self._data, self._at)[0]
        self._at += 4
        return value

    def _count(self) -> range:
        """As many as the next number says; each takes 4 bytes at least, so a wrong number cannot cost much."""
        count = self._int("a count")
        if not 0 <= count <= (len(self._data) - self._at) // 4:
            raise BodyError(f"the body claims {count} entries at byte {self._at - 4}")
        return range(count)

    def _part(self, what: str) -> bytes:
        size = self._int(what)
        if not 0 <= size <= len(self._data) - self._at:
            raise BodyError(f"{what} at byte {self._at} claims {size} bytes, {len(self._data) - self._at} are left")
        self._at += size
        return self._data[self._at - size : self._at]


def crc32(data: bytes | bytearray | memoryview) -> int:
    """RocketMQ's checksum of a registration: CRC-32 with its highest bit cleared."""
    return zlib.crc32(data) & 0x7FFF_FFFF
