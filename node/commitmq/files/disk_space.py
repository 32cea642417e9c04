"""How full the disk is, with the space that deleted segments still take counted as free.

A file that was unlinked keeps its space while anybody has it mapped or open: a consumer on this machine that holds a batch,
a backup that copies it. Were that space counted as used, one slow holder would make the ladder delete segment after
segment without gaining a byte. So deleted segments that a process still holds are looked for in ``/proc`` (which also finds
those that a former cleanup deleted), and deletions of the last moments whose space has not come back are believed for
PATIENCE_MS: the holder may be one that cannot be seen, and some file systems free space a little later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PATIENCE_MS = 30_000
RETURN_MS = 2_000
"""How long the space of a file may stay away after its last holder let go: a dying process loses its maps first."""

_DELETED = " (deleted)"


FileId = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that keeps deleted segments: which files, and who it is."""

    pid: int
    name: str
    files: frozenset[FileId]


@dataclass(slots=True)
class _Deleted:
    """A deletion whose space did not come back at once."""

    disk_bytes: int
    at_ms: int
    was_seen: bool = False  # in the hands of a process


@dataclass(frozen=True, slots=True)
class DiskUse:
    """``ratio``: share of the disk in use without what is held (-1: unknown); ``raw_ratio``: with it. Sizes in bytes."""

    ratio: float
    raw_ratio: float
    disk_bytes: int
    held_bytes: int = 0
    holders: tuple[Holder, ...] = ()


class DiskWatch:
    """Looks at the disk of one store. ``folders`` may lie on several disks: the fullest one counts."""

    def __init__(self, segments: Path, folders: Iterable[Path], segment_bytes: int) -> None:
        """``segments``: the folder of the CommitLog, where what is deleted lay."""
        self._segments = segments
        self._folders = (segments, *folders)
        self._segment_bytes = segment_bytes
        self._unreturned: dict[FileId, _Deleted] = {}

    def free_bytes(self) -> int:
        """Free space of the CommitLog's disk, for :meth:`deleted`."""
        found = os.statvfs(self._segments)
        return found.f_bfree * found.f_frsize

    def deleted(self, file: FileId, disk_bytes: int, free_before: int, now_ms: int) -> None:
        """A segment of ``disk_bytes`` was deleted, when ``free_before`` bytes were free (``now_ms``: any steady clock)."""
        if self.free_bytes() - free_before < disk_bytes // 2:
            self._unreturned[file] = _Deleted(disk_bytes, now_ms)

    def look(self, now_ms: int, worry_above: float) -> DiskUse:
        """The use of the disk now. Holders are looked for only when it is above ``worry_above``, because that costs."""
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
        # Once more, because who let go since the first look is not among the holders, but its space was still in use then.
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
                del self._unreturned[file]  # its holder has let go, or it is not what takes the space
        believed = sum(one.disk_bytes for file, one in self._unreturned.items() if file not in seen)
        return len(seen) * self._segment_bytes + believed


def _use(folder: Path) -> tuple[int, int]:
    """Bytes in use and bytes in all of the disk of ``folder``; what only the superuser may use counts for neither."""
    found = os.statvfs(folder)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return used, max(1, used + found.f_bavail * found.f_frsize)


def find_holders(segments: Path) -> tuple[Holder, ...]:
    """Processes that have deleted files of the folder ``segments`` mapped or open; only those we may look into."""
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
