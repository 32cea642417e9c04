"""How full the disk is; space that deleted segments still occupy counts as free.

An unlinked file keeps its space while a process has it mapped or open: a consumer on this machine that holds a batch, a
backup that copies it. If that space counted as used, one slow holder would make retention delete segment after segment
without gaining a byte. So this module looks in ``/proc`` for deleted segments that a process still holds (which also
finds segments that a former cleanup deleted). A recent deletion whose space has not come back counts as free for
PATIENCE_MS: its holder may be a process that cannot be seen, and some file systems free space a little later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    """Use of the disk. ``ratio``: share in use without held space (-1: unknown); ``raw_ratio``: with it. Sizes in
    bytes.
    """

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
        """Record that a segment of ``disk_bytes`` was deleted, when ``free_before`` bytes were free (``now_ms``: any
        steady clock).
        """
        if self.free_bytes() - free_before < disk_bytes // 2:
            self._unreturned[file] = _Deleted(disk_bytes, now_ms)

    def look(self, now_ms: int, worry_above: float) -> DiskUse:
        """The use of the disk now. Holders are searched for only when the use is above ``worry_above``, because that
        costs.
        """
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
    """Processes that have deleted files of the folder ``segments`` mapped or open; only those that this account may
    inspect.
    """
    prefix = f"{segments.resolve()}/"
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            files = _mapped(name, prefix) | _open(name, prefix)
            if files:
                found.append(Holder(int(name), _process_name(name), frozenset(files)))
    return tuple(found)


def _mapped(pid: str, prefix: str) -> set[FileId]:
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
                continue  # closed meanwhile
    except OSError:
        return set()
    return files


def _process_name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"
