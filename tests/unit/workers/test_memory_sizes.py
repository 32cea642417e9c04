"""Goal: the budget of memory topics fits the machine, or a sentence says what to change. Method: real and faked sizes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from commitmq.config import NodeConfig, load
from commitmq.errors import ConfigError, StoreError
from commitmq.store.memory_files import NodeWord, node_page
from commitmq.store.shared_memory import available_bytes
from commitmq.workers import memory
from commitmq.workers.memory import sizes, sizes_of_life

GIB = 1 << 30


def on_machine(monkeypatch: pytest.MonkeyPatch, *, available: int, file_system: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_blocks=file_system // 4096, f_frsize=4096))


def test_without_a_number_it_is_three_quarters_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, available=16 * GIB, file_system=32 * GIB)
    assert sizes(NodeConfig(), Path("/dev/shm/x")) == (12 * GIB, 16 << 20)


def test_a_small_file_system_limits_it_and_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has 64 MiB of /dev/shm unless told otherwise: few and small segments are better than none."""
    on_machine(monkeypatch, available=16 * GIB, file_system=64 << 20)
    budget, segment = sizes(NodeConfig(), Path("/dev/shm/x"))
    assert 50 << 20 < budget < 64 << 20
    assert segment % 4096 == 0
    assert 4 * segment <= budget
    on_machine(monkeypatch, available=16 * GIB, file_system=1 << 16)
    assert sizes(NodeConfig(), Path("/dev/shm/x")) == (1 << 20, 1 << 18)


def test_a_process_that_takes_over_keeps_the_sizes_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is stored is not available any more; that must cost nobody what was acknowledged."""
    config, folder = NodeConfig(), tmp_path / "memory"
    on_machine(monkeypatch, available=64 << 20, file_system=32 * GIB)
    first = sizes_of_life(config, folder, "a")
    assert first == sizes(config, folder)
    folder.mkdir(mode=0o700)
    page = node_page(folder, create=True)
    (folder / "owner").write_text('{"life": "a"}')
    assert sizes_of_life(config, folder, "a") == first, "its predecessor died before it said how large"
    page.put(NodeWord.BUDGET, first[0])
    page.put(NodeWord.SEGMENT_BYTES, first[1])
    on_machine(monkeypatch, available=16 << 20, file_system=32 * GIB)
    assert sizes_of_life(config, folder, "a") == first
    assert sizes_of_life(config, folder, "another") == sizes(config, folder) != first
    page.close()


def test_a_number_that_cannot_be_held_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, available=16 * GIB, file_system=64 << 20)
    config = load(overrides=["memory.budget_bytes=134217728"])
    with pytest.raises(StoreError, match=r"shm-size.*memory\.folder"):
        sizes(config, Path("/dev/shm/x"))
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"memory\.folder"):
        sizes(config, Path("/nowhere/at/all/x"))
    assert sizes(load(overrides=["memory.budget_bytes=67108864"]), Path("/tmp/x")) == (1 << 26, 1 << 24)


def test_sizes_that_do_not_fit_together_are_refused() -> None:
    for overrides in (["memory.budget_bytes=1048576"], ["memory.segment_bytes=300000"], ["memory.segment_bytes=4096"]):
        with pytest.raises(ConfigError, match=r"memory\.segment_bytes"):
            load(overrides=overrides)


def test_what_is_available_is_a_part_of_what_there_is() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() < total
