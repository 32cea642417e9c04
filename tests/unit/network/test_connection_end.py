"""Goal: the gate shuts down the connection that it means, and no other that has got its descriptor's number since; and it
counts what came once.

Method: pairs of Unix sockets in place of what libzmq has accepted; and one that answers as the kernel does when a reader's two
steps have the gate's between them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from commitmq.network.connection import PeerConnection


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    yield ours, theirs
    ours.close()
    theirs.close()


def is_open(ours: socket.socket, theirs: socket.socket) -> bool:
    try:
        ours.send(b"x")
    except BrokenPipeError:
        return False
    return theirs.recv(1) == b"x"


def test_what_was_never_opened_is_not_shut_down(pair: tuple[socket.socket, socket.socket]) -> None:
    connection = PeerConnection(pair[0].fileno())
    connection.end()
    assert connection.ended
    assert is_open(*pair)


def test_what_was_opened_is_shut_down_and_its_number_is_nobodys(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    connection = PeerConnection(ours.fileno())
    connection.open()
    other, peer = socket.socketpair()
    with other, peer:
        os.dup2(other.fileno(), connection.descriptor)
        connection.end()
        assert theirs.recv(1) == b""
        assert is_open(other, peer)
    connection.close()


def test_without_a_descriptor_it_is_refused_over_libzmqs(pair: tuple[socket.socket, socket.socket]) -> None:
    number = pair[0].fileno()
    PeerConnection(number).refuse()
    assert pair[1].recv(1) == b""
    os.fstat(number)  # it stays libzmq's to close


def test_a_number_that_belongs_to_a_file_by_now_costs_no_descriptor() -> None:
    """A client may connect and leave before its arrival is handled, and the process open a file meanwhile."""
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match="socket"):
            PeerConnection(writing).open()
    finally:
        os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"", "nobody else has its other end"


def test_what_comes_is_counted_once_while_it_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    """An offset that is set while somebody reads is lost now and then, and what was counted so far comes again."""
    ours, theirs = pair
    connection = PeerConnection(ours.fileno())
    connection.open()
    read, stop = [0], threading.Event()

    def send() -> None:
        data = bytes(1 << 20)
        with contextlib.suppress(OSError):
            while not stop.is_set():
                theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)

    def receive() -> None:
        room = bytearray(1 << 16)
        while count := ours.recv_into(room):
            read[0] += count

    threads = [threading.Thread(target=one) for one in (send, receive)]
    for one in threads:
        one.start()
    ends = time.monotonic() + 3
    while time.monotonic() < ends:
        time.sleep(0.0001)
        connection.look()
    stop.set()
    for one in threads:
        one.join()
    connection.look()
    assert read[0] > 1 << 29, "nothing to count"
    assert connection.received <= read[0]
    assert connection.received > 0.99 * read[0]
    connection.close()


class LateReader:
    """A socket whose reader is between its two steps when the offset is set; the second one comes ``after`` looks later."""

    def __init__(self, after: int) -> None:
        self.offset = (1 << 31) - 1
        self.after = after
        self.waiting: tuple[int, int] | None = None
        self.renewals = 0

    def read(self, count: int) -> None:
        self.offset -= count

    def getsockopt(self, _level: int, _option: int) -> int:
        if self.waiting is not None:
            offset, looks = self.waiting
            self.waiting = None if looks == 0 else (offset, looks - 1)
            if looks == 0:
                self.offset = offset
        return self.offset

    def setsockopt(self, _level: int, _option: int, value: int) -> None:
        self.renewals += 1
        if self.renewals == 1:
            self.waiting = (self.offset - 100, self.after)
        self.offset = value


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_reader_may_undo_a_renewal(after: int) -> None:
    connection = PeerConnection(-1)
    late = LateReader(after)
    connection._is_unix, connection._socket = True, late  # type: ignore[assignment]
    total = 0
    for _ in range(64):
        late.read(1 << 25)
        total += 1 << 25
        connection.look()
        assert connection.received <= total + 100
    assert late.renewals > 1
    # What was read between the reader's two steps and the next look may be lost, but not more.
    assert connection.received >= total - (2 << 25)
