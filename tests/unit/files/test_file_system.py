"""Goal: the file system of a folder is the one mounted nearest above it, and an unreadable table tells nothing.

Method: tables as the kernel writes them, and the real one against the type that the system's own tool names.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from commitmq.files.disk_space import file_system_of

TABLE = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /srv rw shared:2 - btrfs /dev/sdb rw
31 30 0:41 / /srv/with\\040space rw - zfs tank rw
32 22 0:42 / /srv rw - xfs /dev/sdc rw
broken line
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/", "ext4"), ("/srvx", "ext4"), ("/srv", "xfs"), ("/srv/log", "xfs"), ("/srv/with space/log", "zfs")],
)
def test_the_nearest_mount_counts(tmp_path: Path, folder: str, kind: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert file_system_of(Path(folder), table) == kind


def test_without_a_table_nothing_is_known(tmp_path: Path) -> None:
    assert file_system_of(tmp_path, tmp_path / "missing") == ""


@pytest.mark.skipif(shutil.which("findmnt") is None, reason="findmnt is not installed")
def test_the_systems_own_tool_says_the_same(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "-T", str(tmp_path)], capture_output=True, text=True, check=True, timeout=30
    )
    assert file_system_of(tmp_path) == ended.stdout.split()[-1]
