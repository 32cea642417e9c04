"""Goal: each request of RocketMQ 5.4.0 is served, or refused with REQUEST_CODE_NOT_SUPPORTED, and none ends the server.

Method: every code of the table, and codes that are in none, each without fields, with wrong ones, and one-way, to a real
node's broker server and name server. The same processes answer afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final

import pytest

from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, FrameParser, encode
from nodes import Node, free_ports

_TO_CLIENTS: Final = {39, 40, 220, 221, 326}
_USERS: Final = set(range(3001, 3011))
"""Served only where users are."""
_NAME_SERVERS: Final = {
    *(100, 101, 102, 103, 104, 105, 106, 205, 206, 216, 217, 219, 224, 304, 311, 312, 313),
    *(318, 319, 322, 327, 901, 904),
}
_REFUSED: Final = {
    *(13, 22, 23, 27, 47, 60, 61, *range(209, 215), 301, 302, 308, 323, 354, 355, 513),
    *(902, 903, 905, 906, 908, *range(1001, 1014), *range(2001, 2005), 5001, 200056),
}
"""P3 of remoting 1.3: slaves, containers, controllers, static topics, cold data, RocksDB, and what RocketMQ itself left."""
_UNKNOWN: Final = (-(1 << 31), -1, 0, 1, 99, 4711, 32_767, (1 << 31) - 1)
_WRONG: Final = {
    **dict.fromkeys(
        ("topic", "consumerGroup", "group", "producerGroup", "b", "a", "key", "brokerName", "clientId"), "x" * 300
    ),
    **dict.fromkeys(("queueId", "offset", "timestamp", "queueOffset", "e", "perm", "maxNum", "maxMsgNums"), "many"),
}
_BODY: Final = b'{"a":[1,2,{"b":null}'


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, int, int]]:
    """A node, and the ports of its broker server and its name server."""
    broker, names = (first := free_ports(2)), first + 1
    node = Node(
        tmp_path_factory.mktemp("requests") / "store",
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={names}",
        f"network.store_port={broker}",
    )
    assert node.start().returncode == 0
    yield node, broker, names
    node.end()


def _processes(node: Node) -> dict[str, int]:
    return {row["role"]: int(row["pid"]) for row in node.report()["processes"] if "rocketmq" in row["role"]}


def _answers(port: int, codes: list[int]) -> dict[int, set[int]]:
    """The codes of the answers to each request, in three forms; each is sent one-way too, and then has none."""

    async def talk() -> dict[int, set[int]]:
        found: dict[int, set[int]] = {code: set() for code in codes}
        for fields, body in (({}, b""), (_WRONG, b""), (_WRONG, _BODY)):
            client = RemotingClient("127.0.0.1", port)
            for code in codes:
                answer = await client.request(Command(code, ext_fields=dict(fields), body=body), 10.0)
                found[code].add(answer.code)
                if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    assert answer.remark == f" request type {code} not supported"
            await client.close()
            await _tell(port, [Command(code, 7, FLAG_ONEWAY, ext_fields=dict(fields), body=body) for code in codes])
        return found

    return asyncio.run(talk())


async def _tell(port: int, requests: list[Command]) -> None:
    """Send one-way requests, and a last one with an answer: no other comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    last = Command(RequestCode.GET_MAX_OFFSET, 8, ext_fields={"topic": "t", "queueId": "0"})
    for one in [*requests, last]:
        writer.write(encode(one))
    parser, answers = FrameParser(), []
    async with asyncio.timeout(20.0 * float(__import__("os").environ.get("SLOW_K", "1"))):
        while 8 not in answers:
            answers += [one.opaque for one in parser.feed(await reader.read(65_536))]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)
            raise AssertionError("an answer to a one-way request")
    assert answers == [8]
    writer.close()


def test_the_broker_server_serves_or_refuses_each_request(servers: tuple[Node, int, int]) -> None:
    node, port, _ = servers
    before = _processes(node)
    found = _answers(port, [*map(int, RequestCode), *_UNKNOWN])
    assert {code for code, answers in found.items() if ResponseCode.REQUEST_CODE_NOT_SUPPORTED in answers} - _USERS == {
        *_REFUSED,
        *_NAME_SERVERS,
        *_TO_CLIENTS,
        *_UNKNOWN,
    }
    refused = [answers for answers in found.values() if ResponseCode.REQUEST_CODE_NOT_SUPPORTED in answers]
    assert all(answers == {ResponseCode.REQUEST_CODE_NOT_SUPPORTED} for answers in refused)
    assert _processes(node) == before


def test_the_name_server_serves_or_refuses_each_request(servers: tuple[Node, int, int]) -> None:
    node, _, port = servers
    before = _processes(node)
    found = _answers(port, [*map(int, RequestCode), *_UNKNOWN])
    served = {code for code, answers in found.items() if answers != {ResponseCode.REQUEST_CODE_NOT_SUPPORTED}}
    assert served == _NAME_SERVERS
    assert _processes(node) == before
