"""Programs of Debian packages, for tests that judge our files by others' tools: from the PATH, else fetched once.

Packages are unpacked into the cache of the comparison (:data:`bench.system.CACHE`), so any account can have them, and the
machine stays as it is. Dependencies are fetched only where they are named: the rest is what a Debian has anyway.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.system import CACHE

_WITHIN_S = 300
_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin")


class NoProgram(Exception):
    """The program is neither there nor to be had; the text says why."""


def program(name: str, package: str, *libraries: str) -> str:
    """The path of the program ``name``, which Debian's ``package`` has, and which needs the packages ``libraries``. Where it
    cannot be fetched the test is skipped: others judge our files then, or nobody does.
    """
    try:
        return find(name, package, *libraries)
    except NoProgram as error:
        pytest.skip(str(error))


def find(name: str, package: str, *libraries: str) -> str:
    """As :func:`program`; raises NoProgram."""
    if found := shutil.which(name):
        return found
    folder = CACHE / "debian" / package
    with _only_one_at_a_time():
        if not folder.exists():
            _unpack([package, *libraries], folder)
        places = [folder / place / name for place in _FOLDERS if os.access(folder / place / name, os.X_OK)]
        if not places:
            raise NoProgram(f"Debian's package {package} has no program {name}")
        return _with_its_libraries(places[0], folder)


def _with_its_libraries(found: Path, folder: Path) -> str:
    """A command that runs ``found`` with the libraries in ``folder``, where it looks for them in the machine's folders."""
    places = sorted({str(path.parent) for path in folder.glob("usr/lib/**/*.so*") if path.is_file()})
    if not places:
        return str(found)
    command = folder / f"run-{found.name}"
    command.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={":".join(places)} exec {found} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return str(command)


@contextlib.contextmanager
def _only_one_at_a_time() -> Iterator[None]:
    """Several test processes may want the same package at once."""
    place = CACHE / "debian"
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack(packages: list[str], folder: Path) -> None:
    """Put the files of ``packages`` into ``folder``, which is there only when it is complete. Raises NoProgram."""
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise NoProgram(
            f"it is in Debian's package {packages[0]}, and PATH has no {', '.join(missing)} to fetch it with"
        )
    # Below the cache, so that the last step is a renaming. Its owner alone may write there: apt's own account may not.
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        work = Path(made)
        _download(packages, work)
        for archive in work.glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), str(work / "files")], work)
        (work / "files").rename(folder)


def _download(packages: list[str], work: Path) -> None:
    """Fetch the packages by the machine's list of packages, else by a list of our own: the machine's needs root."""
    download = ["apt-get", "-qq", "-o", "APT::Sandbox::User=", "download", *packages]
    try:
        _run(download, work)
    except NoProgram:
        for name in ("state/lists/partial", "cache/archives/partial"):
            (work / name).mkdir(parents=True)
        own = ["-o", f"Dir::State::Lists={work / 'state' / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]
        _run(["apt-get", "-qq", "-o", "APT::Sandbox::User=", *own, "update"], work)
        _run([download[0], *own, *download[1:]], work)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoProgram(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NoProgram(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
