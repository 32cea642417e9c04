"""Goal: RocketMQ's Go client has the same outcomes at a node as at RocketMQ's own broker, and they are the right ones.

Method: the program in ``go/`` plays its scenarios against both: every kind of producer; push consumers that share, broadcast,
filter, keep an order, resume and fail; and a pull consumer.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broker import Broker

from bench.systems import golang
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import RemotingError, request
from nodes import eventually, free_ports, start_node

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(600)]

MODULE = Path(__file__).resolve().parent / "go"
PACKAGE = "./scenarios"
QUEUES = 4


def bodies(topic: str, *numbers: int) -> list[str]:
    return [f"{topic} {number:02}" for number in numbers]


def all_of(topic: str, count: int) -> list[str]:
    return bodies(topic, *range(count))


EXPECTED: dict[str, Any] = {
    "sync": all_of("sync", 10),
    "async": all_of("async", 10),
    "oneway": all_of("oneway", 10),
    "batch": {"received": all_of("batch", 10), "status": 0},
    "delay": ["delay 00, late: false", "delay 01, late: true"],
    "transaction": {"received": ["commit", "later"], "asked": True},
    "ordered": {f"key {key}": bodies("ordered", *range(key, 15, 3)) for key in range(3)},
    "tags": bodies("tags", 0, 2, 3, 5, 6, 8),
    "sql": bodies("sql", 2, 3, 4, 5, 8),
    "clustering": all_of("clustering", 20),
    "broadcast": {"one": all_of("broadcast", 5), "two": all_of("broadcast", 5)},
    "resumed": {"first": bodies("resumed", *range(5)), "second": bodies("resumed", *range(5, 10))},
    "pull": {"received": all_of("pull", 12), "queues": QUEUES, "ends": 12},
    "retry": [f"retry {number:02}, times {times}, topic retry" for number in range(2) for times in range(2)],
}


@pytest.fixture(scope="module")
def program() -> Path:
    if reason := golang.missing():
        if os.environ.get("COMMITMQ_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    golang.build(PACKAGE, MODULE)
    return golang.program(PACKAGE, MODULE)


def play(program: Path, names: int, broker: int, home: Path) -> dict[str, Any]:
    """The outcomes of all scenarios."""

    async def make_topics() -> None:
        client = RemotingClient("127.0.0.1", broker)
        for topic in EXPECTED:
            fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES), "writeQueueNums": str(QUEUES),
                      "perm": "6", "topicFilterType": "SINGLE_TAG"}  # fmt: skip
            answer = await client.request(request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields), 10)
            assert answer.code == 0, answer.remark
        await client.close()

    def made() -> bool:
        try:
            asyncio.run(make_topics())
        except RemotingError:  # it does not listen yet
            return False
        return True

    eventually(made, "the topics are made", 60)
    home.mkdir()
    done = subprocess.run(
        [str(program), f"127.0.0.1:{names}"],
        env={**os.environ, "HOME": str(home)},  # a consumer that broadcasts keeps its offsets there
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes: dict[str, Any] = json.loads(done.stdout)
    return outcomes


@pytest.mark.long  # RocketMQ's own outcomes
def test_outcomes_at_rocketmqs_broker(program: Path, tmp_path: Path, rocketmq_broker: Callable[..., Broker]) -> None:
    names = free_ports(6)
    # On a busy machine RocketMQ refuses sends that waited 200 ms.
    settings = {"namesPort": names, "listenPort": names + 4, "enablePropertyFilter": "true",
                "transactionCheckMax": 1000, "transactionTimeOut": 1000, "transactionCheckInterval": 2000,
                "waitTimeMillsInSendQueue": 60_000}  # fmt: skip
    with rocketmq_broker(tmp_path / "store", **settings):
        assert play(program, names, names + 4, tmp_path / "home") == EXPECTED


def test_outcomes_at_a_node(program: Path, tmp_path: Path) -> None:
    names = free_ports(4)
    settings = (
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={names}",
        f"network.store_port={names + 2}",
        "transaction.timeout_ms=1000",
        "transaction.check_interval_ms=1000",
        "transaction.check_max=1000",
    )
    with start_node(tmp_path, *settings):
        assert play(program, names, names + 2, tmp_path / "home") == EXPECTED
