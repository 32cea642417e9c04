"""Goal: a request with a long header waits for short ones, and the order of one peer's requests stays.

Method: the line with a clock that the test moves; then a real ROUTER with peers over plain sockets.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import zmq

from commitmq.config import NetworkConfig
from commitmq.log import get_log
from commitmq.network import router as router_module
from commitmq.network.connection import PeerConnection
from commitmq.network.router import LONG_HEADER_BYTES, REST, LongRequests, Router, open_router
from commitmq.protocol import wire
from nodes import eventually
from zmtp import RawPeer, frame

_LONG = b"x" * (LONG_HEADER_BYTES + 1)
_MS = 1_000_000


class _Line(LongRequests):
    """With a clock in nanoseconds, and peers that are named by a letter."""

    __slots__ = ("now_ns", "owners")

    def __init__(self) -> None:
        super().__init__(lambda: self.now_ns)
        self.now_ns = _MS
        self.owners: dict[bytes, PeerConnection] = {}

    def put(self, peer: bytes, header: bytes, number: int = 0) -> None:
        owner = self.owners.setdefault(peer, PeerConnection(-1))
        self.add([peer, header, b"%d" % number], len(header) + len(peer) + 1, owner)

    def handle(self, cost_ms: int) -> bytes | None:
        """The peer of the next request, which took ``cost_ms``."""
        request = self.take()
        self.now_ns += cost_ms * _MS
        self.settle()
        return None if request is None else bytes(request[0])


def test_the_first_is_taken_at_once_and_the_next_after_a_rest() -> None:
    line = _Line()
    line.put(b"a", _LONG)
    line.put(b"b", _LONG)
    assert line.wait_ms() == 0
    assert line.handle(4) == b"a"
    assert line.take() is None
    assert line.wait_ms() == REST * 4
    line.now_ns += (REST * 4 - 1) * _MS
    assert line.take() is None
    line.now_ns += _MS
    assert line.handle(4) == b"b"
    assert line.waiting == line.total_bytes == 0


def test_an_idle_time_is_no_cost() -> None:
    line = _Line()
    line.put(b"a", _LONG)
    assert line.handle(1) == b"a"
    line.now_ns += 10_000 * _MS
    line.put(b"a", _LONG)
    assert line.handle(1) == b"a"


def test_peers_take_turns() -> None:
    line = _Line()
    for _ in range(3):
        line.put(b"a", _LONG)
    line.put(b"b", _LONG)
    taken = []
    for _ in range(4):
        taken.append(line.handle(1))
        line.now_ns += REST * _MS
    assert taken == [b"a", b"b", b"a", b"a"]


def test_later_requests_of_a_peer_stay_behind_its_long_one() -> None:
    line = _Line()
    for number, header in enumerate([_LONG, b"s", b"s", _LONG, b"s"]):
        line.put(b"a", header, number)
    assert line.holds(b"a")
    assert not line.holds(b"b")
    numbers = []
    while line.waiting:
        if (request := line.take()) is None:
            line.now_ns += _MS
        else:
            numbers.append(int(request[2]))
    assert numbers == [0, 1, 2, 3, 4]
    assert not line.holds(b"a")


def test_the_worst_peer_is_dropped_and_a_long_rest_has_an_end() -> None:
    line = _Line()
    line.put(b"a", _LONG)
    for _ in range(2):
        line.put(b"b", _LONG)
    owner, _ = line.drop_worst()
    assert owner is line.owners[b"b"]
    assert line.waiting == 1
    assert line.handle(10_000) == b"a"
    line.put(b"a", _LONG)
    assert line.wait_ms() == 200
    line.stop_resting()
    assert line.handle(1) == b"a"
    assert line.total_bytes == 0


# ------------------------------------------------------------ a real ROUTER


@pytest.fixture(name="opened")
def _opened(tmp_path: Path) -> object:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, endpoints = open_router(context, NetworkConfig(), get_log("test"), f"ipc://{tmp_path}/r.ipc", 0)
    yield router, endpoints
    router.close()
    context.destroy(linger=0)


def _received(router: Router) -> int | None:
    try:
        return int(wire.parse_request(router.recv_multipart(zmq.NOBLOCK)[1])["id"])
    except zmq.Again:
        return None


def _waits(router: Router, number: int) -> bool:
    """Receive until ``number`` requests wait in the line."""
    assert _received(router) is None
    return router.line.waiting == number


def _make_rest(router: Router) -> None:
    """As if the long request taken last had been very dear."""
    router.line.settle()
    router.line._due_ns = 1 << 62


def _long(number: int) -> bytes:
    return wire.pack({"op": "x", "id": number, "more": "y" * LONG_HEADER_BYTES})


def test_a_short_request_does_not_wait_for_long_ones(opened: tuple[Router, list[str]]) -> None:
    router, endpoints = opened
    with RawPeer(endpoints[0]) as hostile, RawPeer(endpoints[1]) as ordinary:
        hostile.send(_long(1))
        assert eventually(lambda: _received(router) == 1, "the first is taken")
        _make_rest(router)
        for number in range(2, 12):
            hostile.send(_long(number))
        assert eventually(lambda: _waits(router, 10), "the others wait")
        ordinary.send(wire.pack({"op": "x", "id": 100}))
        assert eventually(lambda: _received(router) == 100, "the short one is taken")
        router.line.stop_resting()
        assert [_received(router) for _ in range(10)] == list(range(2, 12))


def test_the_bytes_of_the_line_are_bounded(opened: tuple[Router, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    router, endpoints = opened
    monkeypatch.setattr(router_module, "MAX_BYTES", 1_000_000)
    with RawPeer(endpoints[0]) as hostile, RawPeer(endpoints[0]) as ordinary:
        ordinary.send(_long(1))
        assert eventually(lambda: _received(router) == 1, "the first is taken")
        _make_rest(router)
        ordinary.send(_long(2))
        assert eventually(lambda: _waits(router, 1), "the second waits")
        hostile.flood(frame(_long(3)), 10_000_000)

        def ended() -> bool:
            _received(router)
            assert router.line.total_bytes <= 1_000_000
            return hostile.is_ended()

        assert eventually(ended, "the connection that holds the most is ended")
        assert not ordinary.is_ended()


def test_a_header_that_names_no_operation_is_refused_unread(opened: tuple[Router, list[str]]) -> None:
    router, endpoints = opened
    with RawPeer(endpoints[0]) as hostile, RawPeer(endpoints[0]) as ordinary:
        hostile.send(wire.pack({"op": "x" * LONG_HEADER_BYTES, "id": 1}))
        hostile.socket.setblocking(False)
        answer = bytearray()

        def answered() -> bool:
            assert _received(router) is None
            with contextlib.suppress(BlockingIOError):
                answer.extend(hostile.socket.recv(4_096))
            return len(answer) > 2

        assert eventually(answered, "the refusal comes before the end")
        assert wire.parse_answer(bytes(answer[2:]))["code"] == "UNKNOWN_OP"
        assert eventually(hostile.is_ended, "the connection is ended")
        assert router.line.waiting == 0
        ordinary.send(_long(2))
        assert eventually(lambda: _received(router) == 2, "a long header of another connection is handled")
        assert not ordinary.is_ended()


def test_requests_after_the_one_that_ends_a_connection_are_dropped_and_end_it_at_once(
    opened: tuple[Router, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commitmq.network.connection._ANSWER_S", 60.0)
    router, endpoints = opened
    with RawPeer(endpoints[0]) as hostile:
        hostile.send(wire.pack({"op": "x" * LONG_HEADER_BYTES, "id": 1}))
        assert eventually(lambda: _received(router) is None and len(router.gate.endings) == 1, "its end is asked for")
        hostile.send(wire.pack({"op": "x", "id": 2}))

        def ended() -> bool:
            assert _received(router) is None
            return hostile.is_ended()

        assert eventually(ended, "the connection is ended at once")


def test_waiting_requests_of_a_connection_that_ends_are_forgotten(opened: tuple[Router, list[str]]) -> None:
    router, endpoints = opened
    with RawPeer(endpoints[0]) as hostile:
        hostile.send(_long(1))
        assert eventually(lambda: _received(router) == 1, "the first is taken")
        _make_rest(router)
        hostile.send(_long(2))
        assert eventually(lambda: _waits(router, 1), "the second waits")
        hostile.send(wire.pack({"op": "x" * LONG_HEADER_BYTES, "id": 3}))
        router.line.stop_resting()

        def ended() -> bool:
            # Its second request may be taken before the third one has come.
            assert _received(router) in (None, 2)
            return hostile.is_ended()

        assert eventually(ended, "the connection is ended")
        assert router.line.waiting == 0


def test_a_long_request_is_not_copied_while_it_waits(opened: tuple[Router, list[str]]) -> None:
    router, endpoints = opened
    with RawPeer(endpoints[0]) as peer:
        peer.send(_long(1))
        assert eventually(lambda: _received(router) == 1, "the first is taken")
        _make_rest(router)
        peer.send(_long(2))
        assert eventually(lambda: _waits(router, 1), "the second waits")
        (waiting,) = router.line._peers.values()
        assert isinstance(waiting.requests[0][0][1], zmq.Frame)
        router.line.stop_resting()
        frames = router.recv_multipart(zmq.NOBLOCK)
        assert [type(one) for one in frames] == [bytes, bytes]
        assert frames[1] == _long(2)
