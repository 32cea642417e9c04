"""Registration with name servers: all topics every 30 s, and those that changed at once (spec store 14)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final

from commitmq.log import Log
from commitmq.plugin import failpoints
from commitmq.store.metadata.topic_config import TopicConfig as NodeTopic
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.topics import DEFAULT_TOPIC, Topics
from commitmq_plugins.rocketmq.remoting.bodies.data_version import DataVersion
from commitmq_plugins.rocketmq.remoting.bodies.register_broker import RegisterBrokerBody, crc32
from commitmq_plugins.rocketmq.remoting.bodies.topic_config import TopicConfig, TopicConfigSerializeWrapper
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.command import request
from commitmq_plugins.rocketmq.remoting.errors import RemotingError
from commitmq_plugins.rocketmq.remoting.headers.namesrv import BrokerRequestHeader, RegisterBrokerRequestHeader
from commitmq_plugins.rocketmq.remoting.tls import anybody

_PERIOD_S: Final = 30.0
_AGAIN_S: Final = 1.0
"""A name server that could not be reached, or whose connection ended, is tried again after this time."""
_LOOK_S: Final = 0.05
_EXPIRY_MS: Final = 120_000
_PATIENCE_S: Final = 3.0


class Registration:
    """Keeps the name servers informed. Those that do not answer hear of everything at the next round."""

    def __init__(
        self, node: Node, topics: Topics, address: str, name_servers: list[str], log: Log, by_tls: Collection[str] = ()
    ) -> None:
        """``by_tls``: those of the name servers that take connections with TLS only. Their certificates are not compared."""
        tls = anybody() if by_tls else None
        self._node, self._topics, self.address, self._log = node, topics, address, log
        self._servers = [RemotingClient(*_split(one), tls if one in by_tls else None) for one in name_servers]
        self._counter = 0
        self._task: asyncio.Task[None] | None = None
        self._silent: set[str] = set()
        self._sending = asyncio.Lock()
        self.network = node.config.network

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Take the broker out of the name servers."""
        if self._task is not None:
            self._task.cancel()
        header = BrokerRequestHeader(self.network.broker_name, self.address, self.network.cluster_name, 0)
        for server in self._servers:
            try:
                await server.request(request(RequestCode.UNREGISTER_BROKER, header.encode()), 1.0)
            except RemotingError as error:
                self._log.debug("a name server does not answer", address=server.address, error=str(error))
            await server.close()

    async def _run(self) -> None:
        due = again = 0.0
        while True:
            self._topics.sync()
            now = time.monotonic()
            lost = [server for server in self._servers if not server.is_connected]
            if now >= due:
                due, again = now + _PERIOD_S, now + _AGAIN_S
                self._topics.changed.clear()
                await self._register(self.topics())
            elif lost and now >= again:
                again = now + _AGAIN_S
                await self._register(self.topics(), lost)
            elif self._topics.changed:
                await self.settle()
            await asyncio.sleep(_LOOK_S)

    async def settle(self) -> None:
        """Tell the name servers what changed. The caller may answer a request afterwards that made a topic."""
        self._topics.sync()
        async with self._sending:
            names, self._topics.changed = self._topics.changed, set()
            if not names:
                return
            everything = self._topics.all
            if names <= everything.keys():
                await self._register({name: remoting_config(everything[name]) for name in names}, is_part=True)
            else:  # a topic is gone: name servers learn that from the whole table
                await self._register(self.topics())

    def topics(self) -> dict[str, TopicConfig]:
        """What is registered: the node's topics, and the template of new ones while sends may make topics."""
        found = {name: remoting_config(one) for name, one in self._topics.all.items()}
        if self._node.config.topics.auto_create:
            most = self._topics.template_queues
            found.setdefault(DEFAULT_TOPIC, TopicConfig(DEFAULT_TOPIC, most, most, 7))
        else:
            found.pop(DEFAULT_TOPIC, None)
        for name in (self.network.broker_name, self.network.cluster_name):
            found.setdefault(name, TopicConfig(name, 1, 1, 7))
        return found

    async def _register(
        self, topics: dict[str, TopicConfig], servers: list[RemotingClient] | None = None, *, is_part: bool = False
    ) -> None:
        servers = self._servers if servers is None else servers
        if not servers:
            return
        self._counter += 1
        version = DataVersion(time.time_ns() // 1_000_000, self._counter, 0)
        body = RegisterBrokerBody(TopicConfigSerializeWrapper(topics, version)).encode()
        header = RegisterBrokerRequestHeader(
            self.network.broker_name,
            self.address,
            self.network.cluster_name,
            0,
            ha_server_addr=self.address,
            heartbeat_timeout_millis=_EXPIRY_MS,
            enable_acting_master=False,
            compressed=False,
            body_crc32=crc32(body),
            whole_topic_table=None if is_part else True,
        )
        if failpoints.ACTIVE:
            failpoints.hit("rocketmq.register:before")
        await asyncio.gather(*(self._tell(server, header, body) for server in servers))
        if failpoints.ACTIVE:
            failpoints.hit("rocketmq.register:after")

    async def _tell(self, server: RemotingClient, header: RegisterBrokerRequestHeader, body: bytes) -> None:
        try:
            answer = await server.request(request(RequestCode.REGISTER_BROKER, header.encode(), body), _PATIENCE_S)
        except RemotingError as error:
            if server.address not in self._silent:
                self._silent.add(server.address)
                self._log.warning("the broker is not registered", name_server=server.address, error=str(error))
            return
        if answer.code:
            self._log.warning("a name server refuses the broker", name_server=server.address, error=str(answer.remark))
        elif server.address in self._silent:
            self._silent.discard(server.address)
            self._log.info("the broker is registered again", name_server=server.address)


def remoting_config(topic: NodeTopic) -> TopicConfig:
    """A topic of the node in RocketMQ's form, without the attributes that only the node has."""
    return TopicConfig(
        topic.name,
        topic.read_queues,
        topic.write_queues,
        topic.perm,
        topic.filter_type,
        topic.sys_flag,
        topic.order,
        {name: value for name, value in topic.attributes.items() if not name.startswith("storage.")},
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
