"""A client of RocketMQ's protocol for tests: requests to the servers of a node that runs with --rocketmq."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from commitmq.testing.node_process import eventually
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import Command, RemotingError, request
from commitmq_plugins.rocketmq.remoting.tls import anybody

SEND = {
    "a": "pg",
    "b": "orders",
    "c": "TBW102",
    "d": "2",
    "e": "0",
    "f": "0",
    "g": "1763800000000",
    "h": "0",
    "j": "0",
    "k": "false",
}
PULL = {"consumerGroup": "g", "topic": "orders", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32", "sysFlag": "6",
        "commitOffset": "0", "suspendTimeoutMillis": "5000", "subVersion": "0", "subscription": "*"}  # fmt: skip


def ask(port: int, talk: Callable[[RemotingClient], Awaitable[Any]], *, tls: bool = False) -> Any:
    """What ``talk`` returns, which speaks with the server."""

    async def run() -> Any:
        client = RemotingClient("127.0.0.1", port, anybody() if tls else None)
        try:
            return await talk(client)
        finally:
            await client.close()

    return asyncio.run(run())


def served(port: int) -> None:
    """Wait until the broker server answers."""

    def look() -> bool:
        try:
            ask(
                port, lambda client: client.request(request(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"}))
            )
        except RemotingError:
            return False
        return True

    eventually(look, "the broker server answers")


async def send(client: RemotingClient, body: bytes, key: str, more: str = "", **fields: str) -> Command:
    """Send a message with the unique key ``key``; ``more``: further properties as they are encoded."""
    properties = f"UNIQ_KEY\x01{key}\x02TAGS\x01blue\x02{more}"
    return await client.request(request(RequestCode.SEND_MESSAGE_V2, {**SEND, "i": properties, **fields}, body), 10)
