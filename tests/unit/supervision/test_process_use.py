"""Goal: the CPU and the memory of a process mean what they say. Method: this process, and a child that has ended."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

from commitmq.supervision import processes

MIB = 1 << 20


def test_memory_counts_private_pages_and_leaves_out_the_files_of_the_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "segment").write_bytes(b"x" * 32 * MIB)
    (tmp_path / "store2").write_bytes(b"x" * 8 * MIB)
    before = processes.memory_bytes(os.getpid(), store)
    assert before is not None
    # A mapping of its own: the allocator could serve a bytearray from memory that the process kept all along.
    private = mmap.mmap(-1, 16 * MIB)
    for _ in range(16):  # in pieces: a client in this process may have told the allocator to keep what is freed
        private.write(b"x" * MIB)
    with open(store / "segment", "rb") as inside, open(tmp_path / "store2", "rb") as outside:
        mapped = mmap.mmap(inside.fileno(), 0, prot=mmap.PROT_READ)
        beside = mmap.mmap(outside.fileno(), 0, prot=mmap.PROT_READ)
        assert sum(mapped[::4096]) + sum(beside[::4096]) > 0  # touch every page
        after = processes.memory_bytes(os.getpid(), store)
        mapped.close()
        beside.close()
    assert after is not None
    assert 22 * MIB <= after - before <= 30 * MIB, "16 of private memory and 8 of another file, not the 32 of the store"
    private.close()
    assert processes.memory_bytes(2**22 + 1, store) is None


def test_memory_of_a_process_that_has_ended_is_unknown_though_nobody_has_waited_for_it(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert processes.memory_bytes(ended.pid, tmp_path) is None
    ended.wait()


def test_cpu_use_is_measured_between_two_samples_of_one_process() -> None:
    meter = processes.CpuMeter()
    meter.sample(os.getpid(), 1_000)
    assert meter.percent == 0.0
    used = processes.cpu_seconds(os.getpid())
    assert used is not None
    while (processes.cpu_seconds(os.getpid()) or 0) < used + 0.2:
        sum(range(1000))
    meter.sample(os.getpid(), 2_000)  # as if a second had passed
    assert 19 <= meter.percent <= 40
    meter.sample(os.getppid(), 3_000)
    assert meter.percent == 0.0, "another process starts from zero"
    meter.sample(0, 4_000)
    assert (meter.pid, meter.percent) == (0, 0.0)
