"""Goal: what a peer did that has gone is not laid at the door of the next peer, which gets its descriptor from the kernel.

Method: a real ROUTER with its gate, and peers over plain sockets, one after the other. The gate hears of them late, as it does
when connections come and go by the hundred. The descriptors of both peers are compared, so that the test tests what it says.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from pathlib import Path

import pytest
import zmq

from commitmq.network.connection import PeerConnection
from commitmq.network.gate import Gate
from commitmq.network.router import Router
from commitmq.protocol import wire
from nodes import eventually
from routers import opened
from zmtp import RawPeer

FORBIDDEN = b"\0nobody's"


def take(router: Router, number: int) -> None:
    """The next request must be ``number``."""
    assert router.poll(2_000), f"request {number} was dropped"
    assert b'"id":%d,' % number in router.recv_multipart(zmq.NOBLOCK)[1]


def ask(peer: RawPeer, number: int) -> None:
    peer.send(wire.pack({"op": "status", "id": number, "more": ""}))


def refuse(router: Router) -> None:
    """Take the request under an id that is the node's to give; it never comes out."""
    assert router.poll(2_000)
    with pytest.raises(zmq.Again):
        router.recv_multipart(zmq.NOBLOCK)


def wait_until_closed(descriptor: int) -> None:
    def is_closed() -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return True
        return False

    assert eventually(is_closed, "libzmq has closed the descriptor")


def peer_on(descriptor: int, endpoint: str) -> RawPeer:
    """A peer whose connection libzmq gets as ``descriptor``: all lower ones are taken, but one for the peer's own end.

    Another thread, or the collection of garbage, may open or close a file at that moment; then it is tried again.
    """
    for _ in range(20):
        taken = [os.open("/dev/null", os.O_RDONLY)]
        while taken[-1] < descriptor:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        assert taken[-1] == descriptor
        for free in (taken.pop(), taken.pop()):
            os.close(free)
        peer = RawPeer(endpoint)
        for one in taken:
            os.close(one)
        with contextlib.suppress(OSError):
            found = os.fstat(descriptor)
            # The gate's own descriptor of the same connection, which is the later one, must not be taken for libzmq's.
            is_first = all(os.fstat(one).st_ino != found.st_ino for one in open_below(descriptor))
            if stat.S_ISSOCK(found.st_mode) and peer.socket.fileno() != descriptor and is_first:
                return peer
        peer.close()
        time.sleep(0.1)
    raise AssertionError(f"libzmq got another descriptor than {descriptor}")


def open_below(descriptor: int) -> list[int]:
    """The open descriptors with lower numbers; without the one by which they are listed."""
    listed = [int(one) for one in os.listdir("/proc/self/fd")]
    return [one for one in listed if one < descriptor and os.path.lexists(f"/proc/self/fd/{one}")]


def only_connection(gate: Gate) -> PeerConnection:
    assert eventually(lambda: len(gate) == 1, "the gate has heard of it")
    [found] = gate._connections.values()
    return found


def test_a_peer_that_the_gate_could_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The gate heard that the first one came when it had gone, and took the next one's requests for its.
    with opened(tmp_path) as (router, endpoints):
        gate = router.gate
        monkeypatch.setattr(gate, "_hear", lambda: False)
        with RawPeer(endpoints[0], FORBIDDEN) as first:
            first.send(b"?")
            refuse(router)
            [descriptor] = gate._unheard
        wait_until_closed(descriptor)
        with monkeypatch.context() as patch:
            patch.setattr(gate, "_drop", lambda descriptor: None)
            monkeypatch.delattr(gate, "_hear")
            found = only_connection(gate)
        assert (found.descriptor, found.own) == (descriptor, None)
        monkeypatch.setattr(gate, "_hear", lambda: False)
        with peer_on(descriptor, endpoints[0]) as second:
            for number in (1, 2):
                ask(second, number)
                take(router, number)


@pytest.mark.parametrize("is_forbidden", [True, False])
def test_a_peer_that_inherits_what_the_gate_knows(tmp_path: Path, *, is_forbidden: bool) -> None:
    # The request was taken when its peer had gone, so the gate kept its end for who came next.
    with opened(tmp_path) as (router, endpoints):
        gate = router.gate
        with RawPeer(endpoints[0], FORBIDDEN if is_forbidden else None) as first:
            found = only_connection(gate)
            ask(first, 0)
        assert eventually(lambda: len(gate) == 0 and found.own is None, "the gate has heard of its end")
        if is_forbidden:
            refuse(router)
        else:
            take(router, 0)
            gate.end(gate._unheard[found.descriptor], "test", "it broke a rule")
        with peer_on(found.descriptor, endpoints[0]) as second:
            assert only_connection(gate).descriptor == found.descriptor
            ask(second, 1)
            take(router, 1)
            time.sleep(1.3)
            ask(second, 2)
            take(router, 2)
        assert not gate.endings.ended


def test_a_peer_that_has_sent_nothing_yet(tmp_path: Path) -> None:
    with opened(tmp_path) as (router, endpoints):
        gate = router.gate
        with RawPeer(endpoints[0]) as first:
            found = only_connection(gate)
            ask(first, 0)
        assert eventually(lambda: len(gate) == 0 and found.own is None, "the gate has heard of its end")
        with peer_on(found.descriptor, endpoints[0]) as second:
            heard = only_connection(gate)
            assert heard.descriptor == found.descriptor
            take(router, 0)  # the first one's, and the second one has its descriptor
            gate.end(heard, "test", "it broke a rule")
            ask(second, 1)
            take(router, 1)
            time.sleep(0.4)
            ask(second, 2)
            take(router, 2)
        assert not gate.endings.ended


def test_a_peer_under_an_id_of_the_nodes_is_ended(tmp_path: Path) -> None:
    with opened(tmp_path) as (router, endpoints), RawPeer(endpoints[0], FORBIDDEN) as peer:
        number = 0
        while not router.gate.endings.ended["routing id"]:
            number += 1
            assert number < 100, "it goes on for 5 s"
            ask(peer, number)
            refuse(router)
            time.sleep(0.05)
        assert eventually(peer.is_ended, "the peer sees it")


def test_a_first_request_while_the_gate_opens_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The gate then knew two connections, one without a request, which it ended after first_request_timeout_ms.
    opens = PeerConnection.open

    def slowly(self: PeerConnection) -> int:
        time.sleep(0.2)
        return opens(self)

    monkeypatch.setattr(PeerConnection, "open", slowly)
    with opened(tmp_path) as (router, endpoints), RawPeer(endpoints[0]) as peer:
        ask(peer, 1)
        take(router, 1)
        found = only_connection(router.gate)
        assert found.identity is not None
        assert router.gate.peers == {found.identity: found}
        assert found.handled
        assert not router.gate._unheard


def test_a_first_request_that_is_faster_than_its_connection_has_an_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under load the audit log had lines without a user: the gate had not heard of the connection yet.
    with opened(tmp_path) as (router, endpoints):
        monkeypatch.setattr(router.gate, "_hear", lambda: False)
        with RawPeer(endpoints[0]) as peer:
            ask(peer, 1)
            assert router.poll(2_000)
            identity, _ = router.recv_multipart(zmq.NOBLOCK)
            assert router.gate.peer(b"another") is None
            hears = threading.Timer(0.02, monkeypatch.delattr, (router.gate, "_hear"))
            hears.start()
            try:
                assert router.actor(identity, {}).name == f"uid {os.getuid()}"
            finally:
                hears.join()
