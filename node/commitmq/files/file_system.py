"""The type of the file system that holds a folder, from the kernel's table of mounts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

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
