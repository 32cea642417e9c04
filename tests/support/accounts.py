"""Other accounts of this machine, and folders that nobody may write to: how tests meet what a service account meets.

As root a test becomes another account by ``setpriv``; what that account is to run must be readable to it, so it takes a
Python outside of home folders. A process of root does not care for permissions; :func:`obeying` takes that power away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

STRANGER = 65_534
OTHER_STRANGER = 65_533
PACKAGES = ("commitmq", "commitmq_dispatchers", "commitmq_plugins")


def _cannot(reason: str) -> NoReturn:
    """Skip the test; where everything is built, by root, nothing may be missing unnoticed."""
    if os.environ.get("COMMITMQ_CI") and os.geteuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


def as_account(uid: int, group: int | None = None) -> list[str]:
    """The words in front of a command that run it as the account ``uid``, a member of ``group`` too; skips the test unless it
    may do that.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        _cannot("becoming another account needs root and setpriv")
    groups = ["--clear-groups"] if group is None else ["--groups", str(group)]
    # By way of env: setpriv itself still has root's powers when it executes what it may not even read.
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), *groups, "env"]


def obeying() -> list[str]:
    """The words in front of a command that is to obey permissions: none unless this is root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        _cannot("root obeys permissions only with setpriv")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@lru_cache(maxsize=1)
def _python_for_all() -> str | None:
    for found in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [*as_account(STRANGER), found, "-c", "import sys; print(sys.implementation.cache_tag)"]
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.stdout.strip() == sys.implementation.cache_tag:
                return found
    return None


def python_for_all() -> str:
    """A Python like ours that every account can run; skips the test without one."""
    found = _python_for_all()
    if found is None:
        _cannot("no other account can run a Python of this version")
    return found


def bare_environment(*paths: Path, **extra: str) -> dict[str, str]:
    """What a service manager gives: no HOME and nothing of ours but where the modules are, those in ``paths`` first."""
    modules = [*map(str, paths), *_sources(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(dict.fromkeys(modules)), **extra}


def _sources() -> list[str]:
    return sorted({str(Path(next(iter(import_module(name).__path__))).parent) for name in PACKAGES})


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every account can enter; those of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="commitmq-test-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)


def read_only_copy(folder: Path) -> Path:
    """A copy of the package in ``folder`` that nobody may write to."""
    import commitmq

    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(commitmq.__file__).parent, folder / "commitmq", ignore=ignore)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder
