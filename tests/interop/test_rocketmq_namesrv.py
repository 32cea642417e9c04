"""Goal: our name server is RocketMQ's for everyone who asks: the same answers to the same requests, for RocketMQ's broker and
clients too.

Method: RocketMQ's name server (5.4.0) and ours get the same frames one after the other, registrations in all forms among them,
and their answers are compared. Then RocketMQ's own broker and clients use ours, and the broker is killed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from broker import Broker

from commitmq.log import get_log
from commitmq_plugins.rocketmq.namesrv import KVConfig, NamesrvConfig, NamesrvRequests
from commitmq_plugins.rocketmq.remoting.bodies import (
    RegisterBrokerBody,
    RemotingDataVersion,
    RemotingTopicConfig,
    TopicConfigSerializeWrapper,
    crc32,
)
from commitmq_plugins.rocketmq.remoting.codes import SERIALIZE_JSON, SERIALIZE_ROCKETMQ, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, loads
from commitmq_plugins.rocketmq.remoting.frame import Command, FrameParser, encode
from commitmq_plugins.rocketmq.remoting.server import RemotingServer
from commitmq_plugins.rocketmq.route_table import RouteTable

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(240)]

OpenBroker = Callable[..., Broker]
OWN = "127.0.0.1:"


class OurNamesrv:
    """Our name server in a thread of the test."""

    def __init__(self, folder: Path) -> None:
        self.routes = RouteTable()
        self._kv = KVConfig(folder / "our.kv.json")
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        log = get_log("namesrv")
        clock = self._loop.time
        requests = NamesrvRequests(self.routes, self._kv, NamesrvConfig(), lambda: int(clock() * 1000), log)
        server = RemotingServer(requests.handle, lambda one: void(self.routes.channel_closed(one)), log)
        self.port = await server.listen("127.0.0.1", 0)
        self._started.set()
        await self._stop.wait()
        await server.close()

    @property
    def address(self) -> str:
        return f"{OWN}{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


def void(_result: object) -> None:
    """A callback returns nothing."""


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[OurNamesrv]:
    server = OurNamesrv(tmp_path)
    yield server
    server.close()


class Line:
    """A connection to a name server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), timeout=20)
        self._parser = FrameParser()

    def ask(self, command: Command) -> Command:
        self._sock.sendall(encode(command))
        while True:
            data = self._sock.recv(1 << 20)
            assert data, "the name server ended the connection"
            found = self._parser.feed(data)
            assert self._parser.error is None, self._parser.error
            if found:
                return found[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._sock.close()


def registration(
    topics: list[RemotingTopicConfig],
    *,
    counter: int = 1,
    compressed: bool = False,
    serialize: int = SERIALIZE_JSON,
    **fields: Any,
) -> Command:
    wrapper = TopicConfigSerializeWrapper(
        {one.topic_name: one for one in topics}, RemotingDataVersion(1763800000000, counter)
    )
    body = RegisterBrokerBody(wrapper).encode(compressed=compressed)
    wanted = {
        "brokerName": "X-a",
        "brokerAddr": "10.0.0.1:10911",
        "clusterName": "X",
        "haServerAddr": "10.0.0.1:10912",
        "brokerId": "0",
        "compressed": str(compressed).lower(),
        "bodyCrc32": str(crc32(body)),
        "enableActingMaster": "false",
        **fields,
    }
    texts = {name: value for name, value in wanted.items() if value is not None}
    return Command(RequestCode.REGISTER_BROKER, 1, ext_fields=texts, body=body, serialize=serialize)


def ask(code: int, body: bytes = b"", **fields: str) -> Command:
    return Command(code, 1, ext_fields=fields, body=body)


def look() -> list[Command]:
    """What shows the whole state."""
    topics = ["X-T", "X-S", "X-U", "X-V", "X-W", "none"]
    routes = [ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic) for topic in topics]
    return [
        *routes,
        ask(RequestCode.GET_BROKER_CLUSTER_INFO),
        ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER),
        ask(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="X"),
        ask(RequestCode.GET_BROKER_MEMBER_GROUP, clusterName="X", brokerName="X-a"),
        ask(RequestCode.GET_UNIT_TOPIC_LIST),
        ask(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST),
        ask(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST),
    ]


