"""Measures sends that meet the end of a segment, with segments made ahead and without.

Two nodes of its own, on the same disk, take turns roll by roll: other work of the machine then slows both, and the
difference is the effect of preallocation. Most of a segment is filled untimed. The sends on both sides of its end are
timed one by one, and the positions in their answers show which of them was the first in a new segment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.bench.target import Clock, Percentiles, Progress, no_progress
from commitmq.client.admin import Admin
from commitmq.client.producer import Producer
from commitmq.errors import CommitMQError, NodeUnavailableError
from commitmq.testing.node_process import NodeProcess

KINDS: Final = ("single", "batch")
_TOPIC: Final = "rolls"
_SENDS_BEFORE: Final = 50
_SENDS_AFTER: Final = 50
_FILL_BYTES: Final = 1 << 20
# More than a record needs beside its body, so that filling ends before the timed sends should begin.
_RECORD_OVERHEAD_BYTES: Final = 300
_KEEP_SEGMENTS: Final = 2
_START_S: Final = 30.0
_QUIET_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two nodes."""

    name: str
    preallocate_segments: int


SIDES: Final = (Side("preallocated", 2), Side("made when needed", 0))


@dataclass(frozen=True, slots=True)
class RollLatency:
    """Sends of one kind to one node. ``sends``: all timed sends; ``at_rolls``: those that met a segment's end."""

    side: str
    ack: str
    kind: str
    sends: Percentiles
    at_rolls: Percentiles

    @property
    def ratio_p999(self) -> float:
        """The p99.9 at rolls divided by the p99.9 of all sends."""
        return round(self.at_rolls.p999_us / self.sends.p999_us, 3)


@dataclass(frozen=True, slots=True)
class RollsResult:
    """One comparison; a batch is ``batch`` messages."""

    segment_bytes: int
    body_bytes: int
    batch: int
    settings: tuple[str, ...]
    latencies: tuple[RollLatency, ...]
    cut_short: bool


@dataclass(slots=True)
class _Samples:
    """Durations in nanoseconds."""

    sends: list[int] = field(default_factory=list)
    at_rolls: list[int] = field(default_factory=list)


def measure_rolls(
    folder: Path | None = None,
    *,
    segment_bytes: int = 16 << 20,
    body_bytes: int = 1024,
    batch: int = 32,
    rolls: int = 20,
    acks: Sequence[str] = ("memory", "flushed"),
    settings: Sequence[str] = (),
    limit_s: float = 300.0,
    progress: Progress = no_progress,
) -> RollsResult:
    """Time ``rolls`` rolls of each ack level and kind of send, on each of the two nodes.

    The stores are created in ``folder`` (the system's folder for temporary files) and removed. ``settings`` are further
    ``section.key=value`` of both nodes. After ``limit_s`` seconds it stops early, after at least one roll of each.
    Raises NodeUnavailableError when a node does not start, SendError when a send fails, ValueError for sizes that do
    not fit each other.
    """
    if rolls < 1 or batch < 1:
        raise ValueError("rolls and batch must be at least 1")
    timed = (_SENDS_BEFORE + _SENDS_AFTER) * batch * (body_bytes + _RECORD_OVERHEAD_BYTES)
    if segment_bytes < 2 * timed:
        raise ValueError(
            f"a segment of {segment_bytes} bytes is too small to time {_SENDS_BEFORE + _SENDS_AFTER} batches of"
            f" {batch} messages around its end; {2 * timed} bytes would do"
        )
    found = {(side.name, ack, kind): _Samples() for side in SIDES for ack in acks for kind in KINDS}
    clock = Clock(limit_s)
    done = 0
    with contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="commitmq-rolls-", dir=folder))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        nodes = [
            stack.enter_context(_RollingNode(home / str(number), side, segment_bytes, body_bytes, settings))
            for number, side in enumerate(SIDES)
        ]
        while done < rolls and not (done and clock.over()):
            for ack in acks:
                for kind in KINDS:
                    # The nodes take turns in being first.
                    for node in nodes if done % 2 else reversed(nodes):
                        node.roll(ack, batch if kind == "batch" else 0, found[node.side.name, ack, kind])
            done += 1
            progress(1)
    return RollsResult(
        segment_bytes=segment_bytes,
        body_bytes=body_bytes,
        batch=batch,
        settings=tuple(settings),
        latencies=tuple(
            RollLatency(*key, Percentiles.of(samples.sends), Percentiles.of(samples.at_rolls))
            for key, samples in found.items()
        ),
        cut_short=done < rolls,
    )


