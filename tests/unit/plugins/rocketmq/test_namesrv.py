"""Goal: the name server answers as RocketMQ's, keeps only brokers that live, and stays within its limits.

Method: the requests as commands, with a clock of the test's own; expected texts from the page; each broker's life by
registration, silence, end of its connection and its own word.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from commitmq.log import get_log
from commitmq_plugins.rocketmq.namesrv import KVConfig, NamesrvConfig, NamesrvRequests
from commitmq_plugins.rocketmq.remoting.bodies import (
    RegisterBrokerBody,
    RemotingDataVersion,
    RemotingTopicConfig,
    TopicConfigSerializeWrapper,
    crc32,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, loads
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.route_table import RouteCache, RouteLimits, RouteTable

CHANNEL = "a connection"


class Namesrv:
    """A name server without a socket; ``now_ms`` is its clock."""

    def __init__(self, folder: Path, limits: RouteLimits | None = None) -> None:
        self.now_ms = 0
        self.routes = RouteTable(limits)
        self.kv_path = folder / "kvConfig.json"
        self.config = NamesrvConfig()
        kv = KVConfig(self.kv_path, max_bytes=10_000)
        self.requests = NamesrvRequests(self.routes, kv, self.config, lambda: self.now_ms, get_log("test"))

    def ask(
        self, code: RequestCode, body: bytes = b"", *, channel: str = CHANNEL, version: int = 493, **fields: Any
    ) -> Command:
        texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
        found = self.requests.handle(channel, Command(code, opaque=7, ext_fields=texts, body=body))
        answer = found if isinstance(found, Command) else asyncio.run(found)  # type: ignore[arg-type]
        assert answer.opaque == 7
        assert answer.is_response
        return answer

    def register(
        self,
        *topics: RemotingTopicConfig,
        name: str = "broker-a",
        address: str = "10.0.0.1:10911",
        broker_id: int = 0,
        counter: int = 1,
        state_version: int = 0,
        compressed: bool = False,
        channel: str = CHANNEL,
        **fields: Any,
    ) -> Command:
        table = {one.topic_name: one for one in topics}
        version = RemotingDataVersion(1, counter, state_version)
        body = RegisterBrokerBody(TopicConfigSerializeWrapper(table, version)).encode(compressed=compressed)
        wanted: dict[str, Any] = {
            "brokerName": name,
            "brokerAddr": address,
            "clusterName": "C",
            "haServerAddr": address.replace("10911", "10912"),
            "brokerId": broker_id,
            "compressed": compressed,
            "bodyCrc32": crc32(body),
            "enableActingMaster": False,
            **fields,
        }
        wanted = {key: value for key, value in wanted.items() if value is not None}
        return self.ask(RequestCode.REGISTER_BROKER, body, channel=channel, **wanted)

    def route(self, topic: str) -> Any:
        answer = self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic)
        return loads(answer.body) if answer.code == ResponseCode.SUCCESS else answer.code

    def perm(self, topic: str, name: str = "broker-a") -> int:
        return int(next(one["perm"] for one in self.route(topic)["queueDatas"] if one["brokerName"] == name))

    def brokers(self) -> set[str]:
        return set(loads(self.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body)["brokerAddrTable"])

    def topics(self) -> set[str]:
        return set(loads(self.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)["topicList"])


@pytest.fixture
def namesrv(tmp_path: Path) -> Namesrv:
    return Namesrv(tmp_path)


T, U = RemotingTopicConfig("T", 8, 4), RemotingTopicConfig("U", 1, 1)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_broker_registers_and_its_topics_have_routes(namesrv: Namesrv, compressed: bool) -> None:
    answer = namesrv.register(T, U, compressed=compressed)
    assert (answer.code, answer.ext_fields, bytes(answer.body)) == (0, {}, b"")
    found = namesrv.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
    assert bytes(found.body) == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911"},"brokerName":"broker-a","cluster":"C",'
        b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
        b'"readQueueNums":8,"topicSysFlag":0,"writeQueueNums":4}]}'
    )
    assert namesrv.topics() == {"T", "U"}


def test_a_topic_without_a_route_has_the_code_that_clients_know(namesrv: Namesrv) -> None:
    answer = namesrv.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert str(answer.remark).startswith("No topic route info in name server for the topic: T\nSee http")


def test_clusters_brokers_and_members(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    namesrv.register(T, U, name="broker-b", address="10.0.0.2:10911")
    namesrv.register(T, U, address="10.0.0.3:10911", broker_id=1)
    info = loads(namesrv.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body)
    assert info["clusterAddrTable"] == {"C": ["broker-a", "broker-b"]}
    assert info["brokerAddrTable"]["broker-a"]["brokerAddrs"] == {"0": "10.0.0.1:10911", "1": "10.0.0.3:10911"}
    members = namesrv.ask(RequestCode.GET_BROKER_MEMBER_GROUP, clusterName="C", brokerName="broker-a")
    assert bytes(members.body) == (
        b'{"brokerMemberGroup":{"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.3:10911"},"brokerName":"broker-a",'
        b'"cluster":"C"}}'
    )
    system = loads(namesrv.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).body)
    assert system == {"brokerAddr": "10.0.0.1:10911", "topicList": ["C", "broker-a", "broker-b"]}
    assert {one["brokerName"] for one in namesrv.route("T")["queueDatas"]} == {"broker-a", "broker-b"}
    assert loads(namesrv.ask(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="C").body) == {"topicList": ["T", "U"]}
    assert loads(namesrv.ask(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="D").body) == {"topicList": []}


def test_a_slave_learns_its_master(namesrv: Namesrv) -> None:
    assert namesrv.register(T, U, address="10.0.0.3:10911", broker_id=1).ext_fields == {}
    namesrv.register(T, U)
    answer = namesrv.register(T, U, address="10.0.0.3:10911", broker_id=1)
    assert answer.ext_fields == {"haServerAddr": "10.0.0.1:10912", "masterAddr": "10.0.0.1:10911"}


def test_topics_change_with_the_data_version(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    namesrv.register(RemotingTopicConfig("T", 16, 16), U)
    assert namesrv.route("T")["queueDatas"][0]["readQueueNums"] == 8, "the version is the same"
    namesrv.register(RemotingTopicConfig("T", 16, 16), U, counter=2)
    assert namesrv.route("T")["queueDatas"][0]["readQueueNums"] == 16
    namesrv.register(RemotingTopicConfig("V"), counter=3)
    assert namesrv.topics() == {"T", "U", "V"}, "an increment takes nothing away"


def test_a_whole_table_takes_topics_away(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    namesrv.register(T, U, name="broker-b", address="10.0.0.2:10911")
    namesrv.register(T, counter=2, wholeTopicTable=True)
    assert {one["brokerName"] for one in namesrv.route("U")["queueDatas"]} == {"broker-b"}
    assert {one["brokerName"] for one in namesrv.route("T")["queueDatas"]} == {"broker-a", "broker-b"}


def test_an_increment_of_an_unknown_broker_is_refused(namesrv: Namesrv) -> None:
    answer = namesrv.register(T)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "register broker failed")
    assert loads(namesrv.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body) == {
        "brokerAddrTable": {},
        "clusterAddrTable": {},
    }


def test_a_damaged_registration_is_refused(namesrv: Namesrv) -> None:
    answer = namesrv.register(T, U, bodyCrc32=1)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "crc32 not match")
    assert namesrv.register(T, U, bodyCrc32=0).code == 0, "0 is unchecked"


def test_an_older_process_does_not_displace_a_newer_one(namesrv: Namesrv) -> None:
    namesrv.register(T, U, state_version=2)
    namesrv.register(T, U, address="10.0.0.9:10911", state_version=1)
    assert namesrv.route("T")["brokerDatas"][0]["brokerAddrs"] == {"0": "10.0.0.1:10911"}
    namesrv.register(T, U, address="10.0.0.9:10911", state_version=3)
    assert namesrv.route("T")["brokerDatas"][0]["brokerAddrs"] == {"0": "10.0.0.9:10911"}


def test_a_slave_that_becomes_master_has_one_id(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    namesrv.register(T, U, address="10.0.0.3:10911", broker_id=1)
    namesrv.register(T, U, address="10.0.0.3:10911", broker_id=0, counter=2)
    assert namesrv.route("T")["brokerDatas"][0]["brokerAddrs"] == {"0": "10.0.0.3:10911"}


def test_a_broker_that_leaves_takes_its_topics_along(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    namesrv.register(T, RemotingTopicConfig("V"), name="broker-b", address="10.0.0.2:10911")
    fields: dict[str, Any] = {
        "brokerName": "broker-a",
        "brokerAddr": "10.0.0.1:10911",
        "clusterName": "C",
        "brokerId": 0,
    }
    assert namesrv.ask(RequestCode.UNREGISTER_BROKER, **fields).code == 0
    assert namesrv.topics() == {"T", "V"}
    assert {one["brokerName"] for one in namesrv.route("T")["brokerDatas"]} == {"broker-b"}
    assert loads(namesrv.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body)["clusterAddrTable"] == {"C": ["broker-b"]}
    assert namesrv.ask(RequestCode.UNREGISTER_BROKER, **fields).code == 0, "again"


def test_a_silent_broker_expires(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    namesrv.register(T, U, name="broker-b", address="10.0.0.2:10911", heartbeatTimeoutMillis=10_000, channel="b")
    namesrv.now_ms = 10_000
    assert namesrv.routes.expire(namesrv.now_ms) == []
    namesrv.now_ms = 10_001
    (((cluster, address), channel),) = namesrv.routes.expire(namesrv.now_ms)
    assert (cluster, address, channel) == ("C", "10.0.0.2:10911", "b")
    fields: dict[str, Any] = {"clusterName": "C", "brokerAddr": "10.0.0.1:10911", "brokerName": "broker-a"}
    assert namesrv.ask(RequestCode.BROKER_HEARTBEAT, **fields).code == 0
    namesrv.now_ms = 130_001
    assert namesrv.routes.expire(namesrv.now_ms) == []
    namesrv.now_ms = 130_002
    assert len(namesrv.routes.expire(namesrv.now_ms)) == 1
    assert namesrv.route("T") == ResponseCode.TOPIC_NOT_EXIST
    assert namesrv.topics() == set()


def test_a_broker_lives_as_long_as_its_last_connection(namesrv: Namesrv) -> None:
    namesrv.register(T, U, channel="first")
    namesrv.register(T, U, channel="second")
    assert namesrv.routes.channel_closed("first") == []
    assert namesrv.route("T") != ResponseCode.TOPIC_NOT_EXIST
    assert namesrv.routes.channel_closed("second") == [("C", "10.0.0.1:10911")]
    assert namesrv.route("T") == ResponseCode.TOPIC_NOT_EXIST


def test_a_slave_without_master_is_read_only_if_its_broker_wants_that(namesrv: Namesrv) -> None:
    namesrv.register(T, U, enableActingMaster=True)
    namesrv.register(T, U, address="10.0.0.3:10911", broker_id=1, enableActingMaster=True)
    assert namesrv.perm("T") == 6
    namesrv.routes.channel_closed(CHANNEL)
    namesrv.register(T, U, enableActingMaster=True, channel="master")
    namesrv.register(T, U, address="10.0.0.3:10911", broker_id=1, enableActingMaster=True)
    namesrv.routes.channel_closed("master")
    assert namesrv.perm("T") == 4


def test_the_topics_of_a_slave_below_version_5_do_not_count(namesrv: Namesrv) -> None:
    namesrv.register(T, U, broker_id=1, enableActingMaster=None)
    assert namesrv.topics() == set()
    namesrv.register(T, U, broker_id=1, enableActingMaster=False)
    assert namesrv.topics() == {"T", "U"}


def test_versions_are_compared(namesrv: Namesrv) -> None:
    fields: dict[str, Any] = {
        "brokerName": "broker-a",
        "brokerAddr": "10.0.0.1:10911",
        "clusterName": "C",
        "brokerId": 0,
    }
    same = dumps(RemotingDataVersion(1, 1).to_json())
    answer = namesrv.ask(RequestCode.QUERY_DATA_VERSION, same, **fields)
    assert (answer.ext_fields, bytes(answer.body)) == ({"changed": "true"}, b"")
    namesrv.register(T, U)
    answer = namesrv.ask(RequestCode.QUERY_DATA_VERSION, same, **fields)
    assert (answer.ext_fields, loads(answer.body)) == (
        {"changed": "false"},
        {"counter": 1, "stateVersion": 0, "timestamp": 1},
    )
    assert namesrv.ask(RequestCode.QUERY_DATA_VERSION, dumps({"counter": 2}), **fields).ext_fields == {
        "changed": "true"
    }


def test_producers_can_be_kept_from_a_broker(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    assert namesrv.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="broker-a").ext_fields == {
        "wipeTopicCount": "2"
    }
    assert namesrv.perm("T") == 4
    namesrv.register(T, U)
    assert namesrv.perm("T") == 4, "nothing has changed at the broker"
    assert namesrv.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="broker-a").ext_fields == {"addTopicCount": "2"}
    assert namesrv.perm("T") == 6
    assert namesrv.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="no").ext_fields == {"addTopicCount": "0"}


def test_topics_are_deleted_and_added_by_name(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    assert namesrv.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="T", clusterName="D").code == 0
    assert namesrv.topics() == {"T", "U"}
    namesrv.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="T", clusterName="C")
    namesrv.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="U")
    assert namesrv.topics() == set()
    queues = {"brokerName": "broker-a", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
    namesrv.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, dumps({"queueDatas": [queues]}), topic="V")
    namesrv.ask(
        RequestCode.REGISTER_TOPIC_IN_NAMESRV, dumps({"queueDatas": [{**queues, "brokerName": "no"}]}), topic="W"
    )
    assert namesrv.topics() == {"V"}


def test_unit_topics(namesrv: Namesrv) -> None:
    flags = {"none": 0, "unit": 1, "sub": 2, "both": 3}
    namesrv.register(*(RemotingTopicConfig(name, topic_sys_flag=flag) for name, flag in flags.items()))

    def names(code: RequestCode) -> list[str]:
        return sorted(loads(namesrv.ask(code).body)["topicList"])

    assert names(RequestCode.GET_UNIT_TOPIC_LIST) == ["both", "unit"]
    assert names(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST) == ["both", "sub"]
    assert names(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == ["sub"]


def test_stored_texts_outlive_the_process(namesrv: Namesrv, tmp_path: Path) -> None:
    missing = namesrv.ask(RequestCode.GET_KV_CONFIG, namespace="N", key="k")
    assert (missing.code, missing.remark) == (ResponseCode.QUERY_NOT_FOUND, "No config item, Namespace: N Key: k")
    assert namesrv.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="N").remark == "No config item, Namespace: N"
    assert namesrv.ask(RequestCode.PUT_KV_CONFIG, namespace="N", key="k", value="v=1;w").code == 0
    assert namesrv.ask(RequestCode.PUT_KV_CONFIG, key="k").remark == "namespace or key is null"
    again = Namesrv(tmp_path)
    assert again.ask(RequestCode.GET_KV_CONFIG, namespace="N", key="k").ext_fields == {"value": "v=1;w"}
    assert bytes(again.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="N").body) == b'{"table":{"k":"v=1;w"}}'
    assert again.kv_path.read_bytes() == b'{"configTable":{"N":{"k":"v=1;w"}}}'
    assert again.ask(RequestCode.DELETE_KV_CONFIG, namespace="N", key="k").code == 0
    assert again.ask(RequestCode.DELETE_KV_CONFIG, namespace="N", key="k").code == 0
    assert Namesrv(tmp_path).ask(RequestCode.GET_KV_CONFIG, namespace="N", key="k").code == ResponseCode.QUERY_NOT_FOUND


def test_stored_texts_are_limited(namesrv: Namesrv) -> None:
    answer = namesrv.ask(RequestCode.PUT_KV_CONFIG, namespace="N", key="k", value="x" * 10_000)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "at most 10000 are allowed" in str(answer.remark)
    assert namesrv.ask(RequestCode.GET_KV_CONFIG, namespace="N", key="k").code == ResponseCode.QUERY_NOT_FOUND


def test_orders_of_topics_are_part_of_routes_only_when_switched_on(namesrv: Namesrv) -> None:
    namesrv.ask(RequestCode.PUT_KV_CONFIG, namespace="ORDER_TOPIC_CONFIG", key="T", value="broker-a:4")
    assert bytes(namesrv.register(T, U).body) == b'{"table":{"T":"broker-a:4"}}'
    assert "orderTopicConf" not in namesrv.route("T")
    assert namesrv.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"orderMessageEnable=true\nunknown=1\n").code == 0
    assert namesrv.route("T")["orderTopicConf"] == "broker-a:4"
    assert "orderTopicConf" not in namesrv.route("U")


def test_settings_are_read_and_changed(namesrv: Namesrv) -> None:
    text = bytes(namesrv.ask(RequestCode.GET_NAMESRV_CONFIG).body).decode()
    assert "orderMessageEnable=false\n" in text
    assert "listenPort=9876\n" in text
    namesrv.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"# a comment\nenableAllTopicList : false")
    answer = namesrv.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "disable")
    answer = namesrv.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"kvConfigPath=/tmp/x\nenableAllTopicList=true")
    assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, "Can not update config in black list.")
    assert not namesrv.config.enable_all_topic_list


def test_what_it_does_not_know_is_refused(namesrv: Namesrv) -> None:
    answer = namesrv.ask(RequestCode.SEND_MESSAGE_V2)
    assert (answer.code, answer.remark) == (3, " request type 310 not supported")


def test_a_wrong_request_is_an_answer(namesrv: Namesrv) -> None:
    answer = namesrv.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "the custom field <topic> is null")
    answer = namesrv.register(T, U, brokerId="x")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    answer = namesrv.register(T, U, compressed=True, bodyCrc32=0)
    assert answer.code == ResponseCode.SUCCESS
    body = b"{"
    fields: dict[str, Any] = {
        "brokerName": "b",
        "brokerAddr": "a",
        "clusterName": "C",
        "brokerId": 0,
        "bodyCrc32": crc32(body),
    }
    assert namesrv.ask(RequestCode.REGISTER_BROKER, body, **fields).code == ResponseCode.SYSTEM_ERROR


def test_limits(tmp_path: Path) -> None:
    namesrv = Namesrv(tmp_path, RouteLimits(max_brokers=2, max_topics=5))
    namesrv.register(T, U)
    namesrv.register(T, U, name="broker-b", address="10.0.0.2:10911")
    answer = namesrv.register(T, U, name="broker-c", address="10.0.0.3:10911")
    assert "2 brokers already" in str(answer.remark)
    answer = namesrv.register(T, U, RemotingTopicConfig("V"), RemotingTopicConfig("W"), counter=2)
    assert answer.remark == (
        "2 new topics are too many: the name server has 4 of 5 (plugins.rocketmq.max_topic_routes)"
    )
    assert namesrv.topics() == {"T", "U"}
    assert namesrv.register(T, U, RemotingTopicConfig("V"), counter=2).code == 0
    namesrv.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="T")
    assert namesrv.register(U, RemotingTopicConfig("W"), RemotingTopicConfig("X"), counter=3).code == 0, (
        "deleted ones do not count"
    )


def test_one_address_has_one_name(tmp_path: Path) -> None:
    namesrv = Namesrv(tmp_path, RouteLimits(max_brokers=2))
    for number in range(5):
        assert namesrv.register(T, U, name=f"broker-{number}").code == 0
        assert namesrv.brokers() == {f"broker-{number}"}
    assert namesrv.register(T, U, name="other", address="10.0.0.2:10911").code == 0
    assert "2 brokers already" in str(namesrv.register(T, U, name="more", address="10.0.0.3:10911").remark)
    namesrv.ask(RequestCode.UNREGISTER_BROKER, **{**BROKER_A, "brokerName": "nosuch"})
    assert namesrv.brokers() == {"broker-4", "other"}, "who names another broker ends none"
    namesrv.routes.channel_closed(CHANNEL)
    assert namesrv.brokers() == namesrv.topics() == set()


def test_a_name_is_in_one_cluster(namesrv: Namesrv) -> None:
    namesrv.register(T, U)
    namesrv.register(T, U, address="10.0.0.3:10911", broker_id=1)
    namesrv.register(T, U, address="10.0.0.2:10911", clusterName="D", channel="another")
    info = loads(namesrv.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body)
    assert info["clusterAddrTable"] == {"D": ["broker-a"]}
    assert info["brokerAddrTable"]["broker-a"]["brokerAddrs"] == {"0": "10.0.0.2:10911"}
    namesrv.routes.channel_closed("another")
    assert namesrv.brokers() == namesrv.topics() == set()


def test_a_broker_whose_new_topics_are_refused_stays(tmp_path: Path) -> None:
    namesrv = Namesrv(tmp_path, RouteLimits(max_topics=3))
    namesrv.register(T, U, heartbeatTimeoutMillis=1_000)
    for _ in range(5):
        namesrv.now_ms += 900
        many = [RemotingTopicConfig(f"t{number}") for number in range(5)]
        assert namesrv.register(T, U, *many, heartbeatTimeoutMillis=1_000).code == ResponseCode.SYSTEM_ERROR
        assert namesrv.routes.expire(namesrv.now_ms) == []
    assert namesrv.topics() == {"T", "U"}


def test_topics_have_the_names_that_they_say(tmp_path: Path) -> None:
    namesrv = Namesrv(tmp_path, RouteLimits(max_bytes=100_000))
    table = {f"key{number}": RemotingTopicConfig("same") for number in range(50)} | {"U": U}
    info = {f"key{number}": {"bname": "x" * 1_000} for number in range(50)}
    wrapper = TopicConfigSerializeWrapper(table, RemotingDataVersion(1, 1, 0), info)
    body = RegisterBrokerBody(wrapper).encode()
    for _ in range(5):
        assert namesrv.ask(RequestCode.REGISTER_BROKER, body, compressed=False, **BROKER_A).code == 0
        assert namesrv.topics() == {"same", "U"}
        namesrv.ask(RequestCode.UNREGISTER_BROKER, **BROKER_A)
    assert namesrv.routes._bytes == namesrv.routes._entries == 0
    wrapper = TopicConfigSerializeWrapper(
        {"short": RemotingTopicConfig("x" * 5_000), "U": U}, RemotingDataVersion(1, 1, 0)
    )
    body = RegisterBrokerBody(wrapper).encode()
    assert namesrv.ask(RequestCode.REGISTER_BROKER, body, compressed=False, **BROKER_A).code != 0


def check_sums(routes: RouteTable) -> None:
    """What the table counts is what it has, and each address is that of a broker that lives."""
    places = {
        (one.cluster, address, name) for name, one in routes._brokers.items() for address in one.broker_addrs.values()
    }
    assert places == {(key.cluster, key.address, live.name) for key, live in routes._live.items()}
    assert sum(len(one.broker_addrs) for one in routes._brokers.values()) == len(routes._live)
    assert {name for names in routes._clusters.values() for name in names} == routes._brokers.keys()
    entries = {(topic, name) for topic, queues in routes._topics.items() for name in queues}
    assert routes._entries == len(entries)
    assert {name for _, name in entries} <= routes._brokers.keys()
    size = sum(256 + len(topic.encode()) for topic, _ in entries)
    size += sum(one.size for owners in routes._mappings.values() for one in owners.values())
    assert routes._bytes == size
    assert {(topic, name) for topic, owners in routes._mappings.items() for name in owners} <= entries


@pytest.mark.parametrize("seed", range(30))
def test_liars_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    """Brokers that share names, addresses, clusters, ids and connections at random."""
    chosen = random.Random(seed)
    namesrv = Namesrv(tmp_path, RouteLimits(max_brokers=6, max_topics=40, max_bytes=20_000))
    routes, one_of = namesrv.routes, chosen.choice
    names, addresses, clusters, channels = "ab", ("1:1", "2:1", "3:1", "4:1"), "CD", "xyz"
    for step in range(200):
        channel: str = one_of(channels)
        place: dict[str, Any] = {
            "brokerName": one_of(names),
            "brokerAddr": one_of(addresses),
            "clusterName": one_of(clusters),
            "brokerId": chosen.randrange(3),
        }
        namesrv.now_ms += chosen.randrange(400)
        what = chosen.randrange(10)
        if what < 6:
            table = {
                f"k{number}": RemotingTopicConfig(f"t{chosen.randrange(12)}") for number in range(chosen.randrange(8))
            }
            info = {
                name: {"b": "x" * chosen.randrange(2_000)} for name in (*table, "none", "t1") if chosen.random() < 0.3
            }
            info = {table[name].topic_name if name in table and step % 2 else name: one for name, one in info.items()}
            wrapper = TopicConfigSerializeWrapper(table, RemotingDataVersion(1, step // 3, chosen.randrange(3)), info)
            body = RegisterBrokerBody(wrapper).encode()
            namesrv.ask(
                RequestCode.REGISTER_BROKER,
                body,
                channel=channel,
                **place,
                heartbeatTimeoutMillis=chosen.randrange(3_000),
                enableActingMaster=chosen.random() < 0.5,
                wholeTopicTable=chosen.random() < 0.3,
            )
        elif what == 6:
            namesrv.ask(RequestCode.UNREGISTER_BROKER, **place)
        elif what == 7:
            routes.channel_closed(channel)
        elif what == 8:
            routes.expire(namesrv.now_ms)
        else:
            namesrv.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic=f"t{chosen.randrange(12)}")
        check_sums(routes)
    for channel in channels:
        routes.channel_closed(channel)
    assert (routes._live, routes._brokers, routes._topics, routes._mappings) == ({}, {}, {}, {})
    assert routes._bytes == routes._entries == 0


def test_names_and_mappings_have_a_limit_in_bytes(tmp_path: Path) -> None:
    namesrv = Namesrv(tmp_path, RouteLimits(max_bytes=4_000))
    assert "1025 characters" in str(namesrv.register(T, RemotingTopicConfig("x" * 1_025)).remark)
    assert "1025 characters" in str(namesrv.register(T, U, name="n" * 1_025).remark)
    assert namesrv.topics() == set()
    assert namesrv.register(T, U, *(RemotingTopicConfig(f"t{number}") for number in range(10))).code == 0
    answer = namesrv.register(T, U, *(RemotingTopicConfig(f"t{number}") for number in range(20)), counter=2)
    assert "10 new topics" not in str(answer.remark)
    assert "bytes of routes are too many" in str(answer.remark)
    answer = mapped(namesrv, T, {"T": {"bname": "x" * 2_000}}, counter=3)
    assert "bytes of routes are too many" in str(answer.remark)
    assert "topicQueueMappingByBroker" not in namesrv.route("T")
    for size in (500, 600, 500):  # one takes the place of the other
        assert mapped(namesrv, T, {"T": {"bname": "x" * size}}, counter=4 + size).code == 0
    namesrv.ask(RequestCode.UNREGISTER_BROKER, **BROKER_A)
    assert namesrv.routes._bytes == 0


def test_another_address_that_takes_a_brokers_place_is_in_the_log(
    namesrv: Namesrv, caplog: pytest.LogCaptureFixture
) -> None:
    namesrv.register(T, U)
    namesrv.register(T, U)
    assert "takes a broker's place" not in caplog.text
    namesrv.register(T, U, address="10.0.0.66:10911", state_version=5)
    [line] = [one for one in caplog.messages if "takes a broker's place" in one]
    assert "address=10.0.0.66:10911 before=10.0.0.1:10911" in line


def test_encoded_routes_are_kept_as_far_as_there_is_room() -> None:
    cache = RouteCache(100)
    cache.put("a", b"x" * 60)
    cache.put("b", b"x" * 30)
    assert (cache.get("a"), cache.get("b")) == (b"x" * 60, b"x" * 30)
    cache.put("a", b"y" * 70)
    assert (cache.get("a"), cache.get("b")) == (b"y" * 70, b"x" * 30), "the old one makes room"
    cache.put("c", b"x" * 50)
    assert [cache.get(one) for one in "abc"] == [None, None, b"x" * 50]
    cache.put("d", b"x" * 101)
    assert cache.get("d") is None
    cache.put("e", b"x" * 100)
    cache.drop("e")
    cache.put("f", b"x" * 60)
    cache.put("g", b"x" * 40)
    assert (cache.get("f"), cache.get("g")) == (b"x" * 60, b"x" * 40)


def test_the_end_of_a_broker_looks_at_its_own_topics_only(namesrv: Namesrv) -> None:
    namesrv.register(*(RemotingTopicConfig(f"t{number}") for number in range(500)))
    namesrv.register(T, U, name="broker-b", address="10.0.0.2:10911", channel="another")
    topics = namesrv.routes._topics

    class Counted(dict[str, Any]):
        looks = 0

        def items(self) -> Any:
            Counted.looks += 1
            return super().items()

    namesrv.routes._topics = Counted(topics)
    namesrv.routes.channel_closed("another")
    assert Counted.looks == 0
    assert namesrv.topics() == {f"t{number}" for number in range(500)}


BROKER_A: dict[str, Any] = {"brokerName": "broker-a", "brokerAddr": "10.0.0.1:10911", "clusterName": "C", "brokerId": 0}


def mapped(namesrv: Namesrv, topic: RemotingTopicConfig, info: dict[str, Any], counter: int = 1) -> Command:
    table = TopicConfigSerializeWrapper({topic.topic_name: topic, "U": U}, RemotingDataVersion(1, counter, 0), info)
    body = RegisterBrokerBody(table).encode(compressed=False)
    return namesrv.ask(RequestCode.REGISTER_BROKER, body, compressed=False, bodyCrc32=crc32(body), **BROKER_A)


def test_a_mapping_lives_as_long_as_its_topic_at_its_broker(namesrv: Namesrv) -> None:
    info = {"T": {"bname": "broker-a", "epoch": 1}, "none": {"bname": "broker-a"}}
    assert mapped(namesrv, T, info).code == 0
    assert namesrv.route("T")["topicQueueMappingByBroker"] == {"broker-a": info["T"]}
    assert namesrv.routes._mappings.keys() == {"T"}, "one of a topic that it does not register is nothing"
    namesrv.register(T, U, name="broker-b", address="10.0.0.2:10911", channel="another")
    namesrv.ask(RequestCode.UNREGISTER_BROKER, **BROKER_A)
    assert "topicQueueMappingByBroker" not in namesrv.route("T")
    assert not namesrv.routes._mappings


def test_a_mapping_that_would_spoil_a_route_is_refused(namesrv: Namesrv) -> None:
    table = b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":%s,"U":%s},"topicQueueMappingInfoMap":{"T":%s}}}'
    topics = [dumps(one.to_json()) for one in (T, U)]
    deep, long = b'{"a":' * 300 + b"{}" + b"}" * 300, dumps({"x": "y" * 70_000})
    for info, why in ((deep, "nested more than 64 deep"), (long, "the mapping of topic 'T'")):
        answer = namesrv.ask(RequestCode.REGISTER_BROKER, table % (*topics, info), **BROKER_A)
        assert answer.code == ResponseCode.SYSTEM_ERROR, info[:20]
        assert why in str(answer.remark)
    namesrv.register(T, U)
    assert namesrv.route("T")["queueDatas"]


def test_the_mappings_of_a_topic_are_limited_together(namesrv: Namesrv) -> None:
    """A liar's mappings would make the route of a topic of others too long for any client."""
    answers = []
    for number in range(20):
        table = TopicConfigSerializeWrapper({"T": T, "U": U}, RemotingDataVersion(1, 1, 0), {"T": {"x": "y" * 60_000}})
        place: dict[str, Any] = {
            "brokerName": f"b{number}",
            "brokerAddr": f"10.0.0.{number}:1",
            "clusterName": "C",
            "brokerId": 0,
        }
        answers.append(namesrv.ask(RequestCode.REGISTER_BROKER, RegisterBrokerBody(table).encode(), **place))
    assert [one.code for one in answers] == [0] * 17 + [1] * 3
    assert "the mappings of topic 'T' have" in str(answers[-1].remark)
    assert len(namesrv.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").body) < 1_100_000


def test_numbers_beyond_64_bits_are_refused(namesrv: Namesrv) -> None:
    table = b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"topicName":"T","readQueueNums":"%s"}}}}'
    answer = namesrv.ask(RequestCode.REGISTER_BROKER, table % (b"9" * 30), **BROKER_A)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "64 bits" in str(answer.remark)
    assert namesrv.topics() == set()
