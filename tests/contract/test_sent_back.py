"""Goal: a message that a consumer sends back comes again from its group's retry topic, later and later, and at last becomes a
dead letter.

Method: real nodes, requests at the level of the protocol, and reads of whole topics; the rules themselves are tested in
unit/semantics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from commitmq import Admin, Producer, Reader
from commitmq.client.message import Message
from delays import Peer
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)
TOPIC, GROUP = "orders", "kitchen"
RETRY, DEAD = f"%RETRY%{GROUP}", f"%DLQ%{GROUP}"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("send-back"), "topics.default_queues=1") as made:
        with Admin(made.address) as admin, Peer(made) as peer:
            admin.topic_create(TOPIC, 1)
            for name in (RETRY, DEAD):
                admin.topic_create(name, 1)
            assert peer.hello()["ok"]
        yield made


def read(node: Node, topic: str) -> list[Message]:
    found: list[Message] = []
    with Reader(topic, node=node.address, start="earliest") as reader:
        for _ in range(3):
            found += list(reader.poll(timeout_s=0.2))
    return found


def sent(node: Node, body: bytes) -> Message:
    with Producer(node.address) as producer:
        producer.send(TOPIC, body, tags="hot", keys="table-1", properties={"note": "x"}, queue=0)
    return next(one for one in read(node, TOPIC) if bytes(one.body) == body)


def back(node: Node, message: Message, **fields: Any) -> dict[str, Any]:
    with Peer(node) as peer:
        return peer.ask(
            b"",
            op="send_back",
            **{
                "group": GROUP,
                "topic": message.topic,
                "queue": message.queue_id,
                "queue_offset": message.queue_offset,
                "physical_offset": message.physical_offset,
                **fields,
            },
        )


def test_a_message_comes_again_from_the_retry_topic(node: Node) -> None:
    message = sent(node, b"burnt")
    answer = back(node, message, delay_level=1)
    assert (answer["ok"], answer["topic"], answer["dead"]) == (True, RETRY, False)
    assert answer["stored_topic"] == "SCHEDULE_TOPIC_XXXX"
    eventually(lambda: any(bytes(one.body) == b"burnt" for one in read(node, RETRY)), "it comes again")
    again = next(one for one in read(node, RETRY) if bytes(one.body) == b"burnt")
    assert (again.reconsume_times, again.tags, again.born_timestamp) == (1, "hot", message.born_timestamp)
    assert again.properties["RETRY_TOPIC"] == TOPIC
    assert again.properties["note"] == "x"
    assert again.properties["ORIGIN_MESSAGE_ID"] == message.msg_id
    third = back(node, again, delay_level=1)
    assert third["ok"]
    eventually(lambda: any(one.reconsume_times == 2 for one in read(node, RETRY)), "and again")


def test_the_levels_grow_with_the_tries(node: Node) -> None:
    assert back(node, sent(node, b"first try"))["stored_queue"] == 2  # level 3, ten seconds
    assert back(node, sent(node, b"in ms"), delay_ms=4_000)["stored_queue"] == 1  # the next longer level


@pytest.mark.parametrize("how", [{"delay_level": -1}, {"max_retries": 0}], ids=str)
def test_the_last_try_makes_a_dead_letter(node: Node, how: dict[str, int]) -> None:
    body = f"dead {how}".encode()
    answer = back(node, sent(node, body), **how)
    assert (answer["ok"], answer["topic"], answer["dead"]) == (True, DEAD, True)
    eventually(lambda: any(bytes(one.body) == body for one in read(node, DEAD)), "it is a dead letter")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"physical_offset": 1 << 50}, "MESSAGE_ILLEGAL"),
        ({"physical_offset": 7}, "MESSAGE_ILLEGAL"),
        ({"queue_offset": 99}, "MESSAGE_ILLEGAL"),
        ({"topic": "others"}, "MESSAGE_ILLEGAL"),
        ({"group": "a/b"}, "INVALID_PARAMETER"),
        ({"group": 5}, "INVALID_PARAMETER"),
        ({"group": "unknown"}, "TOPIC_NOT_EXIST"),
        ({"delay_level": 99}, "INVALID_PARAMETER"),
        ({"delay_ms": -1}, "INVALID_PARAMETER"),
        ({"max_retries": "x"}, "INVALID_PARAMETER"),
        ({"ack": "maybe"}, "INVALID_PARAMETER"),
    ],
    ids=str,
)
def test_a_wrong_request_stores_nothing(node: Node, fields: dict[str, Any], code: str) -> None:
    answer = back(node, sent(node, b"whole"), **fields)
    assert (answer["ok"], answer["code"], answer["outcome"]) == (False, code, "not_stored")