class _RollingNode:
    """A node on a fresh store, and a producer that knows the distance to the next segment."""

    def __init__(self, folder: Path, side: Side, segment_bytes: int, body_bytes: int, settings: Sequence[str]) -> None:
        folder.mkdir()
        self.side = side
        self._segment_bytes = segment_bytes
        self._body = os.urandom(body_bytes)
        self._process = NodeProcess(
            folder / "store",
            "profile=server",
            f"commit_log.segment_bytes={segment_bytes}",
            *settings,
            f"commit_log.preallocate_segments={side.preallocate_segments}",
        )
        self._end = 0

    def __enter__(self) -> _RollingNode:
        started = self._process.start()
        if started.returncode != 0:
            self._process.end()
            raise NodeUnavailableError(f"a node to be measured did not start: {started.stderr.strip()}")
        self._admin = Admin(self._process.address)
        self._producer = Producer(self._process.address, timeout_s=_START_S)
        self._admin.topic_create(_TOPIC, 1)
        return self

    def __exit__(self, *_error: object) -> None:
        self._producer.close()
        self._admin.close()
        self._process.end()

    def roll(self, ack: str, batch: int, samples: _Samples) -> None:
        """Fill up the segment, then time sends (``batch`` messages each, 0 for a single one) across its end."""
        send = self._sender(ack, batch)
        step = max(batch, 1) * (len(self._body) + _RECORD_OVERHEAD_BYTES)
        self._fill(_SENDS_BEFORE * step)
        self._wait_until_quiet()
        now = time.perf_counter_ns
        before = self._end // self._segment_bytes
        left = -1  # sends that remain after the roll, once it was met
        while left:
            started = now()
            self._end = send()
            duration = now() - started
            samples.sends.append(duration)
            left -= 1
            if left < 0 and self._end // self._segment_bytes != before:
                samples.at_rolls.append(duration)
                left = _SENDS_AFTER
        self._forget()

    def _sender(self, ack: str, batch: int) -> Callable[[], int]:
        """Sends, and returns the position of the last message."""
        producer, body = self._producer, self._body
        if not batch:
            return lambda: producer.send(_TOPIC, body, ack=ack).physical_offset
        bodies = [body] * batch
        return lambda: producer.send_batch(_TOPIC, bodies, ack=ack)[batch - 1].physical_offset

    def _fill(self, leave_bytes: int) -> None:
        """Send until a little more than ``leave_bytes`` are left of the segment."""
        size = len(self._body) + _RECORD_OVERHEAD_BYTES
        while True:
            room = self._segment_bytes - self._end % self._segment_bytes - leave_bytes
            count = min(room, _FILL_BYTES) // size
            if count < 1:
                return
            self._end = self._producer.send_batch(_TOPIC, [self._body] * count, ack="flushed").end_offset

    def _wait_until_quiet(self) -> None:
        """Wait a moment while the node's other processes finish the work of the filling: it is not part of the
        measurement.
        """
        time.sleep(_QUIET_S)

    def _forget(self) -> None:
        """Let the node delete old segments, so that any number of rolls takes the disk space of a few segments."""
        if self._end // self._segment_bytes > 2 * _KEEP_SEGMENTS:
            with contextlib.suppress(CommitMQError):
                self._admin.expire(keep_bytes=_KEEP_SEGMENTS * self._segment_bytes)
