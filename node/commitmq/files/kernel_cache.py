"""The cache folder of compiled kernels: which folder this process loads them from, or else compiles them into.

By itself numba decides function by function. It stops the process with "no locator available" where neither the package
nor a home folder can be written, and it cannot use a read-only folder. So this module chooses one folder for all
kernels:

    NUMBA_CACHE_DIR/…                       where that variable is set
    PACKAGE/kernels/__pycache__/…           beside the sources: an installation by root leaves them for every account
    $XDG_CACHE_HOME/commitmq/… or ~/.cache  this account's own
    STORE/commitmq/kernels/…                the store of the node or of the offline verb: a service account needs no other
    a temporary folder                      made for this process and removed at its end; nothing else could be written

A folder with every kernel is used at any place in that order, even if it is read-only; else the first writable folder
is used. The folder's name identifies everything its content depends on: the sources of all kernels (which inline each
other), Python, numba, llvmlite and the processor. So two installations, or two machines with one home, never disturb
each other, and a changed source never meets stale machine code.

    kernels-<16 hex>/*.nbi *.nbc    numba's files
    kernels-<16 hex>/complete       JSON: name and size of each file, written last: all kernels are there
    kernels-<16 hex>/lock           held by the process that compiles; others wait instead of compiling too

Machine code is trusted as the sources are. A folder outside of the package counts only if it and its parents belong to
this account or to root and cannot be written by others. So root never loads code that the owner of a store put there.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import orjson

from commitmq.errors import CommitMQError
from commitmq.files import atomic_file

SOURCES: Final = Path(__file__).parents[1] / "kernels"
CONSTANTS: Final = Path(__file__).parents[1] / "format" / "constants.py"
"""Compiled code has the numbers of this module in it."""
MODULES: Final = (
    "words",
    "raw",
    "run",
    "client_batch",
    "java_hash",
    "readdress",
    "walk",
    "scan",
    "tags",
    "columns",
    "index_words",
    "index_insertion",
    "index_chains",
    "key_match",
    "units",
    "arrow",
    "marks",
    "sums",
    "timer_chain",
)
"""Every kernel module, in import order."""

COMPILING_TAKES: Final = "up to a minute"
_COMPLETE: Final = "complete"
_LOCK: Final = "lock"
_TEMPORARY: Final = "commitmq-kernels-"
_KEPT_FOR_S: Final = 7 * 24 * 3600.0
_state: dict[str, Path | None] = {"store": None}


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder for compiled kernels. ``origin`` says which of the places it is, ``complete`` whether it has every
    kernel.
    """

    folder: Path
    origin: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place that was considered. ``problem`` says why it cannot be used; None if it can."""

    folder: Path
    origin: str
    complete: bool
    problem: str | None


class NoKernelFolderError(CommitMQError):
    """No folder can keep compiled kernels; the message names the places that were tried, and the remedy."""


def use_store(root: Path) -> None:
    """Let this process keep kernels in the store at ``root`` if no other place works. Call it before kernels are
    imported.
    """
    _state["store"] = root


@lru_cache(maxsize=1)
def choose() -> KernelCache:
    """The kernel folder of this process, chosen once, when the first kernel is imported."""
    found, reasons = _first_usable()
    if found is not None:
        return found
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    for other in folder.parent.glob(f"{_TEMPORARY}*"):  # of killed processes; those of other accounts cannot be removed
        _remove_old(other, folder)
    atexit.register(_remove, folder, os.getpid())
    from commitmq.log import get_log

    get_log("kernels").warning(
        f"no folder can keep compiled kernels, so this process compiles them for itself alone, which takes {COMPILING_TAKES}:"
        f" {reasons}. Run `commitmq kernels warm` as the owner of the installation, or set NUMBA_CACHE_DIR"
    )
    return KernelCache(folder, "temporary folder", False)


def choose_one_that_keeps() -> KernelCache:
    """Like :func:`choose`, for a process that compiles for others. Raises NoKernelFolderError, without side effects,
    where no folder can keep compiled kernels.
    """
    found, reasons = _first_usable()
    if found is None:
        raise NoKernelFolderError(
            f"no folder can keep compiled kernels: {reasons}. Run this as the owner of the installation, or set"
            " NUMBA_CACHE_DIR to a folder of this account, or let a store keep them with --store DIR"
        )
    return choose()


def _first_usable() -> tuple[KernelCache | None, str]:
    """The folder to use, which exists afterwards; if there is none, None and the reason for each place."""
    problems = []
    for one in sorted(candidates(), key=lambda one: not one.complete):
        problem = one.problem
        if problem is None:
            try:
                if not one.complete:
                    _make(one)
                return KernelCache(one.folder, one.origin, one.complete), ""
            except OSError as error:
                problem = error.strerror or repr(error)
        problems.append(f"{one.folder}: {problem}")
    return None, "; ".join(problems)


def candidates() -> list[Candidate]:
    """Every place in the order of preference, with its problem. Changes nothing."""
    return [_look(folder / f"kernels-{key()}", origin, base) for folder, origin, base in _places()]


def _places() -> Iterator[tuple[Path, str, Path | None]]:
    """``(folder, origin, top folder of the ownership check)``; None: the folder is trusted as the sources are."""
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(configured).absolute() / "commitmq", "NUMBA_CACHE_DIR", Path(configured).absolute()
    yield SOURCES / "__pycache__", "package", None
    home = os.path.expanduser("~")
    caches = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isdir(home) else "")
    if os.path.isabs(caches):
        yield Path(caches, "commitmq"), "user cache", Path(caches)
    store = _state["store"]
    if store is not None:
        yield store / "commitmq" / "kernels", "store", store


def _look(folder: Path, origin: str, base: Path | None) -> Candidate:
    try:
        if base is not None and (problem := _untrusted(folder, base)):
            return Candidate(folder, origin, False, problem)
        if is_complete(folder):
            return Candidate(folder, origin, True, None)
        there = next(one for one in (folder, *folder.parents) if one.exists())
        writable = os.access(there, os.W_OK | os.X_OK)
    except OSError as error:
        return Candidate(folder, origin, False, error.strerror or repr(error))
    return Candidate(folder, origin, False, None if writable else f"{there} cannot be written")


def _make(place: Candidate) -> None:
    """Make the folder and try it. Raises OSError."""
    # The mode must not depend on the umask: a folder that a group may write to would not be trusted again.
    mode = 0o755 if place.origin == "package" else 0o700
    os.makedirs(place.folder.parent.parent, exist_ok=True)
    for folder in (place.folder.parent, place.folder):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode)
    tempfile.TemporaryFile(dir=place.folder).close()


def _untrusted(folder: Path, base: Path) -> str | None:
    """Why machine code from ``folder`` must not be run: another account could have put it there."""
    for one in (folder, *folder.parents):
        try:
            found = one.lstat()
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISLNK(found.st_mode) and one != base:
                return f"{one} is a symbolic link"
            found = one.stat()
            if not stat.S_ISDIR(found.st_mode):
                return f"{one} is no folder"
            if found.st_uid not in (0, os.geteuid()):
                return f"{one} belongs to another account"
            if found.st_mode & 0o022 and not (one == base and found.st_mode & stat.S_ISVTX):
                return f"{one} can be written by other accounts"
        if one == base:
            return None
    return None


# ---------------------------------------------------------------- the content of a folder


@lru_cache(maxsize=1)
def key() -> str:
    """Identifies everything that compiled code depends on; processes with equal keys can share a folder."""
    digest = hashlib.sha256()
    for source in (*sorted(SOURCES.glob("*.py")), CONSTANTS):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    parts = [sys.implementation.cache_tag, getattr(sys, "abiflags", ""), version("numba"), version("llvmlite")]
    parts += [version("numpy"), version("isal"), platform.machine(), *_processor()]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:16]


def _processor() -> list[str]:
    """Name and features of the processor as the compiler sees them; machine code for another one may not run here."""
    import llvmlite.binding as llvm

    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    return [
        name or llvm.get_host_cpu_name(),
        features if features is not None else llvm.get_host_cpu_features().flatten(),
    ]


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` has every kernel completely. Raises PermissionError when that cannot be checked."""
    try:
        wanted = orjson.loads((folder / _COMPLETE).read_bytes())
        found = _contents(folder)
    except (FileNotFoundError, NotADirectoryError, orjson.JSONDecodeError):
        return False
    return isinstance(wanted, dict) and wanted.items() <= found.items()