T, U = RemotingTopicConfig("X-T", 8, 4, attributes={"message.type": "FIFO"}), RemotingTopicConfig("X-U", 1, 1)
UNIT = RemotingTopicConfig("X-S", 1, 1, topic_sys_flag=3)
SLAVE: dict[str, Any] = {"brokerAddr": "10.0.0.3:10911", "brokerId": "1", "haServerAddr": "10.0.0.3:10912"}
MASTER: dict[str, Any] = {"brokerName": "X-a", "brokerAddr": "10.0.0.1:10911", "clusterName": "X", "brokerId": "0"}
OTHER: dict[str, Any] = {"brokerName": "X-b", "brokerAddr": "10.0.0.2:10911"}
QUEUES = {"brokerName": "X-b", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "topicSysFlag": 0}
VERSION = dumps(RemotingDataVersion(1763800000000, 2).to_json())

SCRIPT: list[Command] = [
    *look(),
    registration([T]),
    *look()[:6],  # RocketMQ shows a broker without an address now, in the answer that is left out
    registration([T, U, UNIT]),
    *look(),
    registration([T, U], **SLAVE),
    registration([T, U], compressed=True, **OTHER),
    *look(),
    registration([RemotingTopicConfig("X-T", 16, 16), U]),
    *look(),
    registration([RemotingTopicConfig("X-T", 16, 16)], counter=2, serialize=SERIALIZE_ROCKETMQ),
    registration([RemotingTopicConfig("X-V", 2, 2, 4)], counter=3, compressed=True),
    registration([T, U], bodyCrc32="5"),
    registration(
        [T, U], counter=4, enableActingMaster=None, **{**SLAVE, "brokerId": "2", "brokerAddr": "10.0.0.4:10911"}
    ),
    *look(),
    ask(RequestCode.QUERY_DATA_VERSION, VERSION, **MASTER),
    ask(RequestCode.QUERY_DATA_VERSION, VERSION, **{**MASTER, "brokerAddr": "10.9.9.9:1"}),
    ask(RequestCode.QUERY_DATA_VERSION, dumps(RemotingDataVersion(1763800000000, 3).to_json()), **MASTER),
    ask(RequestCode.BROKER_HEARTBEAT, **MASTER),
    ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="X-b"),
    *look(),
    ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="X-b"),
    ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="none"),
    ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, dumps({"queueDatas": [QUEUES]}), topic="X-W"),
    ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, dumps({"queueDatas": [{**QUEUES, "brokerName": "no"}]}), topic="X-none"),
    *look(),
    ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="X-T", clusterName="none"),
    ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="X-T", clusterName="X"),
    ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="X-W"),
    *look(),
    ask(RequestCode.GET_KV_CONFIG, namespace="N", key="k"),
    ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="N"),
    ask(RequestCode.PUT_KV_CONFIG, namespace="N", key="k", value="v"),
    ask(RequestCode.PUT_KV_CONFIG, namespace="N"),
    ask(RequestCode.GET_KV_CONFIG, namespace="N", key="k"),
    ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="N"),
    ask(RequestCode.DELETE_KV_CONFIG, namespace="N", key="k"),
    ask(RequestCode.DELETE_KV_CONFIG, namespace="N", key="k"),
    ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="N"),
    ask(RequestCode.PUT_KV_CONFIG, namespace="ORDER_TOPIC_CONFIG", key="X-U", value="X-a:4"),
    registration([T, U], **OTHER),
    *look(),
    ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"kvConfigPath=/x"),
    ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"orderMessageEnable=true"),
    *look(),
    ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"enableAllTopicList=false\nenableTopicList=false"),
    *look(),
    ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"enableAllTopicList=true\nenableTopicList=true\nunknown=1"),
    ask(RequestCode.UNREGISTER_BROKER, **{**MASTER, **OTHER}),
    *look(),
    ask(310),
    ask(200050),
]


