"""Goal: two brokers under one name at one name server find each other out, and a broker that is alone suspects nobody.

Method: looks at hand-made times; then two registrations with a real name server's table, and the looks of one of both.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.cli import findings
from commitmq.log import get_log
from commitmq_plugins.rocketmq.broker import name_servers
from commitmq_plugins.rocketmq.broker.name_servers import Neighbours, RegistrationService
from commitmq_plugins.rocketmq.broker.process import RivalBroker
from commitmq_plugins.rocketmq.remoting.bodies import RemotingTopicConfig
from stub_cluster import stub_cluster

NAME, OURS, THEIRS, THIRD = "commitmq", "127.0.0.1:10911", "127.0.0.1:20911", "127.0.0.1:30911"


def looked(*looks: tuple[float, str | None, bool]) -> tuple[list[str], str]:
    """What a broker tells, and whom it knows at the end, after looks: when, what was found, and whether it is registered."""
    told: list[str] = []
    rival = RivalBroker(NAME, OURS, told.append, get_log("test"))
    for now_s, found, is_registered in looks:
        rival.look(found, now_s, is_registered=is_registered)
    return told, rival.address


def test_another_broker_is_found_and_forgotten() -> None:
    seen = [(0.0, OURS, True), (3.0, THEIRS, True), (6.0, THEIRS, True), (9.0, THEIRS, True)]
    assert looked(*seen) == ([THEIRS], THEIRS)
    # It has the name by turns: for half a minute after each registration of ours nothing is seen of it.
    turns = [(30.0 + at, OURS, True) for at in range(0, 60, 3)]
    assert looked(*seen, *turns) == ([THEIRS], THEIRS)
    assert looked(*seen, *turns, (110.0, OURS, True)) == ([THEIRS, ""], "")
    assert looked(*seen, (12.0, THIRD, True)) == ([THEIRS, THIRD], THIRD)


@pytest.mark.parametrize(
    "looks",
    [
        [(0.0, THEIRS, False), (3.0, THEIRS, False), (6.0, OURS, True)],  # the node was elsewhere before
        [(0.0, THEIRS, True), (3.0, OURS, True), (6.0, OURS, True)],  # the answer is older than the registration
        [(0.0, None, True), (3.0, None, True), (6.0, OURS, True)],  # a name server that was started anew
    ],
)
def test_a_broker_that_is_alone_suspects_nobody(looks: list[tuple[float, str | None, bool]]) -> None:
    assert looked(*looks) == ([], "")


def test_two_registrations_at_one_name_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_servers, "_PERIOD_S", 0.5)
    monkeypatch.setattr(name_servers, "_ROUTES_PERIOD_S", 0.05)
    network = SimpleNamespace(broker_name=NAME, cluster_name="DefaultCluster")
    node: Any = SimpleNamespace(config=SimpleNamespace(network=network, topics=SimpleNamespace(auto_create=False)))
    topics: Any = SimpleNamespace(
        all={"orders": RemotingTopicConfig("orders")}, own_names=(), changed=set(), version=1, sync=lambda: None
    )
    monkeypatch.setattr(name_servers, "remoting_config", lambda topic: topic)
    told: list[str] = []

    async def main() -> None:
        async with stub_cluster(tmp_path) as cluster:
            both = [RegistrationService(node, topics, one, [cluster.names], get_log("test")) for one in (OURS, THEIRS)]
            rival = RivalBroker(NAME, OURS, told.append, get_log("test"))
            neighbours = Neighbours(both[0].servers, NAME, tmp_path / "neighbours.json", get_log("test"))
            now_s = asyncio.get_running_loop().time
            neighbours.found_own = lambda found: rival.look(found, now_s(), is_registered=both[0].is_done)
            both[0].start()
            neighbours.start()
            await asyncio.sleep(0.6)
            assert not told
            both[1].start()
            async with asyncio.timeout(20):
                while not told:
                    await asyncio.sleep(0.02)
            await neighbours.close()
            for one in both:
                await one.close()

    asyncio.run(main())
    assert told == [THEIRS]


def test_doctor_calls_it_an_error() -> None:
    row = {"role": "worker-rocketmq_broker", "state": "ready", "pid": 7, "restarts": 0, "info": {"rival": THEIRS}}
    (found,) = findings._of_process(row)
    assert found.level == findings.ERROR
    assert THEIRS in found.says
    assert "network.broker_name" in found.do
    assert not list(findings._of_process({**row, "info": {"rival": ""}}))
