"""Goal: what reaches a port of the node cannot end the process behind it, take another one's answers, or make it hold more.

Method: one real node and peers that speak ZMTP by themselves; each attack on every port, over tcp and ipc. For descriptors a
node of its own that may have 256.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import zmq

import commitmq
from attacks import FIRST_ID
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel
from commitmq.store.layout import StoreLayout
from nodes import Node, eventually, start_node
from zmtp import MORE, RawPeer, frame

PORTS = (
    "admin",
    "writer",
    "reader-0",
    "coordinator",
    "cleanup",
    "dispatcher-consume_queue",
    "dispatcher-index",
    "dispatcher-memory",
)
EVERY_WAY = [(port, kind) for port in PORTS for kind in ("tcp", "ipc")]
MOST_BYTES = 400_000_000
REQUEST = wire.pack({"op": "anything", "id": 7})


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("ports")
    with start_node(folder, "network.first_request_timeout_ms=2000", "network.max_client_connections=60") as found:
        yield found


def endpoint(node: Node, port: str, kind: str) -> str:
    if kind == "tcp":
        return node.endpoints()[port]
    if port == "admin":  # its name is another one in each life of the node
        return str(node._node_file()["admin"][1])
    return StoreLayout(node.store).ipc("memory" if port == "dispatcher-memory" else port)


def answers(peer: zmq.Socket[bytes], timeout_ms: int = 20_000) -> dict[str, object]:
    assert peer.poll(timeout_ms), "no answer"
    answer: dict[str, object] = orjson.loads(peer.recv())
    return answer


@pytest.mark.parametrize(("port", "kind"), EVERY_WAY)
def test_the_next_automatic_id_is_not_known(node: Node, port: str, kind: str) -> None:
    """Sixteen peers hold the ids that libzmq would give next, and then come as many ordinary ones."""
    before = node.pids()
    where = endpoint(node, port, kind)
    peers = [RawPeer(where, b"\0" + (FIRST_ID + number).to_bytes(4, "big")) for number in range(16)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ordinary = [context.socket(zmq.DEALER) for _ in range(16)]
        for one in ordinary:
            one.connect(where)
            one.send(REQUEST)
            assert answers(one)["id"] == 7
    finally:
        context.destroy(linger=0)
        for peer in peers:
            peer.close()
    assert node.pids() == before


@pytest.mark.parametrize("identity", [b"\0" + b"abcd", b"\0" + bytes(16), b"victim", b"x"])
@pytest.mark.parametrize(("port", "kind"), EVERY_WAY)
def test_an_id_that_could_be_another_ones_is_refused(node: Node, port: str, kind: str, identity: bytes) -> None:
    with RawPeer(endpoint(node, port, kind), identity) as peer:
        peer.send(REQUEST)
        peer.socket.settimeout(20)
        heard = peer.socket.recv(1_000)
        assert b"INVALID_PARAMETER" in heard
        eventually(peer.is_ended, "the connection was ended")


def test_ids_of_our_clients_cannot_be_guessed(node: Node) -> None:
    channels = [Channel(node.address) for _ in range(3)]
    ids = {bytes(one.socket.getsockopt(zmq.ROUTING_ID)) for one in channels}
    for one in channels:
        assert one.request("metadata", timeout_s=20)[0]["ok"]
        one.close()
    assert len(ids) == 3
    assert all(len(one) >= 17 and one[0] for one in ids)


CONTENTS = [bytes(1 << 20), bytes(60_000), b""]


@pytest.mark.parametrize("content", CONTENTS, ids=["large", "middle", "empty"])
@pytest.mark.parametrize(("port", "kind"), [("writer", "tcp"), ("reader-0", "ipc")])
def test_a_request_without_end(node: Node, port: str, kind: str, content: bytes) -> None:
    """It is ended before it takes much memory."""
    check_without_end(node, port, kind, content)


@pytest.mark.long
@pytest.mark.parametrize("content", CONTENTS, ids=["large", "middle", "empty"])
@pytest.mark.parametrize(("port", "kind"), EVERY_WAY)
def test_a_request_without_end_on_every_port(node: Node, port: str, kind: str, content: bytes) -> None:
    check_without_end(node, port, kind, content)


def check_without_end(node: Node, port: str, kind: str, content: bytes) -> None:
    before = node.pids()
    pid = before["supervisor" if port == "admin" else port]
    data = frame(content, MORE)
    data *= max(1, (1 << 18) // len(data))
    with RawPeer(endpoint(node, port, kind), timeout_s=2) as peer:
        sent = peer.flood(data, 1 << 30)
        largest = private_bytes(pid)
        eventually(peer.is_ended, f"ended after {sent} bytes")
    assert largest < MOST_BYTES
    # What an ended connection left counts until it is dropped, and with a quarter of max_pending_bytes nobody else comes in.
    eventually(lambda: is_let_in(endpoint(node, port, kind)), "the next one is let in")
    assert node.pids() == before


def is_let_in(where: str) -> bool:
    try:
        RawPeer(where, timeout_s=2).close()
    except OSError:
        return False
    return True


def private_bytes(pid: int) -> int:
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * 4_096


def test_who_asks_nothing_loses_its_place(node: Node) -> None:
    """Over tcp; one that asked something stays."""
    where = endpoint(node, "reader-0", "tcp")
    with RawPeer(where) as silent, RawPeer(where) as asking:
        asking.send(REQUEST)
        eventually(silent.is_ended, "the silent one was ended")
        assert not asking.is_ended()


def test_one_client_has_so_many_connections(node: Node) -> None:
    where = endpoint(node, "coordinator", "tcp")
    peers = []
    try:
        for _ in range(80):
            try:
                peers.append(peer := RawPeer(where))
                peer.send(REQUEST)
            except OSError:
                continue  # ended during its handshake
        eventually(lambda: sum(not one.is_ended() for one in peers) <= 60, "those beyond the bound were ended")
        assert sum(not one.is_ended() for one in peers) >= 40
    finally:
        for one in peers:
            one.close()
    # Their places are free again.
    channel = Channel(where)
    assert eventually(lambda: channel.request("topic.list", timeout_s=20)[0]["ok"], "another one is served")
    channel.close()


def consumers_find_no_place(node: Node) -> None:
    """Consumers come until one finds no place."""
    with commitmq.Admin(node.address) as admin, contextlib.ExitStack() as consumers:
        admin.topic_create("crowded", 1)
        with pytest.raises(commitmq.ProtocolError, match=r"as many as its limit of 512 open.*ulimit -n") as refused:
            for number in range(200):
                began = time.monotonic()
                one = commitmq.Consumer("crowded", group=f"g{number}", node=node.address, timeout_s=30)
                consumers.callback(one.close)
                one.poll(timeout_s=0)
        assert refused.value.code == "LIMIT_EXCEEDED"
        assert time.monotonic() - began < 5


@pytest.mark.timeout(300)
def test_few_descriptors(tmp_path: Path) -> None:
    """A node that may have 512 descriptors for each process, of which the shell gives it 256, and 600 connections to each of
    its ports. Afterwards consumers come until one finds no place, which learns the reason at once.

    Over ipc they come in groups: libzmq's listener of a Unix socket ends the process when no descriptor is left, before the
    gate could refuse a connection (docs/service.md). Only the node's own account reaches these sockets.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    script = (
        "import resource,sys,os;resource.setrlimit(resource.RLIMIT_NOFILE,(256,512));os.execv(sys.argv[1],sys.argv[1:])"
    )
    node = Node(tmp_path / "store")
    started = subprocess.run(
        [sys.executable, "-c", script, sys.executable, "-m", "commitmq.cli.main", *node.arguments(), "--background"],
        env=node.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    log = node.log()
    assert "may open few files" in log
    assert "descriptors=512" in log
    try:
        before = node.pids()
        for role, pid in before.items():
            if role != "keeper":  # it opens a handful of files
                assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (512, 512), role
        for port in ("admin", "writer", "reader-0", "coordinator"):
            for kind in ("tcp", "ipc"):
                where = endpoint(node, port, kind)
                with contextlib.ExitStack() as peers:
                    for number in range(600):
                        if kind == "ipc" and number % 50 == 0:
                            time.sleep(0.1)
                        with contextlib.suppress(OSError):  # refused, which is what it is about
                            peers.callback(RawPeer(where, timeout_s=5).close)
                    time.sleep(0.2)
        assert node.pids() == before
        consumers_find_no_place(node)
        assert node.pids() == before
    finally:
        node.stop()
        node.kill_all(known=True)
