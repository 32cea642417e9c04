"""Goal: a gate knows which requests have waited longer than a limit, and never takes a request for older than it is.

Method: a real ROUTER that is not read for a while, peers over TCP and a Unix socket; a connection with made-up counts.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import zmq

from commitmq.config import NetworkConfig
from commitmq.log import get_log
from commitmq.network.connection import PeerConnection
from commitmq.network.router import open_router
from commitmq.protocol import wire
from nodes import eventually

LIMIT_S = 0.3


@pytest.mark.parametrize("kind", [0, 1], ids=["tcp", "unix"])
def test_what_waits_behind_a_long_turn_is_late_and_what_comes_after_it_is_not(tmp_path: Path, kind: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, endpoints = open_router(context, NetworkConfig(), get_log("test"), f"ipc://{tmp_path}/r.ipc", 0)
    router.gate.limit_waits(LIMIT_S)

    def is_late() -> bool:
        assert router.poll(5_000)
        identity = router.recv_multipart(zmq.NOBLOCK)[0]
        connection = router.gate.peers.get(identity)  # the gate may not have heard of it yet
        return connection is not None and connection.is_late

    def send(count: int) -> None:
        for number in range(count):
            peer.send(wire.pack({"op": "status", "id": number, "more": "x" * 500}))

    with context.socket(zmq.DEALER) as peer:
        try:
            peer.connect(endpoints[kind])
            send(1)
            assert not is_late()
            with pytest.raises(zmq.Again):
                router.recv_multipart(zmq.NOBLOCK)
            time.sleep(LIMIT_S)
            send(1)
            time.sleep(2 * LIMIT_S)
            assert is_late()
            send(20)
            time.sleep(2 * LIMIT_S)
            assert [is_late() for _ in range(20)].count(True) >= 17  # (the gate may take two for a handshake)
            for _ in range(50):
                send(1)
                assert not is_late()
        finally:
            peer.setsockopt(zmq.LINGER, 0)
            router.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_taken_for_older_than_it_is(seed: int) -> None:
    """Requests of random sizes come and are handled at random; each is judged late only if it is."""
    chance = random.Random(seed)
    connection = PeerConnection(0)
    now, end, others = connection.accepted_s, 0, chance.randrange(900)
    waiting: list[tuple[float, int]] = []  # when it came, where it ends
    found = 0
    for _ in range(4_000):
        now += chance.random() * 0.02
        step = chance.random()
        if step < 0.5:
            end += chance.randrange(100, 3_000)
            waiting.append((now, end))
        elif step < 0.5 + (0.45 if len(waiting) < 60 else 0.1) and waiting:
            came, at = waiting.pop(0)
            connection.handled = at
            if connection.is_late:
                found += 1
                assert now - came > LIMIT_S
        if chance.random() < 0.2:  # a look, as PeerConnection.look would count
            others += chance.randrange(2)
            connection._handled_at_look = connection.handled
            connection.received = end + others
            connection.judge(now, all_taken=False, wait_limit_s=LIMIT_S)
    assert found > 0


def test_nothing_is_noted_without_a_limit() -> None:
    connection = PeerConnection(0)
    connection.received = 10_000_000
    connection.judge(connection.accepted_s, all_taken=False)
    assert (connection.is_late, len(connection._marks)) == (False, 0)
    assert eventually(lambda: connection.is_held, "its bytes wait")
