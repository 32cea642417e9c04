"""Goal: rates bound the clients of RocketMQ one by one, and the refusals reach them in RocketMQ's codes.

Method: a node with small rates; clients that speak the protocol, each over a connection of its own; a stranger who names
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from commitmq import Admin
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode
from delays import Peer as NativePeer
from nodes import Node
from rocketmq_peer import connected, pull, send, served_node

RATE = 20
SETTINGS = (
    f"flow.client_send_messages_per_s={RATE}",
    "flow.topic_send_messages_per_s=1000",
    "flow.client_pull_messages_per_s=50",
    "flow.group_pull_messages_per_s=100",
    "reader.count=1",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, int]]:
    with served_node(tmp_path_factory.mktemp("rates"), *SETTINGS) as (node, port, _):
        with Admin(node.address) as admin:
            for name in ("sent", "pulled"):
                admin.topic_create(name, 1)
        with NativePeer(node) as native:
            assert native.append("pulled", [b"x"] * 400, [0] * 400)["ok"]
        yield node, port


def test_a_client_over_its_rate_is_busy_and_others_are_not(served: tuple[Node, int]) -> None:
    async def talk() -> tuple[list[int], list[int], str]:
        async with connected(served[1]) as greedy, connected(served[1]) as modest:
            await asyncio.gather(*(greedy.ask(send("sent", b"x")) for _ in range(3 * RATE)))
            flood = [await greedy.ask(send("sent", b"x")) for _ in range(5)]
            calm = [(await modest.ask(send("sent", b"y"))).code for _ in range(5)]
            return [one.code for one in flood], calm, str(flood[-1].remark)

    flood, calm, remark = asyncio.run(talk())
    assert calm == [0] * 5
    assert flood == [ResponseCode.SYSTEM_BUSY] * 5
    assert f"client of this connection is over its rate of {RATE} messages/s" in remark


def test_a_group_over_its_rate_gets_flow_control(served: tuple[Node, int]) -> None:
    async def talk() -> list[int]:
        codes = []
        for _ in range(12):  # each of its clients is within its own rate
            async with connected(served[1]) as peer:
                codes.append((await peer.ask(pull("slow", "pulled", 0, maxMsgNums="32"))).code)
        return codes

    codes = asyncio.run(talk())
    assert codes[0] == 0
    assert set(codes) == {0, ResponseCode.FLOW_CONTROL}


def test_a_client_over_its_pull_rate_gets_flow_control_and_others_their_messages(served: tuple[Node, int]) -> None:
    async def talk() -> tuple[list[int], int]:
        async with connected(served[1]) as greedy, connected(served[1]) as modest:
            codes = [(await greedy.ask(pull("quick", "pulled", 0))).code for _ in range(4)]
            return codes, (await modest.ask(pull("others", "pulled", 0))).code

    codes, other = asyncio.run(talk())
    assert codes[0] == other == 0
    assert codes[-1] == ResponseCode.FLOW_CONTROL


def test_a_stranger_cannot_send_as_somebody_else(served: tuple[Node, int]) -> None:
    with NativePeer(served[0]) as native:
        answer = native.ask(b"x", op="send", topic="sent", queue=0, client="127.0.0.1:1")
    assert answer["code"] == "NO_PERMISSION"
