"""Goal: name servers know what the broker has, also after breaks, and never lose a person's wipeWritePerm over it; the broker
knows which of its topics other brokers have too.

Method: the registration and the neighbours of a node without a node, against our name server in the test's own loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.log import get_log
from commitmq.store.metadata.topic_config import TopicConfig as NodeTopic
from commitmq_plugins.rocketmq.broker import name_servers
from commitmq_plugins.rocketmq.broker.name_servers import Neighbours, RegistrationService
from commitmq_plugins.rocketmq.remoting.bodies import QueueData
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import request
from commitmq_plugins.rocketmq.route_table import BrokerKey
from stub_cluster import NAME, StubCluster, stub_cluster

OWN = "commitmq"
KEY = BrokerKey("DefaultCluster", "127.0.0.1:10911")


class FakeTopics:
    """The topic table of a node."""

    def __init__(self, *names: str) -> None:
        self.all = {name: NodeTopic(name, 4, 4) for name in names}
        self.changed: set[str] = set()
        self.version = 1
        self.template_queues = 8
        self.own_names = frozenset(("broker", "cluster"))

    def sync(self) -> None:
        """Nothing is behind it."""

    def put(self, name: str) -> None:
        self.all[name] = NodeTopic(name, 4, 4)
        self.changed.add(name)
        self.version += 1


def node() -> Any:
    network = SimpleNamespace(broker_name=OWN, cluster_name="DefaultCluster")
    return SimpleNamespace(config=SimpleNamespace(network=network, topics=SimpleNamespace(auto_create=True)))


def run(folder: Path, talk: Callable[[StubCluster, FakeTopics, RegistrationService], Awaitable[None]]) -> None:
    async def play() -> None:
        async with stub_cluster(folder) as cluster:
            topics: Any = FakeTopics("orders", "parcels")
            registration = RegistrationService(
                node(), topics, KEY.address, [cluster.names, "127.0.0.1:1"], get_log("test")
            )
            registration.start()
            try:
                await until(lambda: cluster.routes.version_of(KEY) is not None)
                await talk(cluster, topics, registration)
            finally:
                await registration.close()

    asyncio.run(play())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_topic_made_while_a_silent_name_server_hears_of_everything_is_told_too(tmp_path: Path) -> None:
    # It was in no registration before the next period, 30 s later: clients found no route to it.
    async def talk(cluster: StubCluster, topics: FakeTopics, registration: RegistrationService) -> None:
        server, register = registration.servers[0], registration._register
        under_way, goes_on = asyncio.Event(), asyncio.Event()

        async def slowly(told: RemotingClient, *arguments: Any, **more: Any) -> bool:
            if told is server:  # settling waits for the other one, until that is known to be away
                under_way.set()
                await goes_on.wait()
            return await register(told, *arguments, **more)

        registration._silent.add(server.address)
        registration._register = slowly  # type: ignore[method-assign, assignment]
        telling = asyncio.create_task(registration._tell(server, None))
        await under_way.wait()
        topics.put("late")
        await registration.settle()
        goes_on.set()
        await telling
        assert cluster.routes.route("late") is not None

    run(tmp_path, talk)


def perm(cluster: StubCluster, topic: str) -> int:
    route = cluster.routes.route(topic)
    assert route is not None
    return next(one.perm for one in route.queue_datas if one.broker_name == OWN)


def test_a_wiped_permission_stays_wiped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_servers, "_PERIOD_S", 0.05)

    async def talk(cluster: StubCluster, topics: FakeTopics, registration: RegistrationService) -> None:
        assert perm(cluster, "orders") == 6
        assert cluster.routes.set_writable(OWN, writable=False) >= 2
        await asyncio.sleep(0.4)
        assert perm(cluster, "orders") == 4, "no registration undoes it, with another name server away too"

    run(tmp_path, talk)


def test_a_new_topic_is_known_before_settle_returns(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster, topics: FakeTopics, registration: RegistrationService) -> None:
        cluster.routes.set_writable(OWN, writable=False)
        topics.put("new")
        await registration.settle()
        assert perm(cluster, "new") == 6
        assert perm(cluster, "orders") == 4, "a part of the topics says nothing of the others"

    run(tmp_path, talk)


def test_a_name_server_that_forgot_the_broker_hears_of_everything(tmp_path: Path) -> None:
    async def talk(cluster: StubCluster, topics: FakeTopics, registration: RegistrationService) -> None:
        server = registration.servers[0]
        cluster.routes.unregister(KEY, OWN)
        await server.close()  # as when the name server ends
        topics.put("new")
        await registration.settle()
        for topic in ("orders", "parcels", "new"):
            assert perm(cluster, topic) == 6

    run(tmp_path, talk)


def test_other_brokers_of_a_topic_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_servers, "_ROUTES_PERIOD_S", 0.02)
    monkeypatch.setattr(name_servers, "_ROUTE_S", 0.02)
    monkeypatch.setattr(name_servers, "_REMEMBER_S", 0.5)

    async def talk(cluster: StubCluster, topics: FakeTopics, registration: RegistrationService) -> None:
        told: list[set[str]] = []
        path = tmp_path / "own" / "neighbours.json"
        found = Neighbours(registration.servers, OWN, path, get_log("test"))
        found.topics, found.changed = lambda: {"orders", "parcels"}, told.append
        found.start()
        await found.learn({"orders"})
        assert not found.is_spread("orders"), "the other broker has none of these topics"
        cluster.routes.put_topic("orders", [QueueData(NAME, 2, 2, 6)])
        await until(lambda: found.is_spread("orders"))
        assert told == [{"orders"}]
        assert [(one.broker_name, one.queue_id) for one in found.queues("orders")] == [(NAME, 0), (NAME, 1)]
        assert not found.is_spread("parcels")
        again = Neighbours(registration.servers, OWN, path, get_log("test"))
        assert again.is_spread("orders"), "another process knows it at once"
        assert again.queues("orders") == []
        cluster.routes.unregister(BrokerKey("C", cluster.broker), NAME)
        await until(lambda: not found.queues("orders"))
        assert found.is_spread("orders"), "clients do not know yet that the other broker went"
        await until(lambda: not found.is_spread("orders"))
        assert told == [{"orders"}, {"orders"}]
        assert not Neighbours(registration.servers, OWN, path, get_log("test")).is_spread("orders")
        await found.close()

    run(tmp_path, talk)


def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    for content in (b"", b"[1]", b'{"spreadTopics": 5}', b'{"spreadTopics": [1]}'):
        (tmp_path / "neighbours.json").write_bytes(content)
        assert not Neighbours([], OWN, tmp_path / "neighbours.json", get_log("test")).is_spread("orders")


def test_a_connection_is_counted(tmp_path: Path) -> None:
    async def play() -> None:
        async with stub_cluster(tmp_path) as cluster:
            client = RemotingClient("127.0.0.1", cluster.names_port)
            for number in (1, 2):
                assert (await client.request(request(RequestCode.GET_BROKER_CLUSTER_INFO))).code == 0
                assert client.connections == number
                await client.close()

    asyncio.run(play())
