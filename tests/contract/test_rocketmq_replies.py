"""Goal: a requester of RocketMQ gets the reply of the node's own consumer, pushed, as from RocketMQ's.

Method: a client that speaks the protocol and asks; a consumer of the node with a handler that replies, stopped in between.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from commitmq import Consumer, Message
from commitmq.format.properties import decode_properties
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import Command
from nodes import Node
from rocketmq_peer import connected, heartbeat, send, served_node


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, int]]:
    with served_node(tmp_path_factory.mktemp("replies")) as (node, port, _):
        yield node, port


def answering(node: Node, topic: str, ready: threading.Event) -> None:
    """A consumer of the node that replies to each message until it hears the end."""
    with Consumer(topic, group=f"answerers-{topic}", node=node.address, start="earliest") as consumer:

        def handle(message: Message) -> None:
            if message.body == b"end":
                consumer.close()
                return
            message.reply(b"re: " + message.body)

        ready.set()
        consumer.run(handle)


def test_replies_of_the_nodes_consumers_are_pushed_to_the_requester_once(served: tuple[Node, int]) -> None:
    node, port = served
    pushed: list[Command] = []

    def take(command: Command) -> Command | None:
        if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return None
        command.body = bytes(command.body)
        pushed.append(command)
        return command.answer()

    async def ask() -> None:
        async with connected(port, take) as requester, connected(port) as other:
            assert (await requester.ask(heartbeat("java@1", "g", producers=("askers",)))).code == 0
            assert (await other.ask(heartbeat("java@2", "g", producers=("askers",)))).code == 0
            for number in range(3):
                marks = {"CORRELATION_ID": f"c{number}", "REPLY_TO_CLIENT": "java@1", "TTL": "20000"}
                assert (
                    await requester.ask(send("questions", b"q%d" % number, {"UNIQ_KEY": f"K{number}", **marks}))
                ).code == 0
            deadline = time.monotonic() + 20
            while len(pushed) < 3 and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)  # no reply comes twice
            assert (await requester.ask(send("questions", b"end"))).code == 0

    ready = threading.Event()
    consumer = threading.Thread(target=answering, args=(node, "questions", ready))
    consumer.start()
    assert ready.wait(30)
    asyncio.run(ask())
    consumer.join(30)
    assert sorted(bytes(one.body) for one in pushed) == [b"re: q0", b"re: q1", b"re: q2"]
    found = {}
    for one in pushed:
        properties = decode_properties(one.ext_fields["properties"].encode())
        assert properties["REPLY_TO_CLIENT"] == "java@1"
        assert int(properties["PUSH_REPLY_TIME"]) > 0
        found[properties["CORRELATION_ID"]] = bytes(one.body)
        assert one.ext_fields["bornHost"].startswith("127.0.0.1:")
    assert found == {"c0": b"re: q0", "c1": b"re: q1", "c2": b"re: q2"}
