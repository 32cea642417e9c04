"""Goal: the figures of ``status`` mean what they say. Method: a control block of known words; this process."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from commitmq.control import ControlBlock, DiskFlag, DispatcherWord, Word
from commitmq.supervision import status

MIB = 1 << 20


@pytest.fixture
def control(tmp_path: Path) -> ControlBlock:
    block = ControlBlock(tmp_path / "control", create=True)
    for word, value in ((Word.WRITTEN, 900), (Word.FLUSHED, 700), (Word.REPUT, 600), (Word.ALLOCATED, 4096)):
        block.put(word, value)
    block.put_dispatcher(0, DispatcherWord.DISPATCHED, 450)
    return block


@pytest.mark.parametrize(
    ("role", "sync_flush", "expected"),
    [
        ("writer", True, (900, 0)),
        ("flush", True, (700, 200)),
        ("reput", True, (600, 100)),
        ("reput", False, (600, 300)),
        ("dispatcher-consume_queue", True, (450, 150)),
        ("allocate", True, (4096, 0)),
        ("coordinator", True, (None, None)),
        ("reader-0", True, (None, None)),
    ],
)
def test_positions_and_lags(
    control: ControlBlock, role: str, sync_flush: bool, expected: tuple[int | None, int | None]
) -> None:
    assert status.position_and_lag(role, control, sync_flush, 0 if "dispatcher" in role else -1) == expected


def test_a_lag_read_a_moment_too_late_is_not_negative(control: ControlBlock) -> None:
    control.put(Word.FLUSHED, 901)
    assert status.position_and_lag("flush", control, True) == (901, 0)


def test_words_and_flags_are_named(control: ControlBlock) -> None:
    control.put(Word.DISK_FLAGS, DiskFlag.DISK_FULL)
    words = status.positions(control)
    assert (words["written"], words["flushed"], words["dispatched"]) == (900, 700, 450)
    assert status.disk_flags(control) == ["DISK_FULL"]


def test_memory_counts_private_pages_and_leaves_out_the_files_of_the_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "segment").write_bytes(b"x" * 32 * MIB)
    (tmp_path / "store2").write_bytes(b"x" * 8 * MIB)
    before = status.memory_bytes(os.getpid(), store)
    assert before is not None
    # A mapping of its own: the allocator could serve a bytearray from memory that the process kept all along.
    private = mmap.mmap(-1, 16 * MIB)
    for _ in range(16):  # in pieces: a client in this process may have told the allocator to keep what is freed
        private.write(b"x" * MIB)
    with open(store / "segment", "rb") as inside, open(tmp_path / "store2", "rb") as outside:
        mapped = mmap.mmap(inside.fileno(), 0, prot=mmap.PROT_READ)
        beside = mmap.mmap(outside.fileno(), 0, prot=mmap.PROT_READ)
        assert sum(mapped[::4096]) + sum(beside[::4096]) > 0  # touch every page
        after = status.memory_bytes(os.getpid(), store)
        mapped.close()
        beside.close()
    assert after is not None
    assert 22 * MIB <= after - before <= 30 * MIB, "16 of private memory and 8 of another file, not the 32 of the store"
    private.close()
    assert status.memory_bytes(2**22 + 1, store) is None


def test_memory_of_a_process_that_has_ended_is_unknown_though_nobody_has_waited_for_it(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert status.memory_bytes(ended.pid, tmp_path) is None
    ended.wait()


def test_cpu_use_is_measured_between_two_samples_of_one_process() -> None:
    meter = status.CpuMeter()
    meter.sample(os.getpid(), 1_000)
    assert meter.percent == 0.0
    used = status.cpu_seconds(os.getpid())
    assert used is not None
    while (status.cpu_seconds(os.getpid()) or 0) < used + 0.2:
        sum(range(1000))
    meter.sample(os.getpid(), 2_000)  # as if a second had passed
    assert 19 <= meter.percent <= 40
    meter.sample(os.getppid(), 3_000)
    assert meter.percent == 0.0, "another process starts from zero"
    meter.sample(0, 4_000)
    assert (meter.pid, meter.percent) == (0, 0.0)
