"""A cluster of RocketMQ's protocol that lies: a name server of ours, and a broker whose answers a test chooses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from commitmq.format.constants import Host
from commitmq.format.record import Record, encode_record
from commitmq.log import get_log
from commitmq_plugins.rocketmq.namesrv import KVConfig, NamesrvConfig, NamesrvRequests
from commitmq_plugins.rocketmq.remoting.bodies import (
    QueueData,
    RegisterBrokerBody,
    RemotingDataVersion,
    RemotingTopicConfig,
    TopicConfigSerializeWrapper,
    kv_table,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.server import RemotingConnection, RemotingServer
from commitmq_plugins.rocketmq.route_table import BrokerKey, BrokerRegistration, RouteTable

NAME: Final = "stub"
Answer = Callable[[Command], Command | None]
"""None: never."""

SETTINGS: Final = {
    "brokerName": NAME,
    "enablePropertyFilter": "true",
    "timerWheelEnable": "true",
    "autoCreateTopicEnable": "true",
    "autoCreateSubscriptionGroup": "true",
    "defaultTopicQueueNums": "8",
    "maxMessageSize": "4194304",
    "brokerPermission": "6",
    "brokerRole": "ASYNC_MASTER",
    "flushDiskType": "SYNC_FLUSH",
}


class StubCluster:
    """One broker that answers what the doctor asks; ``answers`` replaces any of them. ``asked`` counts the requests."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.asked: Counter[int] = Counter()
        self.topics: set[str] = set()
        self.groups: set[str] = set()
        self.settings = dict(SETTINGS)
        self.now_ms: Callable[[], int] = lambda: 0
        self.routes = RouteTable()
        self.names_port = self.broker_port = 0
        self._records: list[bytes] = []
        self._offset = "-1"
        self.waiting: asyncio.Event = asyncio.Event()
        """Set when a request came that is never answered."""

    @property
    def names(self) -> str:
        return f"127.0.0.1:{self.names_port}"

    @property
    def broker(self) -> str:
        return f"127.0.0.1:{self.broker_port}"

    def register(self, name: str, address: str, number: int = 0) -> None:
        """As a broker does."""
        table = {topic: RemotingTopicConfig(topic, 8, 8, 7) for topic in ("TBW102", name)}
        body = RegisterBrokerBody(TopicConfigSerializeWrapper(table, RemotingDataVersion(1, 1)))
        self.routes.register(BrokerRegistration(BrokerKey("C", address), name, number), body, address, 0)

    def handle(self, _connection: RemotingConnection, command: Command) -> Command | None:
        self.asked[command.code] += 1
        chosen = self.answers.get(command.code)
        found = self.usual(command) if chosen is None else chosen(command)
        if found is None:
            self.waiting.set()
        return found

    def usual(self, command: Command) -> Command:
        fields = command.ext_fields
        match command.code:
            case RequestCode.GET_BROKER_RUNTIME_INFO:
                runtime = "[ 0 days, 0 hours, 1 minutes, 0 seconds ]"
                return command.answer(body=kv_table({"bootTimestamp": str(self.now_ms() - 60_000), "runtime": runtime}))
            case RequestCode.GET_BROKER_CONFIG:
                return command.answer(body="".join(f"{one}={value}\n" for one, value in self.settings.items()).encode())
            case RequestCode.POLLING_INFO:
                return command.answer(ResponseCode.TOPIC_NOT_EXIST)
            case RequestCode.UPDATE_AND_CREATE_TOPIC:
                self.topics.add(fields["topic"])
                self._records.clear()
                self._offset = "-1"
                self.routes.put_topic(fields["topic"], [QueueData(NAME, 1, 1, 6)])
                return command.answer()
            case RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
                self.groups.add(str(bytes(command.body)))
                return command.answer()
            case RequestCode.DELETE_TOPIC_IN_BROKER:
                self.topics.discard(fields["topic"])
                return command.answer()
            case RequestCode.DELETE_SUBSCRIPTIONGROUP:
                self.groups.clear()
                return command.answer()
            case RequestCode.GET_TOPIC_CONFIG:
                there = fields["topic"] in self.topics
                return command.answer(ResponseCode.SUCCESS if there else ResponseCode.TOPIC_NOT_EXIST)
            case _:
                return self._message(command)

    def _message(self, command: Command) -> Command:
        fields = command.ext_fields
        match command.code:
            case RequestCode.SEND_MESSAGE_V2:
                offset, host = len(self._records), Host("127.0.0.1", 1)
                record = Record(fields["b"], 0, offset, store_timestamp=self.now_ms(), body=bytes(command.body),
                                born_host=host, store_host=host)  # fmt: skip
                self._records.append(encode_record(record))
                return command.answer(ext_fields={"msgId": "x", "queueId": "0", "queueOffset": str(offset)})
            case RequestCode.PULL_MESSAGE:
                return command.answer(body=self._records[int(fields["queueOffset"])])
            case RequestCode.UPDATE_CONSUMER_OFFSET:
                self._offset = fields["commitOffset"]
                return command.answer()
            case RequestCode.QUERY_CONSUMER_OFFSET:
                return command.answer(ext_fields={"offset": self._offset})
            case RequestCode.POP_MESSAGE:
                last = len(self._records) - 1
                self._offset = str(last + 1)
                texts = {"popTime": "1", "invisibleTime": "2", "reviveQid": "3", "restNum": "0",
                         "startOffsetInfo": f"0 0 {last}", "msgOffsetInfo": f"0 0 {last}"}  # fmt: skip
                return command.answer(ext_fields=texts, body=self._records[last])
            case RequestCode.ACK_MESSAGE:
                return command.answer()
            case _:
                return command.not_supported()


@asynccontextmanager
async def stub_cluster(folder: Path) -> AsyncIterator[StubCluster]:
    """Its servers run in the loop of the test, and its broker is registered."""
    cluster, log = StubCluster(), get_log("stub")
    requests = NamesrvRequests(cluster.routes, KVConfig(folder / "kv.json"), NamesrvConfig(), lambda: 0, log)
    servers = [RemotingServer(requests.handle, ignore, log), RemotingServer(cluster.handle, ignore, log)]
    try:
        cluster.names_port, cluster.broker_port = [await one.listen("127.0.0.1", 0) for one in servers]
        cluster.register(NAME, cluster.broker)
        yield cluster
    finally:
        for server in servers:
            await server.close()


def ignore(_connection: Any) -> None:
    """A closed connection is nothing to the stub."""
