"""Goal: a ring wakes a sleeping peer, costs nothing when it is awake, and never blocks or fails, whatever became of it.

Method: real sockets in a temporary folder; a peer is dead, gone, bound anew, or has a full queue of rings.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq.control import ControlBlock, WorkerWord
from commitmq.workers.runtime.doorbell import Doorbell, Ringer

SLOT = 7


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlBlock]:
    block = ControlBlock(tmp_path / "control", create=True)
    block.put_worker(SLOT, WorkerWord.ASLEEP, 1)
    yield block
    block.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "writer.bell"


@pytest.fixture
def bell(path: Path) -> Iterator[Doorbell]:
    doorbell = Doorbell(path)
    yield doorbell
    doorbell.close()


@pytest.fixture
def ringer(path: Path, control: ControlBlock) -> Iterator[Ringer]:
    made = Ringer(path, control, SLOT)
    yield made
    made.close()


def rang(bell: Doorbell, timeout_s: float = 0.0) -> bool:
    poller = select.poll()
    poller.register(bell, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def test_a_ring_wakes_a_sleeping_peer(bell: Doorbell, ringer: Ringer) -> None:
    assert not rang(bell)
    ringer.ring()
    assert rang(bell, 5)


def test_a_peer_that_is_awake_is_not_rung(bell: Doorbell, ringer: Ringer, control: ControlBlock) -> None:
    control.put_worker(SLOT, WorkerWord.ASLEEP, 0)
    ringer.ring()
    assert not rang(bell)
    control.put_worker(SLOT, WorkerWord.ASLEEP, 1)
    ringer.ring()
    assert rang(bell, 5)


def test_only_the_peers_own_slot_counts(bell: Doorbell, path: Path, control: ControlBlock) -> None:
    other = Ringer(path, control, SLOT + 1)
    other.ring()
    assert not rang(bell)
    other.close()


def test_clear_takes_every_ring(bell: Doorbell, ringer: Ringer) -> None:
    for _ in range(5):
        ringer.ring()
    bell.clear()
    assert not rang(bell)
    bell.clear()  # nothing to take is no error
    ringer.ring()
    assert rang(bell, 5)


def test_rings_of_several_processes_arrive(bell: Doorbell, path: Path, control: ControlBlock) -> None:
    ringers = [Ringer(path, control, SLOT) for _ in range(3)]
    for one in ringers:
        one.ring()
        assert rang(bell, 5)
        bell.clear()
        one.close()


def test_a_full_queue_of_rings_does_not_block_or_lose_the_wake_up(bell: Doorbell, ringer: Ringer) -> None:
    started = time.monotonic()
    for _ in range(5000):  # far more than the kernel queues for a datagram socket
        ringer.ring()
    assert time.monotonic() - started < 10
    assert rang(bell)
    bell.clear()
    assert not rang(bell)
    ringer.ring()
    assert rang(bell, 5)


def test_ringing_before_the_peer_exists_is_harmless(ringer: Ringer, path: Path) -> None:
    ringer.ring()
    bell = Doorbell(path)
    assert not rang(bell)
    ringer.ring()
    assert rang(bell, 5)
    bell.close()


def test_ringing_a_dead_peer_is_harmless_and_its_successor_is_reached(path: Path, ringer: Ringer) -> None:
    first = Doorbell(path)
    ringer.ring()
    assert rang(first, 5)
    first.close()  # as the kernel does for a killed process: the socket is gone, its file stays
    assert path.exists()
    ringer.ring()
    ringer.ring()

    second = Doorbell(path)
    # One ring may be spent on noticing that the old socket is gone; the contract allows to lose it.
    ringer.ring()
    ringer.ring()
    assert rang(second, 5)
    second.close()


def test_a_successor_that_binds_before_the_next_ring_is_reached(path: Path, ringer: Ringer) -> None:
    first = Doorbell(path)
    ringer.ring()
    first.close()
    second = Doorbell(path)
    ringer.ring()
    ringer.ring()
    assert rang(second, 5)
    second.close()


def test_the_file_may_be_removed_under_a_ringer(path: Path, ringer: Ringer) -> None:
    first = Doorbell(path)
    ringer.ring()
    first.close()
    os.unlink(path)
    ringer.ring()
    ringer.ring()
    second = Doorbell(path)
    ringer.ring()
    assert rang(second, 5)
    second.close()


def test_binding_replaces_whatever_a_predecessor_left(path: Path, control: ControlBlock) -> None:
    path.write_bytes(b"left over")
    bell = Doorbell(path)
    assert path.is_socket()
    ringer = Ringer(path, control, SLOT)
    ringer.ring()
    assert rang(bell, 5)
    ringer.close()
    bell.close()


def test_a_ring_carries_nothing(bell: Doorbell, ringer: Ringer) -> None:
    ringer.ring()
    received = socket.socket(fileno=os.dup(bell.fileno()))
    assert received.recv(16) == b""
    received.close()


def test_closing_leaves_no_descriptor(path: Path, control: ControlBlock) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bell, ringer = Doorbell(path), Ringer(path, control, SLOT)
    ringer.ring()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    ringer.close()
    bell.close()
    assert len(os.listdir("/proc/self/fd")) == before
