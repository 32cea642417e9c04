"""Sends of delayed messages at the level of the protocol, and reads of everything that a topic has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson
import zmq

from commitmq import Reader
from commitmq.client.sending.run_encoder import RunLayout, encode_run
from commitmq.format.message_id import UniqueIds
from commitmq.protocol import wire
from nodes import Node

_numbers = itertools.count(1)


class Stored(NamedTuple):
    """A message that was read."""

    queue: int
    offset: int
    body: bytes
    store_timestamp: int


class Peer:
    """A DEALER to the writer."""

    def __init__(self, node: Node) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self._socket.connect(node.endpoints()["writer"])
        self.ids = UniqueIds()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, payload: bytes, **fields: Any) -> dict[str, Any]:
        """The answer to a request with a payload."""
        number = next(_numbers)
        self._socket.send_multipart([wire.pack({"id": number, **fields}), payload])
        answer: dict[str, Any] = orjson.loads(self._socket.recv())
        assert answer["id"] == number
        return answer

    def send(self, topic: str, body: bytes, level: object, queue: int = 0, **fields: Any) -> dict[str, Any]:
        """Send one message with the property DELAY."""
        return self.ask(body, op="send", topic=topic, queue=queue, properties={"DELAY": str(level)}, **fields)

    def hello(self) -> dict[str, Any]:
        """What the writer tells a client about runs."""
        number = next(_numbers)
        self._socket.send(wire.pack({"id": number, "op": "hello"}))
        answer: dict[str, Any] = orjson.loads(self._socket.recv())
        return answer

    def append(self, topic: str, bodies: list[bytes], levels: Iterable[int], queue: int = 0) -> dict[str, Any]:
        """Send a run; message i has the delay level ``levels[i]``."""
        return self.append_with(topic, bodies, [b"DELAY\x01%d\x02" % level for level in levels], queue)

    def append_with(self, topic: str, bodies: list[bytes], properties: list[bytes], queue: int = 0) -> dict[str, Any]:
        """Send a run; message i has the encoded ``properties[i]``."""
        hello = self.hello()
        layout = RunLayout(
            topic,
            born_v6=hello["born_host"]["v6"],
            store_v6=hello["store_host"]["v6"],
            properties_crc=hello["properties_crc"],
        )
        run = encode_run(layout, queue, bodies, properties, self.ids, born=1)
        return self.ask(run.data, op="append", topic=topic, queue=queue, count=len(bodies))


def everything(node: Node, topic: str) -> list[Stored]:
    """All messages of a topic that can be read now."""
    found: list[Stored] = []
    with Reader(topic, node=node.address, start="earliest", timeout_s=60) as reader:
        quiet = 0
        while quiet < 3:
            batch = reader.poll(timeout_s=0.2)
            quiet = 0 if len(batch) else quiet + 1
            found += [Stored(one.queue_id, one.queue_offset, bytes(one.body), one.store_timestamp) for one in batch]
    return found
