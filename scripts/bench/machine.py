"""The facts that figures depend on besides the systems: processor, memory, kernel, file system, versions, load."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def describe(folder: Path) -> dict[str, Any]:
    """The machine, and the file system that ``folder`` is on."""
    device, kind = _mount_of(folder)
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "filesystem": f"{kind} on {device}" if kind else "unknown",
        "python": platform.python_version(),
    }


def load_average() -> float:
    """Runnable and waiting processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _mount_of(folder: Path) -> tuple[str, str]:
    """Device and type of the file system of ``folder``: the one with the longest mount point above it."""
    place = str(folder.resolve()) + "/"
    found, best = ("", ""), -1
    for one in psutil.disk_partitions(all=True):
        point = one.mountpoint.rstrip("/") + "/"
        if place.startswith(point) and len(point) > best:
            found, best = (one.device, one.fstype), len(point)
    return found
