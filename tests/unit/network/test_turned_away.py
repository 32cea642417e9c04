"""Goal: a client for which a port has no place learns the reason at once, the node's own processes find one all the same, and
a port with few descriptors never runs out of them.

Method: a real ROUTER with its gate and a thread that answers, real channels as the clients have them, and plain peers.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from commitmq.config import NetworkConfig
from commitmq.errors import ProtocolError, RequestError
from commitmq.network import gate
from commitmq.network.connection import Disconnect, PeerConnection
from commitmq.network.router import Router
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel
from nodes import eventually
from routers import opened
from zmtp import RawPeer

MOST = 16
OWN_CHILD = """
import sys
from commitmq.protocol.channel import Channel
print(Channel(sys.argv[1]).request("status", timeout_s=10)[0]["ok"])
"""


@contextlib.contextmanager
def answering(folder: Path, **bounds: Any) -> Iterator[tuple[Router, list[str]]]:
    """A router that answers each request, and its endpoints."""
    with opened(folder, config=NetworkConfig(**bounds)) as (router, endpoints):
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                if router.poll(20):
                    with contextlib.suppress(zmq.Again):
                        peer, header = router.recv_multipart(zmq.NOBLOCK)
                        router.send_multipart([peer, wire.ok(orjson.loads(header)["id"])])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield router, endpoints
        finally:
            stop.set()
            thread.join()


def asked(channels: contextlib.ExitStack, endpoint: str) -> Channel:
    """A connection that has asked for something."""
    channel = Channel(endpoint)
    channels.callback(channel.close)
    channel.request("status", timeout_s=10)
    return channel


@pytest.mark.parametrize("kind", [0, 1], ids=["tcp", "ipc"])
@pytest.mark.parametrize("bound", ["max_connections", "max_client_connections"])
def test_one_too_many_is_told_so(tmp_path: Path, kind: int, bound: str) -> None:
    with answering(tmp_path, **{bound: MOST}) as (router, endpoints), contextlib.ExitStack() as channels:
        first = [asked(channels, endpoints[kind]) for _ in range(MOST)]
        assert eventually(lambda: len(router.gate) == MOST, "the gate has heard of all")
        began = time.monotonic()
        newcomer = Channel(endpoints[kind])
        with pytest.raises(ProtocolError) as refused:
            while True:  # the first request may be faster than the news of its connection
                newcomer.request("status", timeout_s=10)
        newcomer.close()  # libzmq would connect again
        assert time.monotonic() - began < 1
        assert refused.value.code == "LIMIT_EXCEEDED"
        assert f"network.{bound}" in str(refused.value)
        assert f"has {MOST} connections" in str(refused.value)
        assert eventually(lambda: len(router.gate) == MOST, "the one that was turned away is ended")
        assert router.gate.endings.ended == {bound: 1}
        # Nobody else lost anything, and a place that is free is given away again.
        for one in first:
            assert one.request("status", timeout_s=10)[0]["ok"]
        first[0].close()
        assert eventually(lambda: len(router.gate) == MOST - 1, "the gate has heard of the end")
        asked(channels, endpoints[kind])


def test_there_is_room_for_few_of_them(tmp_path: Path) -> None:
    """Those that are turned away stand in the descriptors for bursts, so a crowd of them is ended at once as before."""
    with answering(tmp_path, max_connections=MOST) as (router, endpoints), contextlib.ExitStack() as peers:
        for _ in range(MOST):
            asked(peers, endpoints[0])
        assert eventually(lambda: len(router.gate) == MOST, "the gate has heard of all")
        stood = []
        for _ in range(2 * MOST):
            with contextlib.suppress(OSError):  # ended during the handshake, for which it is too late to ask
                stood.append(peers.enter_context(contextlib.closing(RawPeer(endpoints[0]))))
        assert stood
        assert eventually(lambda: len(router.gate) <= 2 * MOST, "those beyond the room are ended at once", 0.9)
        assert eventually(lambda: all(one.is_ended() for one in stood), "they asked nothing for a second", 3)


def test_the_reason_names_descriptors_where_they_are_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "affordable_connections", lambda _wanted: 8)
    with answering(tmp_path) as (_router, endpoints), contextlib.ExitStack() as channels:
        for _ in range(8):
            asked(channels, endpoints[1])
        with pytest.raises(ProtocolError, match=r"has 8 connections, as many as its limit of \d+ open.*ulimit -n"):
            while True:
                asked(channels, endpoints[1])


def test_the_nodes_own_processes_find_a_place(tmp_path: Path) -> None:
    """A process of the node is a child of the supervisor, as the port's own process may be the supervisor: here a child of
    this one.
    """
    with answering(tmp_path, max_connections=MOST) as (router, endpoints), contextlib.ExitStack() as channels:
        for _ in range(MOST):
            asked(channels, endpoints[1])
        assert eventually(lambda: len(router.gate) == MOST, "the gate has heard of all")
        for kind, word in ((1, "True"), (0, "LIMIT_EXCEEDED")):
            run = [sys.executable, "-c", OWN_CHILD, endpoints[kind]]
            child = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
            assert word in child.stdout + child.stderr


def test_a_bound_that_is_broken_for_long_fills_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1_000.0
    with opened(tmp_path) as (router, _endpoints):
        monkeypatch.setattr("commitmq.network.connection.time.monotonic", lambda: now)
        connection = PeerConnection(0)
        for _ in range(600):
            now += 1.0
            router.gate.endings.tell(Disconnect(connection, "max_connections", "no place"))
        router.gate.endings.tell(Disconnect(connection, "frames", "too many"))
        monkeypatch.undo()
    lines = [line for line in caplog.text.splitlines() if "connection ended" in line]
    assert 10 <= len(lines) <= 20
    assert "bound=frames" in lines[-1]


def test_a_client_without_descriptors_says_so_at_once(tmp_path: Path) -> None:
    """ZeroMQ itself would try to connect until the client's time is over."""
    program = """
import os, resource, sys, time
from commitmq.errors import RequestError
from commitmq.protocol.channel import Channel
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
first = Channel(sys.argv[1])
first.request("status", timeout_s=10)
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
while taken:
    try:
        channel = Channel(sys.argv[1])
        try:
            channel.request("status", timeout_s=30)
        finally:
            channel.close()
        print("connected")
        break
    except RequestError as error:
        print(error)
    os.close(taken.pop())
    time.sleep(0.02)  # libzmq closes what it has opened a moment later
"""
    with answering(tmp_path) as (_router, endpoints):
        for endpoint in endpoints:
            began = time.monotonic()
            run = [sys.executable, "-c", program, endpoint]
            child = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
            assert child.returncode == 0, child.stderr
            *refusals, last = child.stdout.splitlines()
            assert last == "connected", child.stdout
            assert len(refusals) > 2
            for one in refusals:
                assert one.startswith("CLIENT_ERROR"), child.stdout
                assert "may open no more files" in one, child.stdout
            assert time.monotonic() - began < 20
    assert RequestError("CLIENT_ERROR", "").retryable is False
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
