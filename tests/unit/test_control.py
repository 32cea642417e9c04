"""Goal: positions shared between processes are never half seen, never overlap, and never come from another layout.

Method: every named word is written with a value of its own and read back through a second mapping; a second process
stores values whose halves give a torn read away while this one reads; files that are no control block are refused.
"""

from __future__ import annotations

import multiprocessing
import struct
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from commitmq.control import (
    DISPATCHER_SLOTS,
    MAGIC,
    PAGE_BYTES,
    ROLE_SLOTS,
    WORKER_SLOTS,
    ControlBlock,
    DispatcherWord,
    Word,
    WorkerState,
    WorkerWord,
    role_slot,
)
from commitmq.errors import StoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control"


@pytest.fixture
def block(path: Path) -> Iterator[ControlBlock]:
    made = ControlBlock(path, create=True)
    yield made
    made.close()


def test_a_new_block_is_one_page_of_zeros_behind_its_magic(block: ControlBlock, path: Path) -> None:
    data = path.read_bytes()
    assert len(data) == PAGE_BYTES
    assert struct.unpack_from("=q", data) == (MAGIC,)
    assert not any(data[8:])


def test_every_named_word_has_a_place_of_its_own(block: ControlBlock, path: Path) -> None:
    expected: dict[tuple[str, int, int], int] = {}
    value = 1 << 40
    for word in Word:
        if word is not Word.MAGIC:
            block.put(word, value := value + 1)
            expected["node", 0, word] = value
    for slot in range(DISPATCHER_SLOTS):
        for dispatcher_word in DispatcherWord:
            block.put_dispatcher(slot, dispatcher_word, value := value + 1)
            expected["dispatcher", slot, dispatcher_word] = value
    for slot in range(WORKER_SLOTS):
        for worker_word in WorkerWord:
            block.put_worker(slot, worker_word, value := value + 1)
            expected["worker", slot, worker_word] = value

    other = ControlBlock(path)  # also proves that nothing above touched the magic
    for (kind, slot, number), wanted in expected.items():
        if kind == "node":
            got = other.get(number)
        elif kind == "dispatcher":
            got = other.dispatcher(slot, number)
        else:
            got = other.worker(slot, number)
        assert got == wanted, (kind, slot, number)
    other.close()


@pytest.mark.parametrize("value", [0, -1, 1, (1 << 63) - 1, -(1 << 63), 0x0102030405060708])
def test_a_word_holds_any_signed_8_byte_value(block: ControlBlock, path: Path, value: int) -> None:
    block.put(Word.WRITTEN, value)
    other = ControlBlock(path)
    assert other.get(Word.WRITTEN) == value
    other.close()


def test_slots_behind_the_last_are_refused_and_change_nothing(block: ControlBlock, path: Path) -> None:
    with pytest.raises(IndexError):
        block.put_worker(WORKER_SLOTS * 2, WorkerWord.PID, 1)
    assert not any(path.read_bytes()[8:])


def test_a_value_wider_than_8_bytes_is_refused(block: ControlBlock) -> None:
    with pytest.raises(ValueError, match="format"):
        block.put(Word.WRITTEN, 1 << 63)
    assert block.get(Word.WRITTEN) == 0


def test_visible_is_what_was_flushed_or_what_was_written(block: ControlBlock) -> None:
    block.put(Word.WRITTEN, 300)
    block.put(Word.FLUSHED, 200)
    assert block.visible(sync_flush=True) == 200
    assert block.visible(sync_flush=False) == 300


def test_with_a_pool_only_what_is_committed_is_visible(block: ControlBlock) -> None:
    block.put(Word.WRITTEN, 300)
    block.put(Word.COMMITTED, 250)
    block.put(Word.FLUSHED, 200)
    assert block.committed() == 300, "without a pool the word means nothing"
    block.put(Word.POOL_BUFFERS, 5)
    assert block.committed() == 250
    assert (block.visible(sync_flush=False), block.visible(sync_flush=True)) == (250, 200)


def test_creating_anew_forgets_what_was_there(block: ControlBlock, path: Path) -> None:
    block.put(Word.WRITTEN, 300)
    again = ControlBlock(path, create=True)
    assert again.get(Word.WRITTEN) == 0
    assert again.get(Word.MAGIC) == MAGIC
    again.close()


def test_without_a_file_the_error_says_that_no_node_runs(path: Path) -> None:
    with pytest.raises(StoreError, match="not running") as caught:
        ControlBlock(path)
    assert caught.value.path == path
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 8, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_a_file_of_another_size_is_refused(path: Path, size: int) -> None:
    path.write_bytes(struct.pack("=q", MAGIC).ljust(size, b"\0")[:size])
    with pytest.raises(StoreError, match="8192"):
        ControlBlock(path)


def test_a_page_of_another_version_is_refused(path: Path) -> None:
    path.write_bytes(struct.pack("=q", MAGIC + 1).ljust(PAGE_BYTES, b"\0"))
    with pytest.raises(StoreError, match="another version"):
        ControlBlock(path)


def test_roles_have_slots_of_their_own_within_the_block() -> None:
    slots = [role_slot(role) for role in ROLE_SLOTS if not role.startswith("reader-")]
    slots += [role_slot(f"reader-{number}") for number in range(16)]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < WORKER_SLOTS for slot in slots)


def test_worker_states_are_in_the_order_of_a_life() -> None:
    states = [WorkerState.ABSENT, WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.STOPPED]
    assert states == sorted(states) == list(WorkerState)


def store_alternately(path: Path, values: tuple[int, int], stop: Event) -> None:
    block = ControlBlock(path)
    first, second = values
    while not stop.is_set():
        for _ in range(2000):
            block.put(Word.WRITTEN, first)
            block.put(Word.WRITTEN, second)
    block.close()


def test_a_reader_in_another_process_never_sees_half_a_value(block: ControlBlock, path: Path) -> None:
    # Values whose bytes all differ: a store made of smaller pieces, or one that zeroes first, shows a third value.
    values = (0x1111111111111111, 0x2222222222222222)
    block.put(Word.WRITTEN, values[0])
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=store_alternately, args=(path, values, stop))
    process.start()
    try:
        seen: set[int] = set()
        deadline = time.monotonic() + 30
        while seen != set(values) and time.monotonic() < deadline:
            seen.add(block.get(Word.WRITTEN))  # the writer is up once both were seen
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            seen.update(block.get(Word.WRITTEN) for _ in range(1000))
    finally:
        stop.set()
        process.join(30)
    assert process.exitcode == 0
    assert seen == set(values)
