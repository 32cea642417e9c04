"""Goal: a channel tells "not sent" from "no answer", and what it gave up is never sent later.

Method: a real ROUTER in this process, bound late, closed early, or silent.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import zmq

from commitmq import NodeUnavailableError, ProtocolError
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel, ConnectionLost


class Server:
    """A ROUTER that the test drives by hand."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}"
        self.context = zmq.Context(io_threads=1)
        self.router: zmq.Socket[bytes] | None = None

    def bind(self) -> None:
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.RCVTIMEO, 3000)
        self.router.bind(self.endpoint)

    def unbind(self) -> None:
        """Close, and wait until nobody can connect any more: ZeroMQ closes in its own time."""
        if self.router is not None:
            self.router.close(0)
            self.router = None
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(self.endpoint.removeprefix("ipc://"))
                except OSError:
                    return
            time.sleep(0.01)

    def next(self) -> tuple[bytes, dict[str, object]]:
        assert self.router is not None
        identity, header = self.router.recv_multipart()[:2]
        return identity, orjson.loads(header)

    def nothing_more(self, wait_ms: int = 300) -> bool:
        assert self.router is not None
        return not self.router.poll(wait_ms)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "s")
    made.bind()
    yield made
    made.unbind()
    made.context.term()


@pytest.fixture
def channel(server: Server) -> Iterator[Channel]:
    made = Channel(server.endpoint)
    yield made
    made.close()


def soon(seconds: float = 2.0) -> float:
    return time.monotonic() + seconds


def test_answers_to_earlier_requests_are_dropped(server: Server, channel: Channel) -> None:
    channel.put([wire.pack({"op": "slow", "id": channel.next_id()})], soon())
    channel.put([wire.pack({"op": "fast", "id": 99})], soon())
    identity, _ = server.next()
    assert server.router is not None
    server.router.send_multipart([identity, wire.ok(1, n=1), b"payload of the old one"])
    server.next()
    server.router.send_multipart([identity, wire.ok(99), b"late"])
    server.router.send_multipart([identity, wire.ok(2, n=2), b"payload"])
    answer, frames = channel.request("next", timeout_s=2)
    assert answer["n"] == 2
    assert [frame.bytes for frame in frames] == [b"payload"]


def test_a_refusal_is_raised(server: Server, channel: Channel) -> None:
    channel.put([b"x"], soon())
    assert server.router is not None
    identity = server.router.recv_multipart()[0]
    server.router.send_multipart([identity, wire.error(None, "BAD_HEADER", "no JSON")])
    with pytest.raises(ProtocolError, match="BAD_HEADER: no JSON"):
        channel.request("x", timeout_s=2)


def test_without_a_peer_nothing_is_sent_then_or_later(server: Server) -> None:
    server.unbind()
    started = time.monotonic()
    with contextlib.closing(Channel(server.endpoint)) as channel, pytest.raises(NodeUnavailableError) as caught:
        channel.request("x", timeout_s=0.2)
    assert not isinstance(caught.value, ConnectionLost)
    # It may also end early: the system can accept the connection just before the socket is gone.
    assert time.monotonic() - started < 1
    server.bind()
    assert server.nothing_more()


def test_a_request_does_not_wait_forever_where_nobody_is_any_more(server: Server) -> None:
    """A node that was started again may be elsewhere: who asks has to look, long before the request's own time is over."""
    server.unbind()
    started = time.monotonic()
    with contextlib.closing(Channel(server.endpoint, 0.2)) as channel, pytest.raises(NodeUnavailableError) as caught:
        channel.request("x", timeout_s=20)
    assert not isinstance(caught.value, ConnectionLost)
    assert time.monotonic() - started < 10
    server.bind()
    with contextlib.closing(Channel(server.endpoint, 0.2)) as channel:
        channel.put([wire.pack({"op": "x", "id": 1})], soon())
        time.sleep(0.3)
        assert not channel.lost()
        with pytest.raises(ConnectionLost, match="no answer"):  # the connection stood: this is the peer's time
            channel.request("x", timeout_s=0.2)


def test_a_silent_peer_means_unknown(server: Server, channel: Channel) -> None:
    channel.put([wire.pack({"op": "x", "id": 0})], soon())  # connected, so that the time below is the peer's alone
    server.next()
    with pytest.raises(ConnectionLost, match="no answer"):
        channel.request("x", timeout_s=0.2)


def test_a_peer_that_goes_away_is_noticed_long_before_the_time_is_over(server: Server, channel: Channel) -> None:
    channel.put([wire.pack({"op": "x", "id": 1})], soon())
    server.next()
    server.unbind()
    started = time.monotonic()
    with pytest.raises(ConnectionLost, match="ended"):
        channel.wait(soon(10))
    assert time.monotonic() - started < 1
    assert channel.lost()


def test_a_loss_while_idle_is_seen_before_the_next_request(server: Server, channel: Channel) -> None:
    channel.put([wire.pack({"op": "x", "id": 1})], soon())
    server.next()
    assert not channel.lost_while_idle()
    server.unbind()
    server.bind()
    time.sleep(0.3)  # long enough for ZeroMQ to have connected again by itself
    assert channel.lost_while_idle()


def test_what_a_closed_channel_held_is_not_sent_later(server: Server, channel: Channel) -> None:
    channel.put([wire.pack({"op": "x", "id": 1})], soon())
    server.next()
    server.unbind()
    deadline = soon()
    while not channel.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    # Mostly refused. Taken when the system still accepts connections for the socket that goes: then it is held here.
    with contextlib.suppress(NodeUnavailableError):
        channel.put([wire.pack({"op": "must not come", "id": 2})], soon(0.1))
    channel.close()
    server.bind()
    assert server.nothing_more()
