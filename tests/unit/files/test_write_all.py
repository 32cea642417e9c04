"""Goal: what is written is written whole or an error, and one function knows how, as one function syncs a folder's names.

Method: short writes by a failpoint, a device that takes nothing, and the text of all other modules.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.files.disk import write_all

PROJECT = Path(__file__).resolve().parents[3]
WRITERS = {
    "node/commitmq/files/disk.py",
    "node/commitmq/store/access.py",  # four bytes that nobody reads, in a file that has them already
}


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_points", failpoints.parse("x.write=short:3"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(fd, b"0123456789", 5, place="x.write")
    assert os.pread(fd, 20, 0) == bytes(5) + b"0123456789"
    os.close(fd)


def test_a_write_of_nothing_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_all(-1, b"x", 0)


@pytest.mark.parametrize(
    ("call", "where"), [(r"os\.pwritev?\(", WRITERS), (r"os\.O_DIRECTORY", {"node/commitmq/files/disk.py"})]
)
def test_nobody_else_does_it(call: str, where: set[str]) -> None:
    found = {
        str(path.relative_to(PROJECT))
        for folder in ("node", "plugins", "dispatchers")
        for path in (PROJECT / folder).rglob("*.py")
        if re.search(call, path.read_text())
    }
    assert found == where
