"""Goal: requests for the status that wait at once share one answer, and others do not wait for it;
requests have a share of a processor.

Method: the admin socket with handlers of the test, called by hand, and peers over plain sockets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from commitmq.config import NodeConfig
from commitmq.log import get_log
from commitmq.network.gate import BURST_S
from commitmq.protocol import wire
from commitmq.supervision.admin_socket import AdminSocket, Answer
from nodes import eventually
from zmtp import RawPeer

_PEERS = 20


class _Admin:
    def __init__(self, folder: Path) -> None:
        self.handled: list[str] = []
        handlers = {"metadata": self._answer, "status": self._answer}
        self.socket = AdminSocket(NodeConfig(), f"ipc://{folder}/a.ipc", 0, handlers, get_log("test"))

    def _answer(self, _peer: bytes, header: dict[str, Any]) -> Answer:
        self.handled.append(header["op"])
        return wire.ok(header["id"], op=header["op"], count=len(self.handled))


@pytest.fixture(name="admin")
def _admin(tmp_path: Path) -> Iterator[_Admin]:
    admin = _Admin(tmp_path)
    yield admin
    admin.socket.close(linger_ms=0)


def is_answered(admin: _Admin, peer: zmq.Socket[bytes]) -> bool:
    """Let the socket serve, and see whether ``peer`` has an answer."""
    admin.socket.serve()
    return bool(peer.poll(1))


def test_requests_for_the_status_share_an_answer(admin: _Admin) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers = [context.socket(zmq.DEALER) for _ in range(_PEERS)]
    try:
        for number, peer in enumerate(peers):
            peer.linger = 0
            peer.connect(admin.socket.endpoints[number % 2])
            peer.send(wire.pack({"op": "metadata", "id": number}))
        for peer in peers:
            assert eventually(partial(is_answered, admin, peer), "each is connected")
            peer.recv()
        admin.handled.clear()
        for number, peer in enumerate(peers):
            peer.send(wire.pack({"op": "status", "id": number}))
            peer.send(wire.pack({"op": "metadata", "id": 1_000 + number}))
        time.sleep(0.5)  # the I/O thread reads them all
        answers = []
        for peer in peers:
            for _ in range(2):
                assert eventually(partial(is_answered, admin, peer), "an answer")
                answers.append(json.loads(peer.recv()))
        statuses = sorted(one["id"] for one in answers if one["op"] == "status")
        assert statuses == list(range(_PEERS))
        assert admin.handled.count("metadata") == _PEERS
        assert admin.handled.count("status") < _PEERS // 2
    finally:
        for peer in peers:
            peer.close()
        context.destroy(linger=0)


def test_a_turn_that_leaves_nothing_waiting_is_counted_too(tmp_path: Path) -> None:
    # A client that asks one question after the other took a whole processor.
    def answer(_peer: bytes, header: dict[str, Any]) -> Answer:
        end_s = time.thread_time() + 2 * BURST_S
        while time.thread_time() < end_s:
            pass
        return wire.ok(header["id"])

    admin = AdminSocket(NodeConfig(), f"ipc://{tmp_path}/a.ipc", 0, {"metadata": answer}, get_log("test"))
    try:
        assert admin.serve() == 0.0
        with RawPeer(admin.endpoints[0]) as peer:
            peer.send(wire.pack({"op": "metadata", "id": 1}))
            assert admin.socket.poll(5_000)
            assert admin.serve() > 0.0
    finally:
        admin.close(linger_ms=0)
