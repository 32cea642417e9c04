"""Routes: which brokers have a topic, and where they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from commitmq_plugins.rocketmq.remoting.fastjson import (
    as_bool,
    as_int,
    as_list,
    as_object,
    as_text,
    dumps,
    without_none,
)


@dataclass(slots=True)
class QueueData:
    """The queues of one topic on one broker. ``perm``: 4 readable, 2 writable."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_sys_flag: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "brokerName": self.broker_name,
            "perm": self.perm,
            "readQueueNums": self.read_queue_nums,
            "topicSysFlag": self.topic_sys_flag,
            "writeQueueNums": self.write_queue_nums,
        }

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
