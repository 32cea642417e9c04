"""The raw speed of this machine at this moment, without CommitMQ: the reference for comparing figures across days.

Machines drift: another neighbour on the host, another kernel, a disk that is fuller. A figure that became worse by as
much as its floor did says nothing about CommitMQ.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

from commitmq.bench.device import Device
from commitmq.bench.echo import EchoPeer
from commitmq.protocol.directory import Directory

_BODY_BYTES: Final = 1024
_ECHOES: Final = 600
_WARM: Final = 50
_SYNCS: Final = 150
_COPY_BYTES: Final = 16 << 20  # beyond the caches of most processors, as a log is
_COPIES: Final = 7
_STEPS: Final = 200_000
_LOOPS: Final = 7

# Which floor a figure depends on: see Floors.of.
ECHO, ECHO_AND_SYNC, ECHO_RATE, COPY, PYTHON = "echo", "echo and fdatasync", "echo rate", "memory copy", "python"
NONE = ""  # the figure is a ratio to a floor already


@dataclass(frozen=True, slots=True)
class Floors:
    """Medians. ``fdatasync_p50_us``: 1 KiB stored and synced beside the store; None when the store is on another host."""

    echo_p50_us: float
    fdatasync_p50_us: float | None
    copy_mib_per_s: float
    python_steps_per_us: float

    def of(self, kind: str) -> float | None:
        """The floor of ``kind``, in microseconds or per second like the figures that refer to it; None when not
        measured.
        """
        if kind == NONE:
            return None
        if kind == ECHO:
            return self.echo_p50_us
        if kind == ECHO_AND_SYNC:
            return None if self.fdatasync_p50_us is None else self.echo_p50_us + self.fdatasync_p50_us
        if kind == ECHO_RATE:
            return 1e6 / self.echo_p50_us
        if kind == COPY:
            return self.copy_mib_per_s
        if kind == PYTHON:
            return self.python_steps_per_us
        raise ValueError(f"there is no floor {kind!r}")

    def mean(self, other: Floors) -> Floors:
        """The mean of these floors and ``other``, measured at the other end of a run."""
        syncs = [one for one in (self.fdatasync_p50_us, other.fdatasync_p50_us) if one is not None]
        return Floors(
            (self.echo_p50_us + other.echo_p50_us) / 2,
            sum(syncs) / len(syncs) if syncs else None,
            (self.copy_mib_per_s + other.copy_mib_per_s) / 2,
            (self.python_steps_per_us + other.python_steps_per_us) / 2,
        )


def measure_floors(node: str | None) -> Floors:
    """Measure for about a second: over the transport that clients of ``node`` use, on the disk of its store."""
    directory = Directory(node)
    try:
        metadata = directory.metadata(timeout_s=10.0)
    finally:
        directory.close()
    body = os.urandom(_BODY_BYTES)
    with EchoPeer(metadata.endpoint("writer").partition("://")[0]) as peer:

        def echo() -> None:
            peer.socket.send(body)
            peer.socket.recv()

        echo_us = _median_us(echo, _ECHOES)
    sync_us = None
    if metadata.same_host:
        with contextlib.suppress(OSError), Device(metadata.store) as device:  # this user may not write to the store
            sync_us = _median_us(lambda: device.store(body), _SYNCS)
    source, target = memoryview(os.urandom(1 << 20) * (_COPY_BYTES >> 20)), memoryview(bytearray(_COPY_BYTES))

    def copy() -> None:
        target[:] = source

    copy_us = _median_us(copy, _COPIES, warm=2)
    loop_us = _median_us(_loop, _LOOPS, warm=1)
    return Floors(echo_us, sync_us, round(_COPY_BYTES / (1 << 20) / copy_us * 1e6, 1), round(_STEPS / loop_us, 3))


def _loop() -> None:
    total = 0
    for step in range(_STEPS):
        total += step


def _median_us(step: Callable[[], None], samples: int, warm: int = _WARM) -> float:
    for _ in range(warm):
        step()
    durations = []
    for _ in range(samples):
        started = time.perf_counter_ns()
        step()
        durations.append(time.perf_counter_ns() - started)
    return round(median(durations) / 1000, 2)
