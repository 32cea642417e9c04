"""The one place where the store asks the kernel for names, descriptors, mappings, writes, space and durability.

Each call has a failpoint on both sides, ``disk.OPERATION.WHAT:before`` and ``:after``. WHAT is the kind of file
(``segment``, ``checkpoint``, ``queue``, …), so that a test can go through all of them: die before or after the call, or
make it fail. An error *after* a call stands for an error that arrived although the call did its work, such as a lost
answer of a network file system; callers must survive both. A test finds calls that bypass this module.

Only the owner ever writes to a store's files, and other accounts never read them; the umask decides whether a group may
(:mod:`commitmq.store.access`).

Every function raises OSError: only the caller knows the meaning of an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final, TypeAlias

from commitmq import failpoints
from commitmq.errors import StoreError

AnyPath: TypeAlias = str | os.PathLike[str]

FILE_MODE: Final = 0o640

NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
"""Errors of a call that wanted a descriptor, did nothing, and may succeed a moment later. A failed sync is different:
it does not report which bytes it wrote.
"""

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_NOT_THERE: Final = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def open_file(path: AnyPath, flags: int, what: str, mode: int = FILE_MODE) -> int:
    """``os.open``; the descriptor is not inherited."""
    if not failpoints.ACTIVE:
        return os.open(path, flags | os.O_CLOEXEC, mode)
    failpoints.hit(f"disk.open.{what}:before")
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        failpoints.hit(f"disk.open.{what}:after")
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def opened(path: AnyPath, flags: int, what: str, mode: int = FILE_MODE) -> Iterator[int]:
    """:func:`open_file`; the descriptor is closed at the end of the ``with`` block."""
    fd = open_file(path, flags, what, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def sync(fd: int, what: str, *, metadata: bool = False) -> None:
    """Make the content of ``fd`` durable (fdatasync), with ``metadata`` its times too (fsync). After an error the
    kernel marks the pages clean that it could not write, so a second call proves nothing.
    """
    if not failpoints.ACTIVE:
        (os.fsync if metadata else os.fdatasync)(fd)
        return
    failpoints.hit(f"disk.sync.{what}:before")
    (os.fsync if metadata else os.fdatasync)(fd)
    failpoints.hit(f"disk.sync.{what}:after")


def sync_folder(folder: AnyPath, what: str = "folder") -> None:
    """Make created, renamed and deleted names in ``folder`` durable."""
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.sync_folder.{what}:before")
    fd = open_folder(folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.sync_folder.{what}:after")


def open_folder(folder: AnyPath) -> int:
    """A descriptor of ``folder``, for a sync of its names."""
    return open_file(folder, os.O_RDONLY | os.O_DIRECTORY, "folder")


def rename(source: AnyPath, target: AnyPath, what: str) -> None:
    """Give ``source`` the name ``target``, which must be free: raises FileExistsError otherwise, in one step."""
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.rename.{what}:before")
    _rename_to_free(source, target)
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.rename.{what}:after")


def replace(source: AnyPath, target: AnyPath, what: str) -> None:
    """Give ``source`` the name ``target`` in one step; the file that had the name is gone."""
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.replace.{what}:before")
    os.replace(source, target)
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.replace.{what}:after")


def unlink(path: AnyPath, what: str, *, missing_ok: bool = False) -> None:
    """Delete the name ``path``."""
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.unlink.{what}:before")
    try:
        os.unlink(path)
    except FileNotFoundError:
        if not missing_ok:
            raise
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.unlink.{what}:after")


def map_file(fd: int, size: int, what: str, *, writable: bool = True) -> mmap.mmap:
    """A shared mapping of the first ``size`` bytes; a ``writable`` mapping must be of allocated blocks (else SIGBUS)."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if not failpoints.ACTIVE:
        return mmap.mmap(fd, size, prot=access)
    failpoints.hit(f"disk.map.{what}:before")
    mapping = mmap.mmap(fd, size, prot=access)
    try:
        failpoints.hit(f"disk.map.{what}:after")
    except BaseException:
        mapping.close()
        raise
    return mapping


def reserve(fd: int, start: int, size: int, what: str) -> None:
    """Allocate the blocks of ``size`` bytes from ``start`` on, and extend the file to their end (fallocate)."""
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.reserve.{what}:before")
    os.posix_fallocate(fd, start, size)
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.reserve.{what}:after")


def resize(fd: int, size: int, what: str) -> None:
    """Cut the file to ``size`` bytes, or extend it to that size without allocating blocks (ftruncate)."""
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.resize.{what}:before")
    os.ftruncate(fd, size)
    if failpoints.ACTIVE:
        failpoints.hit(f"disk.resize.{what}:after")


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None


def _rename_to_free(source: AnyPath, target: AnyPath) -> None:
    call = _renameat2()
    if call is not None:
        sys.audit("os.rename", source, target, -1, -1)
        if not call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE)):
            return
        number = ctypes.get_errno()
        if number not in _NOT_THERE:
            raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))
    # This file system lacks RENAME_NOREPLACE. Only one process makes each name of a store, and it checks first.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(source), None, os.fspath(target))
    os.rename(source, target)


def write_all(fd: int, data: failpoints.Buffer, position: int, place: str = "") -> None:
    """Write ``data`` at byte ``position`` of ``fd``; ``place`` is the failpoint of each system call.

    Raises OSError, with a part of the data written.

    A system call that writes may take fewer bytes than it was given: this is how a disk about to be full shows itself, and
    only the next call returns the error. A caller that does not check leaves half of a header or of a number behind.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, failpoints.clip(place, rest) if failpoints.ACTIVE else rest, position)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        position += written
        rest = rest[written:]


def overwrite(path: Path, data: failpoints.Buffer, what: str, *, place: str, before_sync: str) -> None:
    """Write ``data`` over the beginning of ``path``, durably; the file is made if it is missing. A crash leaves the old bytes
    or the new ones, no mix, if they share one sector. ``place`` and ``before_sync`` are failpoints.

    Raises OSError.
    """
    made = not path.exists()
    fd = open_file(path, os.O_RDWR | os.O_CREAT, what)
    try:
        write_all(fd, data, 0, place)
        if failpoints.ACTIVE:
            failpoints.hit(before_sync)
        sync(fd, what)
    finally:
        os.close(fd)
    if made:
        sync_folder(path.parent, what)


_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE


@functools.cache
def _call() -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    return function


def start_writeback(fd: int) -> None:
    """Hand the dirty pages of ``fd`` to the device. Errors are left to the sync that must follow.

    ``sync_file_range``, which Python's ``os`` lacks, promises nothing and does not replace a sync. It makes many syncs in a
    row cheap: the device works on all files at once, and the first fdatasync commits the block allocations of them all
    (10,000 files with new blocks: 0.6 s, not 2 s).
    """
    function = _call()
    if function is not None:
        function(fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_WRITE))


class DamagedFileError(StoreError):
    """The content of the file ``path`` cannot be what a process wrote. (One that cannot be read now is another error.)"""

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message, path=path)
        self.damaged = path


def set_aside(path: Path) -> Path:
    """Rename ``path`` to ``<name>.damaged``, or to the first of ``.damaged-1``, ``.damaged-2``, … that is free. Returns
    the new path. Raises OSError.
    """
    for number in count():
        aside = path.with_name(f"{path.name}.damaged{f'-{number}' if number else ''}")
        with contextlib.suppress(FileExistsError):
            rename(path, aside, "aside")
            return aside
    raise AssertionError  # (count has no end)
