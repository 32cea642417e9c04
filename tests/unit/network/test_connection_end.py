"""Goal: the gate shuts down the connection that it means, and no other that has got its descriptor's number since.

Method: pairs of Unix sockets in place of what libzmq has accepted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from commitmq.network.connection import Connection


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
    connection = Connection(pair[0].fileno())
    connection.end()
    assert connection.ended
    assert is_open(*pair)


def test_what_was_opened_is_shut_down_and_its_number_is_nobodys(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    connection = Connection(ours.fileno())
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
    Connection(number).refuse()
    assert pair[1].recv(1) == b""
    os.fstat(number)  # it stays libzmq's to close
