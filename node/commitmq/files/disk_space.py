"""How full the disk is, and what a process does without space: :class:`DiskWatch` and :class:`DiskRoom`.

Space that deleted segments still occupy counts as free. An unlinked file keeps its space while a process has it mapped
or open: a consumer on this machine that holds a batch, a backup that copies it. If that space counted as used, one slow
holder would make retention delete segment after segment without gaining a byte. So this module looks in ``/proc`` for
deleted segments that a process still holds (which also finds segments that an earlier cleanup deleted). A recent
deletion whose space has not come back counts as free for PATIENCE_MS: its holder may be a process that cannot be seen,
and some file systems free space a little later.

A full disk ends no process and loses nothing: whoever writes to the store does it by :class:`DiskRoom`, which leaves out a
write that found no room, says so in ``status`` and once in the log, and does it again later. The errors for a lack of
space are known here alone; they pass when space is freed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from commitmq.errors import DiskFullError, StoreError
from commitmq.log import Log

PATIENCE_MS = 30_000
RETURN_MS = 2_000
"""How long the space of a file may be missing after its last holder closed it: a dying process loses its maps first."""

_DELETED = " (deleted)"


FileId = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds deleted segments: its id and name, and the files."""

    pid: int
    name: str
    files: frozenset[FileId]


@dataclass(slots=True)
class _Deleted:
    """A deleted segment whose space did not come back at once."""

    disk_bytes: int
    at_ms: int
    was_seen: bool = False  # a process held it


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Use of the disk in bytes. ``ratio``: share in use without held space (-1: unknown); ``raw_ratio``: with it."""

    ratio: float
    raw_ratio: float
    disk_bytes: int
    held_bytes: int = 0
    holders: tuple[Holder, ...] = ()


class DiskWatch:
    """Measures the disk of one store. ``folders`` may be on several disks: the fullest one counts."""

    def __init__(self, segments: Path, folders: Iterable[Path], segment_bytes: int) -> None:
        """``segments``: the folder of the CommitLog, from which segments are deleted."""
        self._segments = segments
        self._folders = (segments, *folders)
        self._segment_bytes = segment_bytes
        self._unreturned: dict[FileId, _Deleted] = {}

    def free_bytes(self) -> int:
        """Free space of the CommitLog's disk, for :meth:`deleted`."""
        found = os.statvfs(self._segments)
        return found.f_bfree * found.f_frsize

    def deleted(self, file: FileId, disk_bytes: int, free_before: int, now_ms: int) -> None:
        """A segment of ``disk_bytes`` was deleted, when ``free_before`` bytes were free (``now_ms``: steady)."""
        if self.free_bytes() - free_before < disk_bytes // 2:
            self._unreturned[file] = _Deleted(disk_bytes, now_ms)

    def look(self, now_ms: int, worry_above: float) -> DiskUse:
        """The use of the disk now. Holders are searched for only above ``worry_above``, because that costs."""
        try:
            used, disk_bytes = _use(self._segments)
            device = self._segments.stat().st_dev
            others = [_use(one) for one in self._folders[1:] if one.exists() and one.stat().st_dev != device]
        except OSError:
            return DiskUse(-1.0, -1.0, 1)
        elsewhere = max((one / size for one, size in others), default=0.0)
        raw = used / disk_bytes
        if raw <= worry_above:
            return DiskUse(max(raw, elsewhere), max(raw, elsewhere), disk_bytes)
        holders = find_holders(self._segments)
        held = self._held_bytes({file for holder in holders for file in holder.files}, now_ms)
        # Measure once more: a holder that released its file since the first look is not in the list, but its space was
        # still in use then.
        used = min(used, _use(self._segments)[0])
        raw = used / disk_bytes
        held = min(used, held)
        return DiskUse(max((used - held) / disk_bytes, elsewhere), max(raw, elsewhere), disk_bytes, held, holders)

    def _held_bytes(self, seen: set[FileId], now_ms: int) -> int:
        for file, one in list(self._unreturned.items()):
            if file in seen:
                one.was_seen = True
            elif one.was_seen:
                one.was_seen = False
                one.at_ms = now_ms - PATIENCE_MS + RETURN_MS
            elif not 0 <= now_ms - one.at_ms < PATIENCE_MS:
                del self._unreturned[file]  # its holder has released it, or another file takes the space
        believed = sum(one.disk_bytes for file, one in self._unreturned.items() if file not in seen)
        return len(seen) * self._segment_bytes + believed


def _use(folder: Path) -> tuple[int, int]:
    """Bytes in use and bytes in all of ``folder``'s disk; space reserved for the superuser counts for neither."""
    found = os.statvfs(folder)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return used, max(1, used + found.f_bavail * found.f_frsize)


def find_holders(segments: Path) -> tuple[Holder, ...]:
    """Processes that have deleted files of ``segments`` mapped or open, of those that this account may inspect."""
    prefix = f"{segments.resolve()}/"
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            files = _mapped(name, prefix) | _open(name, prefix)
            if files:
                found.append(Holder(int(name), _process_name(name), frozenset(files)))
    return tuple(found)


