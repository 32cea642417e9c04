"""Goal: a file that has another name is never changed under that name.

Method: links, a cut as a recovery makes it, errors of the disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq.files.unshare import unshare
from commitmq.store.recovery import store_recovery

DATA = bytes(range(256)) * 256 + bytes(1 << 16)


def linked(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "commitlog"
    folder.mkdir()
    path, other = folder / f"{0:020d}", tmp_path / "snapshot"
    path.write_bytes(DATA)
    os.utime(path, (1_000, 2_000))
    os.link(path, other)
    return path, other


def test_a_file_with_one_name_is_left_alone(tmp_path: Path) -> None:
    path, other = linked(tmp_path)
    other.unlink()
    before = path.stat()
    assert not unshare(path)
    assert path.stat() == before


@pytest.mark.parametrize("keep", [None, 0, 1, 4_097, len(DATA), len(DATA) + 1])
def test_a_linked_file_gets_a_copy_of_its_own(tmp_path: Path, keep: int | None) -> None:
    path, other = linked(tmp_path)
    path.chmod(0o640)
    assert unshare(path, keep)
    kept = DATA if keep is None else DATA[:keep]
    assert path.read_bytes() == kept.ljust(len(DATA), b"\0")
    assert other.read_bytes() == DATA
    assert (path.stat().st_nlink, other.stat().st_nlink) == (1, 1)
    assert (path.stat().st_mtime, path.stat().st_mode & 0o777) == (2_000, 0o640)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["commitlog", "snapshot"]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_cut_of_the_log_leaves_a_snapshot_as_it_is(tmp_path: Path) -> None:
    path, other = linked(tmp_path)
    store_recovery._zero_tail(path, 1_000)
    assert path.read_bytes() == DATA[:1_000].ljust(len(DATA), b"\0")
    assert other.read_bytes() == DATA


@pytest.mark.parametrize("action", ["errno:ENOSPC", "kill"])
def test_an_error_or_a_death_changes_nothing_and_the_next_call_is_right(tmp_path: Path, action: str) -> None:
    path, other = linked(tmp_path)
    program = (
        "import sys\nfrom pathlib import Path\nfrom commitmq.files.unshare import unshare\nunshare(Path(sys.argv[1]))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "COMMITMQ_FAILPOINTS": f"unshare.write={action}",
    }
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert path.samefile(other)
    assert path.read_bytes() == DATA
    if action != "kill":
        assert sorted(one.name for one in tmp_path.iterdir()) == ["commitlog", "snapshot"]
    assert unshare(path)
    assert (path.read_bytes(), other.read_bytes()) == (DATA, DATA)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["commitlog", "snapshot"]
