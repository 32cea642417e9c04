"""Transactions at the level of the protocol: half messages, their ends, and a producer that is asked."""

from __future__ import annotations

import itertools
import time
from typing import Any

import orjson
import zmq

from commitmq import Admin
from commitmq.format.record import Record, decode_record
from commitmq.protocol import wire
from delays import Peer
from nodes import Node

GROUP = "orders"
QUICK = (
    "transaction.timeout_ms=300",
    "transaction.check_interval_ms=200",
    "transaction.op_interval_ms=300",
    "transaction.check_max=1000",
    "supervisor.restart_backoff_max_ms=300",
)
"""Settings under which a check comes soon, and many come before a transaction is given up."""

_numbers = itertools.count(1)


def send_half(
    peer: Peer, topic: str, body: bytes, queue: int = 0, group: str = GROUP, ack: str = "flushed", **properties: str
) -> dict[str, Any]:
    """The writer's answer to a half message, with the message's unique id."""
    unique = peer.ids.next()
    given = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": unique, **properties}
    return {**peer.ask(body, op="send", topic=topic, queue=queue, properties=given, ack=ack), "unique_id": unique}


class EndPeer:
    """A DEALER to the transaction process."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._connect()
        self.checks: list[tuple[dict[str, Any], Record]] = []

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(transaction_endpoint(self._node))
        return socket

    def __enter__(self) -> EndPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, timeout_s: float = 20, **fields: Any) -> dict[str, Any]:
        """The answer to a request; checks that come meanwhile are kept. Raises TimeoutError."""
        number = next(_numbers)
        self._socket.send(wire.pack({"id": number, **fields}))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = self._receive(100)
            if answer is not None and answer.get("id") == number:
                return answer
        raise TimeoutError(fields)

    def end(self, half: dict[str, Any], decision: str, group: str = GROUP, **fields: Any) -> dict[str, Any]:
        """Commit or roll back the transaction of a half message."""
        place = {"queue_offset": half["queue_offset"], "physical_offset": half["physical_offset"]}
        return self.ask(op="transaction.end", group=group, decision=decision, **place, **fields)

    def register(self, group: str = GROUP) -> dict[str, Any]:
        """Become a producer that is asked."""
        return self.ask(op="transaction.register", group=group)

    def wait_for_check(self, timeout_s: float = 20) -> tuple[dict[str, Any], Record]:
        """The next check that came. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.checks:
            if time.monotonic() > deadline:
                raise TimeoutError("no check came")
            self._receive(100)
        return self.checks.pop(0)

    def _receive(self, timeout_ms: int) -> dict[str, Any] | None:
        if not self._socket.poll(timeout_ms):
            return None
        frames = self._socket.recv_multipart()
        header: dict[str, Any] = orjson.loads(frames[0])
        if header.get("op") == "transaction.check":
            self.checks.append((header, decode_record(frames[1])))
            return None
        return header


def transaction_endpoint(node: Node) -> str:
    """Where the transaction process is; it is started when it does not run."""
    with Admin(node.address) as admin:
        admin._directory.request("mover.start", {"role": "transaction"}, timeout_s=10)
        for _ in range(200):
            found = admin.metadata()["endpoints"].get("transaction")
            if found:
                return str(found[0])
            time.sleep(0.05)
    raise AssertionError("the transaction process did not start")
