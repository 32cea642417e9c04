"""Goal: one module knows which errors mean that there is no space.

Method: the errors themselves, and the text of all other modules: they may raise such an error, and not compare with one.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from commitmq.errors import DiskFullError, StoreError
from commitmq.files.disk_space import is_no_space, kind_of, tells_of_no_space

PROJECT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"errno\.(ENOSPC|EDQUOT)|errno (not )?(in|==|!=) \(?\d")
# The others make such an error themselves, as the system call would.
MAKERS = {
    "node/commitmq/files/disk_space.py",
    "node/commitmq/files/disk.py",
    "node/commitmq/security/audit.py",
}


def test_a_file_that_may_not_grow_is_no_full_disk() -> None:
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert kind_of(error) is DiskFullError
    assert not is_no_space(error)
    assert not tells_of_no_space(f"cannot write: {error}")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_quota_are_no_space(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert is_no_space(error)
    assert kind_of(error) is DiskFullError
    assert tells_of_no_space(f"cannot write: {error}")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), OSError("no number"), ValueError(errno.ENOSPC), None])
def test_other_errors_are_not(error: BaseException | None) -> None:
    assert not is_no_space(error)
    assert not isinstance(error, OSError) or kind_of(error) is StoreError
    assert not tells_of_no_space(f"cannot write: {error}")


def test_nobody_else_knows() -> None:
    found = {
        str(path.relative_to(PROJECT))
        for folder in ("node", "plugins", "dispatchers")
        for path in (PROJECT / folder).rglob("*.py")
        if NAMED.search(path.read_text())
    }
    assert found == MAKERS