def _mapped(pid: str, prefix: str) -> set[FileId]:
    # Not by psutil: it tells neither the device nor the inode of a deleted file.
    files = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                # range, permissions, offset, device as major:minor in hexadecimal, inode, path
                if line.endswith(f"{_DELETED}\n"):
                    parts = line.split(None, 5)
                    if len(parts) == 6 and parts[5].startswith(prefix):
                        major, _, minor = parts[3].partition(":")
                        files.add((os.makedev(int(major, 16), int(minor, 16)), int(parts[4])))
    except OSError:
        return set()
    return files


def _open(pid: str, prefix: str) -> set[FileId]:
    files = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                target = os.readlink(path)
                if target.startswith(prefix) and target.endswith(_DELETED):
                    status = os.stat(path)
                    files.add((status.st_dev, status.st_ino))
            except OSError:
                continue  # closed in the meantime
    except OSError:
        return set()
    return files


def _process_name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"


NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
"""The device is full, or the account's quota is used up: deleting files helps."""


def is_no_space(error: BaseException | None) -> bool:
    """Whether ``error`` says that there is no space: an error of the system, or a StoreError made of one."""
    if isinstance(error, StoreError):
        return isinstance(error, DiskFullError) or is_no_space(error.__cause__)
    return isinstance(error, OSError) and error.errno in NO_SPACE


def kind_of(error: OSError) -> type[StoreError]:
    """The class for an error of a file of the store: DiskFullError when it cannot grow, else StoreError. That is
    without space, and for a file at its limit (RLIMIT_FSIZE, or the file system's).
    """
    return DiskFullError if is_no_space(error) or error.errno == errno.EFBIG else StoreError


def tells_of_no_space(sentence: str) -> bool:
    """Whether a sentence that another process wrote says that there is no space."""
    return any(os.strerror(number) in sentence for number in NO_SPACE)


AGAIN_MS: Final = 500
_R = TypeVar("_R")


class StoppedWithoutRoom(Exception):
    """The process shall stop, and the disk still has no room: what was not written is found again by the next start."""


class StatusReport(Protocol):
    """Reports to the supervisor."""

    def __call__(self, **info: Any) -> None: ...


class DiskRoom:
    """``waiting``: why each kind of file (``timer log``) cannot be written at present."""

    def __init__(self, log: Log, tell: StatusReport, pause: Callable[[int], bool]) -> None:
        """``pause``: wait for this many milliseconds; False when the process shall stop."""
        self._log, self._report, self._pause = log, tell, pause
        self.waiting: dict[str, str] = {}

    @classmethod
    def of_nobody(cls, log: Log) -> DiskRoom:
        """Outside of a worker: no status shows it, and nothing is waited for."""
        return cls(log, lambda **_: None, lambda _ms: False)

    def try_to(self, what: str, write: Callable[[], object]) -> bool:
        """Call ``write``, which writes ``what``. False when there was no room: then it is to be called again later.
        Raises the other errors of ``write``.
        """
        try:
            write()
        except (OSError, StoreError) as error:
            if not self.lacked(what, error):
                raise
            return False
        self.found(what)
        return True

    def wait(self, what: str, write: Callable[[], _R]) -> _R:
        """Call ``write`` again and again until there is room; returns what it returns. Raises its other errors, and
        StoppedWithoutRoom.
        """
        results: list[_R] = []
        while not self.try_to(what, lambda: results.append(write())):
            if not self._pause(AGAIN_MS):
                raise StoppedWithoutRoom(self.waiting[what])
        return results[0]

    def lacked(self, what: str, error: Exception) -> bool:
        """Note that ``what`` could not be written, when ``error`` says that there was no room; False for another error."""
        if is_no_space(error) and what not in self.waiting:
            self.waiting[what] = str(error)
            self._log.error("waits for room on the disk", file=what, why=str(error))
            self._tell()
        return is_no_space(error)

    def found(self, what: str) -> None:
        """``what`` was written."""
        if what in self.waiting:
            del self.waiting[what]
            self._log.info("has room on the disk again", file=what)
            self._tell()

    def _tell(self) -> None:
        self._report(no_room=dict(self.waiting))


COPY_ON_WRITE: Final = ("bcachefs", "btrfs", "zfs")
"""On these file systems fallocate reserves space for the first write of a block at best; each later write takes a new
block.
"""


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The file system's type, as ``mount`` shows it; empty where it cannot be found out."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
        target = os.path.realpath(folder)
    except OSError:
        return ""
    best, found = -1, ""
    for line in lines:
        before, _, behind = line.partition(" - ")
        fields, kind = before.split(), behind.split()
        if len(fields) < 5 or not kind:
            continue
        point = fields[4].replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        # A later mount hides an earlier one at the same place.
        if inside and len(point) >= best:
            best, found = len(point), kind[0]
    return found


def is_private(folder: Path) -> bool:
    """Whether ``folder`` is one that only this account may enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