def _contents(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith((".nbi", ".nbc"))}


@contextlib.contextmanager
def compiling(cache: KernelCache) -> Iterator[None]:
    """Wraps the import of all kernels: one process compiles, the others wait and load. Afterwards the folder is
    complete.
    """
    if cache.complete:
        yield
        return
    fd = os.open(cache.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        _mark_complete(cache)
    finally:
        os.close(fd)


def _mark_complete(cache: KernelCache) -> None:
    folder = cache.folder
    # The caller holds the folder's lock.
    atomic_file.replace(folder / _COMPLETE, orjson.dumps(_contents(folder)), "kernel_cache", durable=False, mode=0o666)
    if cache.origin == "package":
        # An installation serves every account that can read it; the umask of the account that used it first has no
        # effect.
        with contextlib.suppress(OSError):
            for path in (folder, *folder.iterdir()):
                path.chmod(path.stat().st_mode | stat.S_IRGRP | stat.S_IROTH | (0o011 if path is folder else 0))
    # Remove folders of former sources and compilers, except those that a process might be filling now.
    for other in folder.parent.glob("kernels-*"):
        _remove_old(other, folder)


def _remove_old(other: Path, folder: Path) -> None:
    with contextlib.suppress(OSError):
        found = other.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if ours and other != folder and time.time() - found.st_mtime > _KEPT_FOR_S:
            shutil.rmtree(other, ignore_errors=True)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
