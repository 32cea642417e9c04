"""Goal: a broker with very many topics keeps nobody waiting while it registers, and what happens meanwhile is not lost.

Method: the requests of a name server in one event loop, with a registration of 20,000 topics under way; between its steps
neighbours ask, its connection ends, its broker leaves or registers anew.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from pathlib import Path

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
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.route_table import BrokerKey, RouteLimits, RouteTable

TOPICS = 20_000
LARGE = [f"topic-{number}" for number in range(TOPICS)]


@pytest.fixture
def routes() -> RouteTable:
    return RouteTable(RouteLimits(max_topics=TOPICS + 10))


@pytest.fixture
def requests(routes: RouteTable, tmp_path: Path) -> NamesrvRequests:
    return NamesrvRequests(routes, KVConfig(tmp_path / "kv.json"), NamesrvConfig(), lambda: 0, get_log("test"))


def registration(topics: list[str], counter: int = 1, *, compressed: bool = True, **fields: str) -> Command:
    table = {topic: RemotingTopicConfig(topic) for topic in topics}
    body = RegisterBrokerBody(TopicConfigSerializeWrapper(table, RemotingDataVersion(1, counter))).encode(
        compressed=compressed
    )
    texts = {
        "brokerName": "large",
        "brokerAddr": "10.0.0.1:10911",
        "clusterName": "C",
        "brokerId": "0",
        "compressed": str(compressed).lower(),
        "bodyCrc32": str(crc32(body)),
        **fields,
    }
    return Command(RequestCode.REGISTER_BROKER, 1, ext_fields=texts, body=body)


def ask_route(requests: NamesrvRequests, topic: str) -> Command:
    found = requests.handle("neighbour", Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, 2, ext_fields={"topic": topic}))
    assert isinstance(found, Command)
    return found


async def answer(found: Command | Awaitable[Command]) -> Command:
    return found if isinstance(found, Command) else await found


def under_way(found: Command | Awaitable[Command]) -> asyncio.Task[Command]:
    assert not isinstance(found, Command), "it is taken at once"
    return asyncio.ensure_future(answer(found))


@pytest.mark.parametrize("compressed", [True, False])
def test_neighbours_are_served_all_the_while(requests: NamesrvRequests, compressed: bool) -> None:
    small = registration(["small", "other"], compressed=False, brokerName="small", brokerAddr="10.0.0.2:10911")

    async def run() -> int:
        assert (await answer(requests.handle("neighbour", small))).code == ResponseCode.SUCCESS
        task = under_way(requests.handle("large", registration(LARGE, compressed=compressed)))
        turns = 0
        while not task.done():
            assert ask_route(requests, "small").code == ResponseCode.SUCCESS
            turns += 1
            await asyncio.sleep(0)
        assert task.result().code == ResponseCode.SUCCESS
        assert ask_route(requests, LARGE[-1]).code == ResponseCode.SUCCESS
        return turns

    assert asyncio.run(run()) > 10
    assert gc.isenabled()
    assert len(requests.routes.topics()) == TOPICS + 2


def test_a_connection_that_ends_meanwhile_leaves_no_broker(requests: NamesrvRequests, routes: RouteTable) -> None:
    async def run() -> None:
        for turns in (0, 3, 20):
            task = under_way(requests.handle("large", registration(LARGE)))
            for _ in range(turns):
                await asyncio.sleep(0)
            requests.channel_closed("large")
            await task
            assert not routes.topics(), f"after {turns} turns"
            assert routes.version_of(BrokerKey("C", "10.0.0.1:10911")) is None

    asyncio.run(run())


def test_a_broker_that_leaves_meanwhile_leaves_no_topic(requests: NamesrvRequests, routes: RouteTable) -> None:
    leaving = Command(
        RequestCode.UNREGISTER_BROKER,
        3,
        ext_fields={"brokerName": "large", "brokerAddr": "10.0.0.1:10911", "clusterName": "C", "brokerId": "0"},
    )

    async def run() -> None:
        task = under_way(requests.handle("large", registration(LARGE)))
        while not routes.topics():
            await asyncio.sleep(0)
        assert not task.done()
        requests.handle("elsewhere", leaving)
        await task
        assert not routes.topics()
        again = await answer(requests.handle("large", registration(LARGE, 2)))
        assert again.code == ResponseCode.SUCCESS, "there is room for it again"

    asyncio.run(run())
    assert len(routes.topics()) == TOPICS


def test_registrations_of_a_connection_keep_their_order(requests: NamesrvRequests, routes: RouteTable) -> None:
    async def run() -> None:
        first = under_way(requests.handle("large", registration(LARGE)))
        whole = registration(["only", "two"], 2, compressed=False, wholeTopicTable="true")
        second = under_way(requests.handle("large", whole))
        assert (await second).code == ResponseCode.SUCCESS
        assert first.done()

    asyncio.run(run())
    assert sorted(routes.topics()) == ["only", "two"]


def test_what_is_too_much_is_refused_and_changes_nothing(requests: NamesrvRequests, routes: RouteTable) -> None:
    more = [*LARGE, *(f"more-{number}" for number in range(11))]
    refused = asyncio.run(answer(requests.handle("large", registration(more))))
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "max_topic_routes" in str(refused.remark)
    assert not routes.topics()
