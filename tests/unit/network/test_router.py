"""Goal: a peer that has gone costs no more than the reading of its requests.

Method: a real ROUTER with its gate, and a peer over a plain socket that asks and closes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import zmq

from commitmq.network import connection
from commitmq.network.router import Router
from commitmq.protocol import wire
from nodes import eventually
from routers import opened
from zmtp import RawPeer

_REQUESTS = 100


def identity_of(router: Router) -> bytes:
    assert router.poll(5_000)
    return bytes(router.recv_multipart(zmq.NOBLOCK)[0])


def asked_and_gone(endpoint: str, router: Router) -> bytes:
    """The id of a peer that has sent many requests, of which one was taken, and has closed its connection."""
    with RawPeer(endpoint) as peer:
        # What came and went before the gate heard of it cannot be counted: its requests are taken.
        assert eventually(lambda: len(router.gate) == 1, "the gate has heard of the peer")
        for number in range(_REQUESTS):
            # (The gate takes the first 1,024 bytes of a connection for its handshake.)
            peer.send(wire.pack({"op": "status", "id": number, "more": "x" * 300}))
        identity = identity_of(router)
    assert eventually(lambda: router.gate.has_left(identity), "the gate has heard that the peer closed")
    return identity


@pytest.mark.parametrize("kind", [0, 1])
def test_requests_of_a_peer_that_has_gone_are_dropped(tmp_path: Path, kind: int) -> None:
    with opened(tmp_path, only_answers=True) as (router, endpoints):
        began = time.monotonic()
        asked_and_gone(endpoints[kind], router)
        taken = 0
        with contextlib.suppress(zmq.Again):
            while True:
                router.recv_multipart(zmq.NOBLOCK)
                taken += 1
        # The gate counts the first 1,024 bytes of a connection as its handshake, 64 a second as heartbeats, and of each
        # handled request up to 32 bytes that did not come (heads and the id). So it forgets a peer whose last few requests
        # still wait, and they are taken.
        assert taken * 300 <= 1_024 + 64 * (time.monotonic() - began) + 32 * _REQUESTS < _REQUESTS * 300 / 4


def test_a_port_that_changes_something_gets_what_was_read(tmp_path: Path) -> None:
    with opened(tmp_path, only_answers=False) as (router, endpoints):
        identity = asked_and_gone(endpoints[1], router)
        taken = 1
        while router.poll(500):
            with contextlib.suppress(zmq.Again):
                while True:
                    assert router.recv_multipart(zmq.NOBLOCK)[0] == identity
                    taken += 1
        assert 1 < taken <= _REQUESTS  # the kernel drops what a peer sent that closed without reading


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
        b"\x01\x00" + b"\x08\x00request" * 5,
        b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x07request" * 5,
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    ],
    ids=["TLS", "ZMTP 1.0", "ZMTP 2.0", "HTTP"],
)
def test_what_is_no_request_of_zmtp_3_is_ended_at_its_first_bytes(tmp_path: Path, text: bytes) -> None:
    """Goal: such a peer costs nothing. Its frames would name no connection, so nothing could count them or end it. Method:
    a plain socket; its connection must be over before the receiving thread has looked, and no frame may come out.
    """
    with opened(tmp_path, only_answers=True) as (router, endpoints):
        host, _, port = endpoints[0].removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), 5) as stranger:
            stranger.sendall(text)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1_024):  # libzmq's greeting, then the end
                    pass
            assert not router.poll(100)
            with RawPeer(endpoints[0]) as peer:
                peer.send(wire.pack({"op": "status", "id": 1}))
                assert identity_of(router)


def test_a_peer_on_the_descriptor_of_one_that_left_has_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq gives a descriptor out again before the gate has heard that its connection ended."""
    with opened(tmp_path, only_answers=True) as (router, endpoints):
        with RawPeer(endpoints[0]):
            assert eventually(lambda: len(router.gate) == 1, "the gate has heard of the first peer")
            [first] = router.gate._connections.values()
            monkeypatch.setattr(router.gate, "_hear", lambda: False)
        assert eventually(lambda: first.gone, "the gate has seen that it closed")
        with RawPeer(endpoints[0]) as second:
            second.send(wire.pack({"op": "status", "id": 1}))
            assert router.poll(5_000)
            identity, header = router.recv_multipart(zmq.NOBLOCK)
            assert b'"id":1' in header
            assert not router.gate.has_left(identity)
            monkeypatch.undo()
            second.send(wire.pack({"op": "status", "id": 2}))
            assert router.poll(5_000)
            assert eventually(lambda: router.gate.peers.get(identity) is not first, "the gate has heard of the second")
            assert not router.gate.has_left(identity)


def test_a_peer_that_stays_has_not_left(tmp_path: Path) -> None:
    with opened(tmp_path, only_answers=True) as (router, endpoints), RawPeer(endpoints[0]) as peer:
        peer.send(wire.pack({"op": "status", "id": 1}))
        identity = identity_of(router)
        assert not router.gate.has_left(identity)
        peer.send(wire.pack({"op": "status", "id": 2}))
        assert router.poll(5_000)
        assert router.recv_multipart(zmq.NOBLOCK)[0] == identity


def test_what_the_kernel_dropped_is_forgotten_though_the_port_is_never_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FORGOTTEN_S", 0.5)
    question = wire.pack({"op": "status", "id": 1, "more": "x" * 300})
    with opened(tmp_path, only_answers=False) as (router, endpoints), RawPeer(endpoints[1]) as steady:
        ended = threading.Event()

        def ask() -> None:
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    steady.send(question)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            with RawPeer(endpoints[0]) as peer:
                peer.socket.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:  # until libzmq reads no more and the kernel is full
                        peer.send(question)
                # Over TCP a reset drops what was not read.
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            identities, left = set(), False
            for _ in range(20_000):
                assert router.poll(5_000), "the port is never idle"
                identities.add(bytes(router.recv_multipart(zmq.NOBLOCK)[0]))
                waiting = [one for one in identities if router.gate.has_left(one)]
                if left and not waiting:
                    break
                left = left or bool(waiting)
                time.sleep(0.001)
            assert left
            assert not waiting
        finally:
            ended.set()
            steady.socket.shutdown(socket.SHUT_RDWR)
            asking.join()
