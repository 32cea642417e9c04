"""Goal: whatever the device refuses while a segment is made, no file of the log is ever replaced, and nothing is published
before its name is durable.

Method: the allocator over a real folder and control block; each call that makes a segment fails in turn, on both sides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DiskFlag, Word
from commitmq.format.file_names import segment_name
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.workers.allocate import SegmentAllocator

SMALL = 1 << 16


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlBlock]:
    block = ControlBlock(tmp_path / "block", create=True)
    yield block
    block.close()


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def armed(text: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(text))
        monkeypatch.setattr(failpoints, "ACTIVE", True)

    return armed


def context_of(tmp_path: Path, control: ControlBlock) -> Any:
    layout = StoreLayout(tmp_path / "store")
    layout.run.mkdir(parents=True, exist_ok=True)
    config = NodeConfig()
    log_config = SimpleNamespace(segment_bytes=SMALL, preallocate_segments=1)
    disk = SimpleNamespace(check_interval_ms=0, warning_ratio=1.0)
    return SimpleNamespace(
        control=control,
        layout=layout,
        config=SimpleNamespace(commit_log=log_config, disk=disk, memory=config.memory),
        log=get_log("allocate"),
        ringer=lambda _role: SimpleNamespace(ring=lambda **_: None),
        on_settings=lambda _take: None,
        tell=lambda **_: None,
    )


def segments(context: Any) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in sorted(context.layout.commit_log.iterdir())}


CALLS = ("open", "reserve", "sync", "rename", "sync_folder")


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call_is_tried_again_and_replaces_nothing(
    tmp_path: Path, control: ControlBlock, arm: Callable[[str], None], call: str, side: str
) -> None:
    context = context_of(tmp_path, control)
    allocator = SegmentAllocator(context)
    allocator.work()
    assert control.get(Word.ALLOCATED) == SMALL
    arm(f"disk.{call}.segment:{side}=errno:EIO@1")
    allocator.work()
    assert control.get(Word.ALLOCATED) == SMALL, "nothing is published that was refused"
    assert control.get(Word.DISK_FLAGS) & DiskFlag.NO_SEGMENT
    before = segments(context)
    second = context.layout.commit_log / segment_name(SMALL)
    if second.exists():
        second.write_bytes(b"a record".ljust(SMALL, b"\0"))  # what a writer that did not wait would have appended
    allocator.work()
    assert control.get(Word.ALLOCATED) == 2 * SMALL
    assert not control.get(Word.DISK_FLAGS) & DiskFlag.NO_SEGMENT
    after = segments(context)
    assert before.items() <= after.items(), "a segment was replaced"
    assert second.read_bytes()[:8] == (b"a record" if second.name in before else bytes(8))
    assert second.stat().st_size == SMALL


def test_what_a_dead_one_left_is_published_once_its_name_is_durable(
    tmp_path: Path, control: ControlBlock, arm: Callable[[str], None]
) -> None:
    context = context_of(tmp_path, control)
    context.layout.commit_log.mkdir()
    (context.layout.commit_log / segment_name(0)).write_bytes(bytes(SMALL))
    arm("disk.sync_folder.segment:before=errno:EIO@1")
    allocator = SegmentAllocator(context)
    allocator.work()
    assert control.get(Word.ALLOCATED) == 0, "a power cut may still take the name away"
    assert control.get(Word.DISK_FLAGS) & DiskFlag.NO_SEGMENT
    before = segments(context)
    allocator.work()
    assert control.get(Word.ALLOCATED) == 2 * SMALL
    assert before.items() <= segments(context).items()


def test_an_empty_file_of_another_version_is_made_anew(tmp_path: Path, control: ControlBlock) -> None:
    context = context_of(tmp_path, control)
    context.layout.commit_log.mkdir()
    (context.layout.commit_log / segment_name(0)).write_bytes(b"")
    SegmentAllocator(context).work()
    assert control.get(Word.ALLOCATED) == SMALL
    assert (context.layout.commit_log / segment_name(0)).stat().st_size == SMALL


def test_a_stop_that_may_not_delete_says_so_and_goes_on(
    tmp_path: Path, control: ControlBlock, arm: Callable[[str], None]
) -> None:
    context = context_of(tmp_path, control)
    allocator = SegmentAllocator(context)
    for _ in range(2):
        allocator.work()
    arm("disk.unlink.segment:before=errno:EROFS")
    allocator.remove_unused()
    assert control.get(Word.ALLOCATED) == 2 * SMALL
    arm("other=exit")
    allocator.remove_unused()
    assert control.get(Word.ALLOCATED) == 0
    assert os.listdir(context.layout.commit_log) == []


@pytest.mark.parametrize("written", [0, 10], ids=["nothing is written", "one segment is in use"])
def test_a_stop_leaves_no_segment_behind_a_hole(
    tmp_path: Path, control: ControlBlock, arm: Callable[[str], None], written: int
) -> None:
    """The third was renamed, and the call failed: it is there, and nobody was told."""
    context = context_of(tmp_path, control)
    context.config.commit_log.preallocate_segments = 2
    allocator = SegmentAllocator(context)
    for _ in range(2):
        allocator.work()
    arm("disk.rename.segment:after=errno:ENOSPC")
    allocator.work()
    assert control.get(Word.ALLOCATED) == 2 * SMALL
    assert len(segments(context)) == 3
    control.put(Word.WRITTEN, written)
    allocator.remove_unused()
    assert list(segments(context)) == [segment_name(0)] * bool(written)
