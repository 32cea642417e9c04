"""Goal: every call of commitmq.files.disk can be made to fail on either side, leaks nothing then, and never takes a name away.

Method: each call with each side failing, against real files; open descriptors are counted by the kernel.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.files import disk


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def arm(text: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(text))
        monkeypatch.setattr(failpoints, "ACTIVE", True)

    return arm


def descriptors() -> int:
    gc.collect()  # what earlier tests left open is closed when the garbage is collected, whenever that may be
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


class Calls:
    """A folder with a file, and every operation on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "file"
        self.file.write_bytes(b"content".ljust(8192, b"\0"))
        self.fd = os.open(self.file, os.O_RDWR)

    def call(self, operation: str) -> object:
        if operation == "open":
            return disk.open_file(self.file, os.O_RDONLY, "x")
        if operation == "map":
            return disk.map_file(self.fd, 8192, "x")
        return {
            "sync": lambda: disk.sync(self.fd, "x"),
            "sync_folder": lambda: disk.sync_folder(self.folder, "x"),
            "rename": lambda: disk.rename(self.file, self.folder / "other", "x"),
            "replace": lambda: disk.replace(self.file, self.folder / "other", "x"),
            "unlink": lambda: disk.unlink(self.file, "x"),
            "reserve": lambda: disk.reserve(self.fd, 0, 8192, "x"),
            "resize": lambda: disk.resize(self.fd, 4096, "x"),
        }[operation]()


OPERATIONS = ("open", "map", "sync", "sync_folder", "rename", "replace", "unlink", "reserve", "resize")


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_fails_on_both_sides_and_leaks_nothing(
    tmp_path: Path, operation: str, side: str, armed: Callable[[str], None]
) -> None:
    calls = Calls(tmp_path)
    open_before, mapped_before = descriptors(), mappings()
    armed(f"disk.{operation}.x:{side}=errno:EMFILE@1")
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        calls.call(operation)
    assert descriptors() == open_before
    assert mappings() <= mapped_before
    # What failed before the call did not happen, what failed after it did.
    happened = {
        "rename": not calls.file.exists(),
        "replace": not calls.file.exists(),
        "unlink": not calls.file.exists(),
        "resize": os.fstat(calls.fd).st_size == 4096,
    }
    assert happened.get(operation, side == "after") == (side == "after")
    os.close(calls.fd)


def test_the_table_above_has_every_operation() -> None:
    public = {name for name, value in vars(disk).items() if callable(value) and value.__module__ == disk.__name__}
    named = {name.removesuffix("_file") for name in public if not name.startswith("_")}
    without_one = {
        "opened",
        "open_folder",
        "write_all",
        "overwrite",
        "start_writeback",
        "set_aside",
        "DamagedFileError",
    }
    assert named - without_one == set(OPERATIONS), "each has a failpoint of disk.py on both sides"


def test_a_rename_takes_no_name_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the kernel can do it in one step nor where it cannot."""
    for number, works in enumerate((True, False)):
        if not works:
            monkeypatch.setattr(disk, "_renameat2", lambda: None)
        one, other = tmp_path / f"one{number}", tmp_path / f"other{number}"
        one.write_text("one")
        other.write_text("other")
        with pytest.raises(FileExistsError):
            disk.rename(one, other, "x")
        assert (one.read_text(), other.read_text()) == ("one", "other")
        other.unlink()
        disk.rename(one, other, "x")
        assert other.read_text() == "one"
        assert not one.exists()


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o640), (0o077, 0o600), (0o027, 0o640)])
def test_the_umask_says_whether_a_group_reads_and_nobody_else_does(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with disk.opened(tmp_path / "file", os.O_WRONLY | os.O_CREAT, "x"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_mapping_shows_the_file(tmp_path: Path) -> None:
    calls = Calls(tmp_path)
    mapping = disk.map_file(calls.fd, 4096, "x", writable=False)
    assert isinstance(mapping, mmap.mmap)
    assert mapping[:7] == b"content"
    with pytest.raises(TypeError):
        mapping[0] = 1
    os.close(calls.fd)
