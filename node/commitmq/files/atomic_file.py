"""The one way to replace a file: whoever opens it finds the old content or the new, never a part of either.

The new content is written to the file's temporary name, ``NAME.new`` beside it, and then takes the file's name in one
step. With ``durable`` the content is synced before that step and the folder after it, so the same holds after a power
cut.

A replace that a death interrupted leaves ``NAME.new``. No reader looks there, and the next replace of the file
overwrites it. A replace that failed removes it, which matters on a full disk.

A file has one writing process at a time (:mod:`commitmq.ownership`), or a lock that its writers hold: two writers at
once would share the temporary name.

Each step is a call of :mod:`commitmq.files.disk` with its failpoints, and ``WHAT.write`` is the failpoint of the write.
Every function raises OSError: only the caller knows what an error means.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from commitmq import failpoints
from commitmq.files import disk
from commitmq.files.disk import set_aside, write_all

SUFFIX: Final = ".new"


def replace(
    path: Path,
    data: failpoints.Buffer,
    what: str,
    *,
    durable: bool = True,
    mode: int = disk.FILE_MODE,
    hidden: bool = False,
    before: Callable[[], None] | None = None,
) -> None:
    """Make ``data`` the content of ``path`` in one step. ``mode`` is the file's mode before the umask.

    The temporary name begins with a point if ``hidden``: programs that read all files of a folder pass over it.
    ``before`` is called when the new content is complete, just before it takes the name.

    Raises OSError. The content is then the old one or, when only the last step's answer or the folder's sync failed,
    the new one, which a power cut may take back.
    """
    os.close(write_beside(path, data, what, durable=durable, mode=mode, hidden=hidden))
    take_name(path, what, hidden=hidden, before=before)
    if durable:
        disk.sync_folder(path.parent, what)


def write_beside(
    path: Path,
    data: failpoints.Buffer,
    what: str,
    *,
    durable: bool = True,
    mode: int = disk.FILE_MODE,
    hidden: bool = False,
) -> int:
    """The first half of :func:`replace`: write ``data`` under the temporary name. Returns the file's descriptor, open
    for reading and writing, for a caller that appends to the new file.
    """
    beside = _temporary(path, hidden)
    try:
        make_way(beside)
        fd = disk.open_file(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, what, mode)
        try:
            write_all(fd, data, 0, place=f"{what}.write")
            if durable:
                disk.sync(fd, what)
        except BaseException:
            os.close(fd)
            raise
    except BaseException:
        _remove(beside)
        raise
    return fd


def take_name(path: Path, what: str, *, hidden: bool = False, before: Callable[[], None] | None = None) -> None:
    """The second half of :func:`replace`, without the sync of the folder."""
    beside = _temporary(path, hidden)
    try:
        if before is not None:
            before()
        disk.replace(beside, path, what)
    except BaseException:
        _remove(beside)
        raise


def make_way(path: Path) -> None:
    """Rename a folder that stands where a file is to be written: it would fail every write, and nobody made it for us."""
    if path.is_dir():
        set_aside(path)


def _temporary(path: Path, hidden: bool) -> Path:
    return path.with_name(f"{'.' if hidden else ''}{path.name}{SUFFIX}")


def _remove(beside: Path) -> None:
    # Only tidiness: the next replace overwrites the file. After an error that arrived although the name was taken, there
    # is none.
    with contextlib.suppress(OSError):
        beside.unlink()
