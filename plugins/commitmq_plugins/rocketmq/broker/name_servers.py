"""What the broker tells name servers, and what it learns from them: registrations with the node's topics (spec 14), and the
queues that other brokers have of them (remoting 7.1).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.files import atomic_file
from commitmq.log import Log
from commitmq.plugin import failpoints
from commitmq.semantics.reply import reply_topic
from commitmq.store.metadata.topic_config import TopicConfig as NodeTopic
from commitmq_plugins.rocketmq.broker.node import NodeClient
from commitmq_plugins.rocketmq.broker.topics import DEFAULT_TOPIC, TopicConfigManager
from commitmq_plugins.rocketmq.remoting.bodies import (
    PERM_READ,
    ClusterInfo,
    RegisterBrokerBody,
    RemotingDataVersion,
    RemotingTopicConfig,
    TopicConfigSerializeWrapper,
    TopicRouteData,
    crc32,
)
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import (
    RemotingMessageQueue,
    as_list,
    as_text,
    dumps,
    load_object,
    loads,
)
from commitmq_plugins.rocketmq.remoting.frame import Command, PeerSilentError, RemotingError, request
from commitmq_plugins.rocketmq.remoting.headers import (
    BrokerRequestHeader,
    RegisterBrokerRequestHeader,
    TopicRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.tls import anybody

_PERIOD_S: Final = 30.0
_AGAIN_S: Final = 1.0
"""A name server that could not be reached, or whose connection ended, is tried again after this time."""
_LOOK_S: Final = 0.05
_EXPIRY_MS: Final = 120_000
_PATIENCE_S: Final = 3.0
_CLIENTS_WAIT_S: Final = 0.5


class RegistrationService:
    """All topics every 30 s, and those that changed at once.

    The version of the topics stays the same while they do. A name server lets the write permission of a broker that
    wipeWritePerm took away come back with a newer version (remoting 7.3), so a version of its own for each registration would
    undo that within 30 s.

    Keeps the name servers informed. Those that do not answer hear of everything when they do.
    """

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        address: str,
        name_servers: list[str],
        log: Log,
        by_tls: Collection[str] = (),
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

    def topics(self) -> dict[str, RemotingTopicConfig]:
        """What is registered: the node's topics, and the template of new ones while sends may make topics."""
        found = {name: remoting_config(one) for name, one in self._topics.all.items()}
        if self._node.config.topics.auto_create:
            most = self._topics.template_queues
            found.setdefault(DEFAULT_TOPIC, RemotingTopicConfig(DEFAULT_TOPIC, most, most, 7))
        else:
            found.pop(DEFAULT_TOPIC, None)
        for name in self._topics.own_names:
            found.setdefault(name, RemotingTopicConfig(name, 1, 1, 7))
        # The first reply makes this one. Who replies asks for its queues before.
        found.setdefault(
            reply_topic(self.network.cluster_name), RemotingTopicConfig(reply_topic(self.network.cluster_name), 1, 1)
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

    async def _register(self, server: RemotingClient, topics: dict[str, RemotingTopicConfig], *, is_part: bool) -> bool:
        """Whether the name server took it."""
        version = RemotingDataVersion(self._started_ms, self._topics.version, 0)
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


def remoting_config(topic: NodeTopic) -> RemotingTopicConfig:
    """A topic of the node in RocketMQ's form, without the attributes that only the node has."""
    return RemotingTopicConfig(
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


_MASTER_ID: Final = 0
_ROUTES_PERIOD_S: Final = 3.0
_ROUTE_S: Final = 10.0
_REMEMBER_S: Final = 60.0
_ROUTES_PATIENCE_S: Final = 2.0
_MOST_QUEUES: Final = 65_536
"""Queues that one broker may claim for a topic; the rest is omitted."""


@dataclass(slots=True)
class _NeighbourTopic:
    asked_s: float = 0.0
    seen_s: float | None = None
    """When another broker last had it."""
    queues: list[RemotingMessageQueue] = field(default_factory=list)


class Neighbours:
    """The queues that other brokers of the cluster have of a topic, as the name servers know them (remoting 7.1).

    Clients of RocketMQ share out the queues of all brokers by one rule (remoting 6.1). The node's coordinator knows the
    node's own queues only, so for a topic that is spread over several brokers it would give them to other clients than
    the rule does.

        * The groups of a topic that is spread have no members at the coordinator for it. Their clients alone share it
          out.
        * A topic stays spread for a minute after its last other broker went, because clients hear of that up to 30 s
          later.
        * The file ``neighbours.json`` has the spread topics. A name server that starts with the node knows other
          brokers half a minute later only, and their clients work on in the meantime.

    Asks a name server with which the broker is registered; without other brokers once a few seconds.
    """

    def __init__(self, servers: list[RemotingClient], own_name: str, path: Path, log: Log) -> None:
        """``path`` is the file. One that cannot be read counts as none: what it has is found again."""
        self._servers, self._own_name, self._path, self._log = servers, own_name, path, log
        now_s = time.monotonic()
        self._known: dict[str, _NeighbourTopic] = {topic: _NeighbourTopic(seen_s=now_s) for topic in self._load()}
        self._others: frozenset[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self.topics: Callable[[], Iterable[str]] = lambda: ()
        """The topics that groups subscribe to."""
        self.changed: Callable[[set[str]], None] = lambda topics: None
        """Is told the topics that are spread now, and were not, or the other way round."""
        self.found_own: Callable[[str | None], None] = lambda address: None
        """Is told at each look which address a name server has for the broker's own name."""

    def start(self) -> None:
        if self._servers:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def is_spread(self, topic: str) -> bool:
        """Whether other brokers have the topic too, or had it a moment ago."""
        found = self._known.get(topic)
        return found is not None and found.seen_s is not None

    def queues(self, topic: str) -> list[RemotingMessageQueue]:
        """The queues of the topic at other brokers."""
        found = self._known.get(topic)
        return [] if found is None else found.queues

    async def learn(self, topics: set[str]) -> None:
        """Ask about topics that nobody asked about before. Waits for a moment at most."""
        new = topics - self._known.keys()
        if not new or not self._servers:
            return
        try:
            async with asyncio.timeout(_ROUTES_PATIENCE_S):
                if self._others is None:
                    await self._look_at_cluster()
                if self._others:
                    await self._look(new, time.monotonic())
        except (RemotingError, TimeoutError) as error:
            self._log.debug("the other brokers of a topic are not known", error=str(error))

    # ------------------------------------------------------------ looks

    async def _run(self) -> None:
        while True:
            try:
                await self._look_at_cluster()
                await self._round(time.monotonic())
            except RemotingError as error:
                self._log.debug("the other brokers are not known", error=str(error))
            await asyncio.sleep(_ROUTES_PERIOD_S)

    async def _round(self, now_s: float) -> None:
        wanted = set(self.topics())
        for topic in self._known.keys() - wanted:
            seen_s = self._known[topic].seen_s
            if seen_s is None or now_s - seen_s > _REMEMBER_S:
                del self._known[topic]
        if self._others:
            due = {
                topic for topic in wanted if topic not in self._known or now_s >= self._known[topic].asked_s + _ROUTE_S
            }
            await self._look(due, now_s)
        else:
            self._tell({topic for topic in self._known if self._take(topic, [], now_s)})

    def _tell(self, topics: set[str]) -> None:
        if topics:
            self._store()
            self.changed(topics)

    # ------------------------------------------------------------ the file

    def _load(self) -> list[str]:
        try:
            found = load_object(self._path.read_bytes()).get("spreadTopics")
            return [as_text(topic, "a topic") for topic in as_list(found, "spreadTopics")]
        except FileNotFoundError:
            return []
        except (OSError, RemotingError) as error:
            self._log.warning("the topics of several brokers are not known yet", path=str(self._path), error=str(error))
            return []

    def _store(self) -> None:
        spread = sorted(topic for topic, one in self._known.items() if one.seen_s is not None)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(self._path, dumps({"spreadTopics": spread}), "rocketmq.neighbours")
        except OSError as error:
            self._log.warning("the topics of several brokers are not kept", path=str(self._path), error=str(error))

    async def _look_at_cluster(self) -> None:
        answer = await self._ask(request(RequestCode.GET_BROKER_CLUSTER_INFO))
        table = ClusterInfo.from_json(loads(answer.body)).broker_addr_table
        self._others = frozenset(name for name, one in table.items() if name != self._own_name and one.broker_addrs)
        own = table.get(self._own_name)
        self.found_own(None if own is None else own.broker_addrs.get(_MASTER_ID))

    async def _look(self, topics: set[str], now_s: float) -> None:
        """Ask for the routes of ``topics``, and tell which of them are spread now and were not, or the other way round."""
        changed = set()
        try:
            for topic in topics:
                if self._take(topic, await self._elsewhere(topic), now_s):
                    changed.add(topic)
        finally:
            self._tell(changed)

    async def _elsewhere(self, topic: str) -> list[RemotingMessageQueue]:
        """The queues of the topic at other brokers that live and that can be read."""
        answer = await self._ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequestHeader(topic).encode()))
        route = TopicRouteData() if answer.code else TopicRouteData.from_json(loads(answer.body))
        away = {one.broker_name for one in route.broker_datas if not one.broker_addrs}
        return [
            RemotingMessageQueue(topic, data.broker_name, queue)
            for data in route.queue_datas
            if data.broker_name != self._own_name and data.broker_name not in away and data.perm & PERM_READ
            for queue in range(min(data.read_queue_nums, _MOST_QUEUES))
        ]

    def _take(self, topic: str, queues: list[RemotingMessageQueue], now_s: float) -> bool:
        """Whether the topic's being spread changed."""
        known = self._known.setdefault(topic, _NeighbourTopic())
        was_spread = known.seen_s is not None
        known.asked_s, known.queues = now_s, queues
        if queues:
            known.seen_s = now_s
        elif known.seen_s is not None and now_s - known.seen_s > _REMEMBER_S:
            known.seen_s = None
        return was_spread != (known.seen_s is not None)

    async def _ask(self, command: Command) -> Command:
        """The answer of the first name server that answers. Raises RemotingError."""
        for server in self._servers:
            if not server.is_connected:
                continue
            try:
                answer = await server.request(command, _ROUTES_PATIENCE_S)
            except RemotingError:
                continue
            if answer.code in (ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST):
                return answer
        raise PeerSilentError("no name server answers")
