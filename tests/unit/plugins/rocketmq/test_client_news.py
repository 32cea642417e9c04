"""Goal: the coordinator learns who is connected, once for many heartbeats, also after its death, in requests of bounded size.

Method: the real registry, connections of the test, and a coordinator of the test's that counts the requests.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson

from commitmq.errors import ProtocolError
from commitmq.log import get_log
from commitmq.semantics.rates import MAX_CHARACTERS, MAX_CLIENTS_A_REQUEST, MAX_NAMES
from commitmq_plugins.rocketmq.broker.clients import ClientNews
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, NodeClient
from commitmq_plugins.rocketmq.broker.registry import Registry
from commitmq_plugins.rocketmq.remoting.bodies import HeartbeatData
from commitmq_plugins.rocketmq.remoting.codes import LanguageCode
from commitmq_plugins.rocketmq.remoting.server import RemotingConnection

V5_4_0 = 493


class Coordinator:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refusal = ""
        self.connections = 1

    def line(self, role: str) -> Coordinator:
        assert role == "coordinator"
        return self

    async def ask(self, role: str, op: str, **fields: Any) -> dict[str, Any]:
        assert (role, op) == ("coordinator", "client.heard")
        self.asked.append(fields)
        await asyncio.sleep(0)
        if self.refusal:
            raise ProtocolError(self.refusal, "not now")
        return {}

    def ids(self) -> list[str]:
        return [row["id"] for fields in self.asked for row in fields["clients"]]


class Link:
    """As much of a connection as the news look at."""

    def __init__(self, name: str, user: str) -> None:
        self.name, self.user, self.is_closed = name, user, False


class Gateway:
    """A registry and its news; a client's heartbeat is one call."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self.registry: Registry[RemotingConnection] = Registry()
        self.news = ClientNews(cast(NodeClient, self.coordinator), self.registry, "one", get_log("test"))
        self.links: dict[int, RemotingConnection] = {}

    def heartbeat(self, number: int, name: str = "", groups: int = 1) -> RemotingConnection:
        link = self.links.setdefault(number, cast(RemotingConnection, Link(f"h:{number}", "shop")))
        producers = [f"group {one} of {name}"[:255] for one in range(groups)]
        data = HeartbeatData(name or f"c{number}", producers)
        self.registry.heartbeat(link, data, LanguageCode.JAVA, V5_4_0, 0)
        self.news.changed(link)
        return link

    async def turn(self) -> None:
        self.news.turn()
        for _ in range(500):
            await asyncio.sleep(0)


def test_many_heartbeats_of_a_second_are_told_once_and_silence_costs_nothing() -> None:
    async def run() -> None:
        gateway = Gateway()
        await gateway.turn()
        (first,) = gateway.coordinator.asked
        assert (first["instance"], first["clients"]) == ("one", [])
        gateway.coordinator.asked.clear()
        for number in (1, 2, 1, 1):
            gateway.heartbeat(number)
        await gateway.turn()
        (told,) = gateway.coordinator.asked
        assert (told["gateway"], told["instance"], told["gone"]) == ("rocketmq", "one", [])
        row = {name: told["clients"][0][name] for name in ("connection", "user", "language", "version", "produces")}
        assert sorted(gateway.coordinator.ids()) == ["c1", "c2"]
        assert (row["user"], row["language"], row["version"]) == ("shop", "java", "5.4.0")
        assert row["produces"] == ["group 0 of "]
        await gateway.turn()
        assert len(gateway.coordinator.asked) == 1

    asyncio.run(run())


def test_a_client_that_left_all_groups_or_whose_connection_ended_is_gone() -> None:
    async def run() -> None:
        gateway = Gateway()
        first, second = gateway.heartbeat(1), gateway.heartbeat(2)
        await gateway.turn()
        gateway.registry.unregister(first, "group 0 of ", None)
        gateway.news.changed(first)
        gateway.registry.closed(second)
        gateway.news.closed(second)
        await gateway.turn()
        assert sorted(gateway.coordinator.asked[1]["gone"]) == ["h:1", "h:2"]
        assert gateway.coordinator.asked[1]["clients"] == []

    asyncio.run(run())


def test_a_coordinator_that_was_away_or_is_another_one_is_told_of_all() -> None:
    async def run() -> None:
        gateway = Gateway()
        gateway.heartbeat(1)
        gateway.coordinator.refusal = SERVICE_NOT_AVAILABLE
        await gateway.turn()
        gateway.coordinator.refusal = ""
        gateway.heartbeat(2)
        await gateway.turn()
        assert sorted(gateway.coordinator.ids()) == ["c1", "c1", "c2"]
        gateway.coordinator.asked.clear()
        gateway.coordinator.connections += 1
        await gateway.turn()
        assert sorted(gateway.coordinator.ids()) == ["c1", "c2"]
        gateway.coordinator.asked.clear()
        gateway.coordinator.refusal = "INVALID_PARAMETER"
        gateway.heartbeat(1)
        await gateway.turn()
        await gateway.turn()
        assert len(gateway.coordinator.asked) == 1, "what is refused is not told again and again"
        await gateway.news.close()

    asyncio.run(run())


def test_no_client_makes_a_request_large() -> None:
    async def run() -> None:
        gateway = Gateway()
        for number in range(300):
            gateway.heartbeat(number, "\x01" * 250, groups=2_000 if number == 0 else 40)
        await gateway.turn()
        assert len(gateway.coordinator.ids()) == 300
        for fields in gateway.coordinator.asked:
            assert len(fields["clients"]) <= MAX_CLIENTS_A_REQUEST
            assert len(orjson.dumps(fields)) < 65_536
            for row in fields["clients"]:
                assert len(row["produces"]) <= MAX_NAMES
                texts = [row[name] for name in ("id", "connection", "user", "language", "version")]
                assert sum(map(len, (*texts, *row["produces"]))) <= MAX_CHARACTERS
                assert row["left_out"] > 0

    asyncio.run(run())
