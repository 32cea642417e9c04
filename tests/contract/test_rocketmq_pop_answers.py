"""Goal: pops of RocketMQ's clients say how many messages are left, and find what came back under either form of its name.

Method: a real node with retry topics of the second form, spoken to by the frames of the protocol, and started again with them
after it had the first one. tests/interop has the same conversation with RocketMQ's broker.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from commitmq import Admin
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.fastjson import load_object
from commitmq_plugins.rocketmq.remoting.frame import request
from pop_answers import EXPECTED, ends_at, pop, pop_answers
from rocketmq_peer import connected, has_code, records, send, served_node

V2 = "pop.retry_topics_v2=true"


def test_pops_say_what_is_left_and_find_what_came_back(tmp_path: Path) -> None:
    with served_node(tmp_path, V2) as (_, port, _):
        assert asyncio.run(pop_answers(port)) == EXPECTED


def test_what_lies_in_topics_of_the_first_form_is_still_handed_out(tmp_path: Path) -> None:
    with served_node(tmp_path) as (node, port, _):
        with Admin(node.address) as admin:
            admin.topic_create("orders", 1)
        asyncio.run(_leave_a_message(port))
    with served_node(tmp_path, V2) as (_, port, _):
        found = asyncio.run(_popped(port))
    assert (found["flag"], found["topics"]) == ("1", {"%RETRY%late_orders", "%RETRY%late+orders"})


async def _leave_a_message(port: int) -> None:
    """A message that came back into the retry topic, and was popped there by nobody."""
    async with connected(port) as peer:
        await peer.until(send("orders", b"x"))
        await peer.until(pop("late", "orders", 0, 1, invisibleTime="2000", pollTime="2000"), has_code(0))
        bound = request(RequestCode.GET_MAX_OFFSET, {"topic": "%RETRY%late_orders", "queueId": "0"})
        await peer.until(bound, ends_at(1))


async def _popped(port: int) -> dict[str, Any]:
    async with connected(port) as peer:
        answer = await peer.until(pop("late", "orders", -1, 8, pollTime="2000"), has_code(0))
        (record,) = records(answer.body)
        assert (record.body, record.topic, record.reconsume_times) == (b"x", "orders", 1)
        topics = load_object((await peer.until(request(RequestCode.GET_ALL_TOPIC_CONFIG))).body)["topicConfigTable"]
        return {
            "flag": record.properties["POP_CK"].split(" ")[4],
            "topics": {name for name in topics if name.startswith("%RETRY%late") and name.endswith("orders")},
        }
