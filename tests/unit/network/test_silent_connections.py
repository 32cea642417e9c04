"""Goal: a connection that asked nothing is ended in time; one whose request waits for a process that is busy is not.

Method: a real ROUTER with its gate, whose receiving thread is this test, which takes nothing for ten times the limit.
"""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from commitmq.config import NetworkConfig
from commitmq.protocol import wire
from nodes import eventually
from routers import opened
from zmtp import RawPeer

QUICK = NetworkConfig(first_request_timeout_ms=100)


def test_a_request_that_waits_is_not_silence(tmp_path: Path) -> None:
    with (
        opened(tmp_path, config=QUICK) as (router, endpoints),
        RawPeer(endpoints[0]) as peer,
        RawPeer(endpoints[0]) as mute,
    ):
        peer.send(wire.pack({"op": "status", "id": 1}))
        time.sleep(10 * QUICK.first_request_timeout_ms / 1000)
        assert not router.gate.endings.ended, "the receiving thread was busy"
        assert router.poll(2_000)
        identity, _ = router.recv_multipart(zmq.NOBLOCK)
        assert not router.poll(0)
        router.gate.found_nothing()
        assert eventually(mute.is_ended, "it asked nothing")
        assert router.gate.endings.ended == {"first_request_timeout_ms": 1}
        assert router.gate.peers[identity].own is not None