def plain(command: Command, answer: Command) -> tuple[object, ...]:
    """What must be equal: without the broker that only RocketMQ's name server has, and without any order of names."""
    body: Any = loads(answer.body) if len(answer.body) and answer.code == 0 else bytes(answer.body)
    if isinstance(body, dict):
        for key in ("topicList", "brokerDatas", "queueDatas"):
            if key in body:
                wanted = [one for one in body[key] if not isinstance(one, str) or one.startswith("X")]
                body[key] = sorted(wanted, key=str)
        if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            body["brokerAddrTable"].pop("b0", None)
            body["clusterAddrTable"].pop("C", None)
            body["clusterAddrTable"] = {name: sorted(brokers) for name, brokers in body["clusterAddrTable"].items()}
    # RocketMQ leaves "not set any response code" in the remark of some answers that are a success.
    remark = answer.remark if answer.code else None
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        remark = str(remark).splitlines()[0]  # a link follows
    return answer.code, remark, answer.ext_fields, body, answer.flag, answer.version


def test_the_same_requests_have_the_same_answers(tmp_path: Path, rocketmq_broker: OpenBroker, ours: OurNamesrv) -> None:
    differences = []
    with rocketmq_broker(tmp_path / "store") as broker, Line(broker.ask("names")) as theirs, Line(ours.address) as own:
        for number, command in enumerate(SCRIPT):
            expected, found = plain(command, theirs.ask(command)), plain(command, own.ask(command))
            if command.code == RequestCode.UNREGISTER_BROKER:  # RocketMQ answers first, and forgets it a moment later
                broker.wait_for(lambda: "X-b" not in brokers(theirs), "RocketMQ's name server has forgotten the broker")
            if found != expected:
                differences.append(f"step {number}: {command.code} {command.ext_fields}\n  {found}\n  {expected}")
    assert not differences, "\n".join(differences)
    with Line(ours.address) as line:  # both drop the brokers of a connection that ended
        broker.wait_for(lambda: brokers(line) == {}, "the brokers are gone")


def brokers(line: Line) -> Any:
    return loads(line.ask(ask(RequestCode.GET_BROKER_CLUSTER_INFO)).body)["brokerAddrTable"]


@pytest.mark.parametrize("form", ["ROCKETMQ", pytest.param("JSON", marks=pytest.mark.long)])
def test_rocketmqs_broker_and_clients_use_our_name_server(
    form: str, tmp_path: Path, rocketmq_broker: OpenBroker, ours: OurNamesrv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKETMQ_SERIALIZE_TYPE", form)
    with rocketmq_broker(tmp_path / "store", namesrvAddr=ours.address) as broker, Line(ours.address) as line:
        assert broker.ask("names") == ours.address
        assert list(brokers(line)) == ["b0"]
        for number in range(10):
            broker.ask("send", "Orders", f"order {number}")
        broker.wait_for(lambda: len(broker.bodies("Orders")) == 10, "all are there")
        route = loads(line.ask(ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="Orders")).body)
        assert [(one["brokerName"], one["writeQueueNums"]) for one in route["queueDatas"]] == [("b0", 4)]
        # A check-back finds its producer by the heartbeat, which goes to the brokers of the producer's routes.
        broker.ask("half", "Deciders", "Orders", "half", "commit")
        broker.wait_for(lambda: len(broker.bodies("Orders")) == 11, "the transaction is committed")
        broker.kill()
        broker.wait_for(lambda: brokers(line) == {}, "the killed broker is gone")
        answer = line.ask(ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="Orders"))
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
