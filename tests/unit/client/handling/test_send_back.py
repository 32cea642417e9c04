"""Goal: the operation ``send_back`` is asked for as the protocol says, and every request gets an answer or an error.

Method: a ZeroMQ socket plays the supervisor and the writer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import zmq

from commitmq.client.handling.send_back import DEAD_LEVEL, SendBack, SendBackRequest, SendBackResult, request_of
from commitmq.client.message import Message
from commitmq.errors import ProtocolError

Reply = Callable[[dict[str, Any]], dict[str, Any] | None]


class Writer:
    """Answers ``metadata`` with its own address for every role, and ``send_back`` with what the test says."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 50)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.asked: list[dict[str, Any]] = []
        self.reply: Reply = lambda header: {"dead": False}
        self.ended = False
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.ended:
            try:
                peer, head, *_ = self.socket.recv_multipart()
            except zmq.Again:
                continue
            header = orjson.loads(head)
            if header["op"] == "metadata":
                found: dict[str, Any] | None = {
                    "node": "n", "epoch": 1, "store": "/nowhere", "segment_bytes": 1, "properties_crc": False, "token": "x",
                    "endpoints": {"writer": [self.address]},
                }  # fmt: skip
            else:
                self.asked.append(header)
                found = self.reply(header)
            if found is not None:
                answer = {"v": 1, "id": header["id"], "ok": True, **found}
                self.socket.send_multipart([peer, orjson.dumps(answer)])
        self.socket.close()
        self.context.term()


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.ended = True
    made.thread.join(10)


def requests(count: int) -> list[SendBackRequest]:
    return [SendBackRequest("t", 0, offset, 1000 * offset) for offset in range(count)]


def test_the_header(writer: Writer) -> None:
    message = Message(b"x")
    message.topic, message.queue_id, message.queue_offset, message.physical_offset = "t", 1, 2, 3
    sender = SendBack(writer.address, "g", timeout_s=5)
    try:
        sender.exchange(
            [
                request_of(message, dead=False, delay_s=None, max_retries=16),
                request_of(message, dead=False, delay_s=1.5, max_retries=None),
                request_of(message, dead=True, delay_s=None, max_retries=16),
            ]
        )
    finally:
        sender.close()
    place = {
        "v": 1, "op": "send_back", "group": "g", "topic": "t", "queue": 1, "queue_offset": 2, "physical_offset": 3,
        "ack": "flushed",
    }  # fmt: skip
    assert [{name: value for name, value in one.items() if name != "id"} for one in writer.asked] == [
        {**place, "delay_level": 0, "max_retries": 16},
        {**place, "delay_ms": 1500},
        {**place, "delay_level": DEAD_LEVEL},
    ]


def test_answers_may_come_in_any_order_and_be_refusals(writer: Writer) -> None:
    def reply(header: dict[str, Any]) -> dict[str, Any]:
        if header["queue_offset"] == 1:
            return {"ok": False, "code": "TOPIC_NOT_EXIST", "error": "there is none"}
        return {"dead": header["queue_offset"] == 2}

    writer.reply = reply
    sender = SendBack(writer.address, "g", timeout_s=5)
    try:
        answers = sender.exchange(requests(3))
    finally:
        sender.close()
    assert (answers[0], answers[2]) == (SendBackResult(False), SendBackResult(True))
    assert isinstance(answers[1].error, ProtocolError)
    assert answers[1].error.code == "TOPIC_NOT_EXIST"


def test_a_missing_answer_is_an_error_and_the_next_exchange_works(writer: Writer) -> None:
    writer.reply = lambda header: None if header["queue_offset"] == 1 else {}
    sender = SendBack(writer.address, "g", timeout_s=0.5)
    try:
        answers = sender.exchange(requests(3))
        assert [one.error is None for one in answers] == [True, False, True]
        writer.reply = lambda header: {}
        assert sender.exchange(requests(2)) == [SendBackResult(), SendBackResult()]
    finally:
        sender.close()


def test_without_a_node_every_request_is_an_error() -> None:
    sender = SendBack("tcp://127.0.0.1:9", "g", timeout_s=0.3)
    try:
        assert all(one.error is not None for one in sender.exchange(requests(3)))
    finally:
        sender.close()
