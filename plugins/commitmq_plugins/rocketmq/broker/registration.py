"""Registration with name servers: all topics every 30 s, and those that changed at once (spec 14).

The version of the topics stays the same while they do. A name server lets the write permission of a broker that
wipeWritePerm took away come back with a newer version (remoting 7.3), so a version of its own for each registration would
undo that within 30 s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final

from commitmq.log import Log
from commitmq.plugin import failpoints
from commitmq.semantics.reply import reply_topic
from commitmq.store.metadata.topic_config import TopicConfig as NodeTopic
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.topics import DEFAULT_TOPIC, Topics
from commitmq_plugins.rocketmq.remoting.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    crc32,
)
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import RemotingError, request
from commitmq_plugins.rocketmq.remoting.headers import BrokerRequestHeader, RegisterBrokerRequestHeader
from commitmq_plugins.rocketmq.remoting.tls import anybody

_PERIOD_S: Final = 30.0
_AGAIN_S: Final = 1.0
"""A name server that could not be reached, or whose connection ended, is tried again after this time."""
_LOOK_S: Final = 0.05
_EXPIRY_MS: Final = 120_000
_PATIENCE_S: Final = 3.0
_CLIENTS_WAIT_S: Final = 0.5


class Registration:
    """Keeps the name servers informed. Those that do not answer hear of everything when they do."""

    def __init__(
        self, node: Node, topics: Topics, address: str, name_servers: list[str], log: Log, by_tls: Collection[str] = ()
    ) -> None:
        """``by_tls``: those of the name servers that take connections with TLS only. Their certificates are not compared."""
        tls = anybody() if by_tls else None
        self._node, self._topics, self.address, self._log = node, topics, address, log
        self.servers = [RemotingClient(*_split(one), tls if one in by_tls else None) for one in name_servers]
        self._locks = {server.address: asyncio.Lock() for server in self.servers}
        """One registration at a time: RocketMQ's name server may handle two of one connection in any order."""
        self._whole: dict[str, int] = {}
        """By address of a name server: the connection on which it heard of all topics."""
        self._started_ms = time.time_ns() // 1_000_000
        self._task: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._silent: set[str] = set()
        self._missed: set[str] = set()
        """Silent name servers that were not told of a change; one of them may be hearing of everything before it."""
        self.network = node.config.network

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Take the broker out of the name servers."""
        for task in (*self._telling, *([] if self._task is None else [self._task])):
            task.cancel()
        header = BrokerRequestHeader(self.network.broker_name, self.address, self.network.cluster_name, 0)
        for server in self.servers:
            try:
                await server.request(request(RequestCode.UNREGISTER_BROKER, header.encode()), 1.0)
            except RemotingError as error:
                self._log.debug("a name server does not answer", address=server.address, error=str(error))
            await server.close()

    async def _run(self) -> None:
        due = again = 0.0
        self._topics.changed.clear()  # they are told with everything
        while True:
            self._topics.sync()
            now = time.monotonic()
            if now >= due:
                due, again = now + _PERIOD_S, now + _AGAIN_S
                self._tell_soon(self.servers)
            elif now >= again:
                again = now + _AGAIN_S
                self._tell_soon([server for server in self.servers if not self._knows_all(server)])
            if self._topics.changed:
                await self.settle()
            await asyncio.sleep(_LOOK_S)

    def _tell_soon(self, servers: list[RemotingClient]) -> None:
        """Each hears of everything without waiting for the others, unless it is being told already."""
        for server in servers:
            if not self._locks[server.address].locked():
                task = asyncio.create_task(self._tell(server, None))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    def _knows_all(self, server: RemotingClient) -> bool:
        """A name server forgets a broker whose connection ends. A part of the topics would be all that it has then."""
        return server.is_connected and self._whole.get(server.address) == server.connections

    async def settle(self) -> None:
        """Tell the name servers what changed. The caller may answer a request afterwards that made a topic.

        Those that did not answer last time are not waited for: they hear of everything when they are there again.
        """
        self._topics.sync()
        names, self._topics.changed = self._topics.changed, set()
        if names:
            self._missed |= self._silent
        servers = [server for server in self.servers if server.address not in self._silent]
        if names:
            # A topic that is gone is told by the whole table.
            await self._tell_all(servers, names if names <= self._topics.all.keys() else None)
        else:  # another call may be telling it
            for server in servers:
                async with self._locks[server.address]:
                    pass

    async def settle_soon(self) -> None:
        """The same for a client that sends or receives: a slow name server must not hold it up."""
        task = asyncio.create_task(self.settle())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        await asyncio.wait([task], timeout=_CLIENTS_WAIT_S)

    @property
    def is_done(self) -> bool:
        """Whether a name server knows all topics."""
        return any(map(self._knows_all, self.servers))

    def topics(self) -> dict[str, TopicConfig]:
        """What is registered: the node's topics, and the template of new ones while sends may make topics."""
        found = {name: remoting_config(one) for name, one in self._topics.all.items()}
        if self._node.config.topics.auto_create:
            most = self._topics.template_queues
            found.setdefault(DEFAULT_TOPIC, TopicConfig(DEFAULT_TOPIC, most, most, 7))
        else:
            found.pop(DEFAULT_TOPIC, None)
        for name in self._topics.own_names:
            found.setdefault(name, TopicConfig(name, 1, 1, 7))
        # The first reply makes this one. Who replies asks for its queues before.
        found.setdefault(
            reply_topic(self.network.cluster_name), TopicConfig(reply_topic(self.network.cluster_name), 1, 1)
        )
        return found

    async def _tell_all(self, servers: list[RemotingClient], names: set[str] | None = None) -> None:
        """All topics, or those of ``names`` to the servers that know all others."""
        await asyncio.gather(*(self._tell(server, names) for server in servers))

    async def _tell(self, server: RemotingClient, names: set[str] | None) -> None:
        async with self._locks[server.address]:
            await self._tell_now(server, names)
            while server.address in self._missed and server.address not in self._silent:
                await self._tell_now(server, None)

    async def _tell_now(self, server: RemotingClient, names: set[str] | None) -> None:
        self._missed.discard(server.address)
        is_part = names is not None and self._knows_all(server)
        everything = self._topics.all
        topics = {name: remoting_config(everything[name]) for name in (names or ()) if name in everything}
        if not is_part or not topics:
            is_part, topics = False, self.topics()
        if failpoints.ACTIVE:
            failpoints.hit("rocketmq.register:before")
        is_told = await self._register(server, topics, is_part=is_part)
        if failpoints.ACTIVE:
            failpoints.hit("rocketmq.register:after")
        if not is_told:
            self._whole.pop(server.address, None)
        elif not is_part:
            self._whole[server.address] = server.connections

    async def _register(self, server: RemotingClient, topics: dict[str, TopicConfig], *, is_part: bool) -> bool:
        """Whether the name server took it."""
        version = DataVersion(self._started_ms, self._topics.version, 0)
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
        try:
            answer = await server.request(request(RequestCode.REGISTER_BROKER, header.encode(), body), _PATIENCE_S)
        except RemotingError as error:
            if server.address not in self._silent:
                self._silent.add(server.address)
                self._log.warning("the broker is not registered", name_server=server.address, error=str(error))
            return False
        if answer.code:
            self._log.warning("a name server refuses the broker", name_server=server.address, error=str(answer.remark))
            return False
        if server.address in self._silent:
            self._silent.discard(server.address)
            self._log.info("the broker is registered again", name_server=server.address)
        return True


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
