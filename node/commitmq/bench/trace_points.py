"""Measures where the time of one send goes: its trace points in client, writer and flush process, on a node of its own.

The node runs with :mod:`commitmq.trace_points` on, which costs it some microseconds a send: the result shows shares, not
how long a send takes. ``commitmq bench latency`` measures that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from commitmq import trace_points
from commitmq.bench.figures import Percentiles, Progress, no_progress
from commitmq.client.admin import Admin
from commitmq.client.producer import Producer
from commitmq.errors import CommitMQError, NodeUnavailableError
from commitmq.testing.node_process import NodeProcess
from commitmq.trace_points import TracePoint

_TOPIC: Final = "trace-points"
_WARM: Final = 200
_SEGMENT_BYTES: Final = 64 << 20

# The trace points of a send in their order, and the step before each of them.
_MEMORY: Final = (
    (TracePoint.CALLED, ""),
    (TracePoint.ENCODED, "client: checks, encodes the header"),
    (TracePoint.HANDED_OVER, "client: hands over to the socket"),
    (TracePoint.W_AWAKE, "socket, the writer wakes up"),
    (TracePoint.W_RECEIVED, "writer: takes the frames"),
    (TracePoint.W_APPEND, "writer: checks, encodes the record"),
    (TracePoint.W_APPENDED, "writer: stores the record"),
    (TracePoint.W_DONE, "writer: publishes, builds the answer"),
)
_FLUSHED: Final = (
    (TracePoint.F_SYNC, "to the sync: the writer's own, or flush wakes up"),
    (TracePoint.F_SYNCED, "fdatasync, publishes"),
)
_ANSWER: Final = (
    (TracePoint.W_ANSWER, "writer: begins the answer"),
    (TracePoint.W_ANSWERED, "writer: hands over to the socket"),
    (TracePoint.ANSWERED, "socket, the client wakes up"),
    (TracePoint.RETURNED, "client: the result"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """The step between two trace points; ``share`` of all steps' medians."""

    name: str
    time: Percentiles
    share: float


@dataclass(frozen=True, slots=True)
class TracePointsResult:
    """``sends`` that were seen at all trace points, of one ack level. ``total``: from call to return, tracing included."""

    ack: str
    body_bytes: int
    sends: int
    steps: tuple[Step, ...]
    total: Percentiles


def measure_trace_points(
    folder: Path | None = None,
    *,
    body_bytes: int = 1024,
    count: int = 2000,
    acks: Sequence[str] = ("memory", "flushed"),
    settings: Sequence[str] = (),
    progress: Progress = no_progress,
) -> list[TracePointsResult]:
    """Follow ``count`` sends of each ack level, one at a time.

    The store is created in ``folder`` (the system's folder for temporary files) and removed. ``settings`` are further
    ``section.key=value`` of the node. Raises NodeUnavailableError when it does not start, SendError when a send fails.
    """
    if count < 1:
        raise ValueError("count must be at least 1")
    results = []
    for ack in acks:
        home = Path(tempfile.mkdtemp(prefix="commitmq-trace-points-", dir=folder))
        try:
            _follow(home, ack, os.urandom(body_bytes), count, settings, progress)
            results.append(_result(ack, body_bytes, trace_points.read(home / "events")))
        finally:
            shutil.rmtree(home, ignore_errors=True)
    return results


def _follow(home: Path, ack: str, body: bytes, count: int, settings: Sequence[str], progress: Progress) -> None:
    events = home / "events"
    events.mkdir()
    node = NodeProcess(home / "store", "profile=server", f"commit_log.segment_bytes={_SEGMENT_BYTES}", *settings)
    with contextlib.ExitStack() as stack:
        stack.callback(node.end)
        started = node.start(**{trace_points.VARIABLE: str(events)})
        if started.returncode != 0:
            raise NodeUnavailableError(f"the node to be measured did not start: {started.stderr.strip()}")
        with Admin(node.address) as admin:
            admin.topic_create(_TOPIC, 1)
        producer = stack.enter_context(Producer(node.address, ack=ack))
        for _ in range(_WARM):
            producer.send(_TOPIC, body)
        recorder = trace_points.Recorder(events, "client")
        lane = producer._lanes.writer.lane
        watched: list[object] = []
        for done in range(1, count + 1):
            # A send goes over either socket, and a lost connection is followed by another one.
            for socket in (lane.local, lane.channel):
                if socket is not None and socket not in watched:
                    recorder.around(socket, "send", TracePoint.ENCODED, TracePoint.HANDED_OVER)
                    recorder.around(socket, "receive", None, TracePoint.ANSWERED)
                    watched.append(socket)
            recorder.note(TracePoint.CALLED)
            producer.send(_TOPIC, body)
            recorder.note(TracePoint.RETURNED)
            if done % 100 == 0:
                progress(100)
        progress(count % 100)


def _result(ack: str, body_bytes: int, events: list[tuple[int, int]]) -> TracePointsResult:
    """``events`` of all processes in order of time; between a call and its return there is only one send."""
    places = (*_MEMORY, *(_FLUSHED if ack == "flushed" else ()), *_ANSWER)
    order = [point for point, _ in places]
    gaps: list[list[int]] = [[] for _ in order[1:]]
    totals = []
    send: list[tuple[int, int]] = []
    awake = 0
    for at, point in events:
        if point == TracePoint.CALLED:
            send = []
        if point == TracePoint.W_AWAKE:
            awake = at
        send.append((at, point))
        if point != TracePoint.RETURNED:
            continue
        times = _times(order, send, awake)
        if times is not None:
            totals.append(times[-1] - times[0])
            for gap, (earlier, later) in zip(gaps, pairwise(times), strict=True):
                gap.append(later - earlier)
    if not totals:
        raise CommitMQError("no send was seen at all of its trace points")
    steps = [(name, Percentiles.of(gap)) for (_, name), gap in zip(places[1:], gaps, strict=True)]
    whole = sum(figures.p50_us for _, figures in steps) or 1.0
    return TracePointsResult(
        ack,
        body_bytes,
        len(totals),
        tuple(Step(name, figures, round(figures.p50_us / whole, 3)) for name, figures in steps),
        Percentiles.of(totals),
    )


def _times(order: list[TracePoint], send: list[tuple[int, int]], awake: int) -> list[int] | None:
    """When one send was at each trace point; None when it was not seen at one of them.

    A trace point may be passed several times (once per frame, or in a flush for another sender). Then the first time after
    the previous trace point counts; for the hand-over the time of the last frame, for the waking the last time before the
    request was taken. A client that loses its core right after the hand-over stamps it late, so the hand-over is never
    later than the writer's taking of the request.
    """
    times: list[int] = []
    taken = next((at for at, one in send if one == TracePoint.W_RECEIVED), awake)
    for point in order:
        found = [at for at, one in send if one == point]
        if point == TracePoint.HANDED_OVER:
            when = max(min(found[-1], taken), times[-1]) if found and times else None
        elif point == TracePoint.W_AWAKE:
            # The writer was awake when the request came: then no wake-up was needed.
            when = max([at for at in found if at <= taken] or [0])
            when = min(max(when, times[-1]), taken)
        else:
            when = next((at for at in found if not times or at >= times[-1]), None)
        if when is None:
            return None
        times.append(when)
    return times
