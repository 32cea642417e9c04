"""The goals of the figures, for 1 KiB bodies on one machine with the ConsumeQueue dispatcher on.

:func:`judge` says whether measured figures meet them.

Latencies are multiples of a bare ZeroMQ echo in the same run, so that they mean the same on any machine. Rates are
absolute and assume a small server (two cores).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from commitmq.bench.consume import fill, measure_consume
from commitmq.bench.figures import Progress, Spread, no_progress
from commitmq.bench.floors import COPY, NONE, PYTHON
from commitmq.bench.latency import measure_latency
from commitmq.bench.produce import measure_produce
from commitmq.bench.target import BenchTopic

BODY_BYTES: Final = 1024
BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class Goal:
    """``limit`` in ``unit``; the median must be at least that, or with ``at_most`` at most. None: only reported.

    ``floor``: the floor by which a comparison with a baseline corrects (:mod:`commitmq.bench.floors`); None for a
    figure that is no result.
    """

    name: str
    unit: str
    limit: float | None
    at_most: bool = False
    floor: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal and the measured figure; ``met`` is None when there is no limit."""

    goal: Goal
    measured: Spread
    met: bool | None
    note: str


ECHO: Final = Goal("bare ZeroMQ echo, p50", "us", None)
SEND_MEMORY: Final = Goal("single send, ack memory, p50 / echo p50", "x", 1.6, at_most=True, floor=NONE)
SEND_FLUSHED: Final = Goal("single send, ack flushed, p50 / echo p50", "x", 3.0, at_most=True, floor=NONE)
BATCH_MEMORY: Final = Goal("send_batch of 1000, ack memory", "messages/s", 250_000, floor=COPY)
BATCH_FLUSHED: Final = Goal("send_batch of 1000, ack flushed", "messages/s", None, floor=COPY)
ASYNC_MEMORY: Final = Goal("send_async, ack memory", "messages/s", 60_000, floor=PYTHON)
ASYNC_FLUSHED: Final = Goal("send_async, ack flushed", "messages/s", None, floor=PYTHON)
READ_COLUMNS: Final = Goal("catch-up read, columns, every byte", "messages/s", 600_000, floor=COPY)
READ_MESSAGES: Final = Goal("catch-up read, Message objects", "messages/s", 250_000, floor=PYTHON)


def judge(goal: Goal, values: list[float], note: str = "") -> Outcome:
    """The outcome of ``goal`` from the figures of several runs."""
    measured = Spread.of(values)
    met = None
    if goal.limit is not None:
        met = measured.median <= goal.limit if goal.at_most else measured.median >= goal.limit
    return Outcome(goal, measured, met, note)


def measure_all(
    node: str | None,
    *,
    repeat: int = 3,
    count: int = 4000,
    messages: int = 200_000,
    limit_s: float = 60.0,
    begin: Callable[[str, int], Progress] = lambda _name, _total: no_progress,
) -> Iterator[Outcome]:
    """Measure everything, one outcome after the other. ``begin`` gets each measurement's name and size.

    Every measurement has a fresh topic; ``limit_s`` bounds each run of it.
    """
    with BenchTopic(node) as topic:
        total = count * repeat
        progress = begin("latency", total)
        latencies = [
            measure_latency(topic, body_bytes=BODY_BYTES, count=count, limit_s=limit_s, progress=progress)
            for _ in range(repeat)
        ]
    over = f"over {latencies[0].transport}"
    yield judge(ECHO, [one.echo.p50_us for one in latencies], over)
    for index, goal in enumerate((SEND_MEMORY, SEND_FLUSHED)):
        sends = [one.sends[index] for one in latencies]
        p50 = Spread.of([one.send.p50_us for one in sends]).median
        p99 = Spread.of([one.send.p99_us for one in sends]).median
        note = f"p50 {p50:.0f} us, p99 {p99:.0f} us"
        syncs = [one.device.p50_us for one in latencies if one.device is not None]
        if goal is SEND_FLUSHED and syncs:
            note += f"; fdatasync alone {Spread.of(syncs).median:.0f} us"
        yield judge(goal, [one.ratio_p50 for one in sends], note)
    for goal, mode, ack in (
        (BATCH_MEMORY, "batch", "memory"),
        (BATCH_FLUSHED, "batch", "flushed"),
        (ASYNC_MEMORY, "async", "memory"),
        (ASYNC_FLUSHED, "async", "flushed"),
    ):
        with BenchTopic(node) as topic:
            progress = begin(goal.name, messages * repeat)
            runs = [
                measure_produce(
                    topic,
                    mode=mode,
                    ack=ack,
                    body_bytes=BODY_BYTES,
                    messages=messages,
                    batch=BATCH,
                    limit_s=limit_s,
                    progress=progress,
                )
                for _ in range(repeat)
            ]
        yield judge(goal, [one.messages_per_s for one in runs], f"until visible, {runs[0].messages} messages a run")
    with BenchTopic(node) as topic:
        expected = fill(
            topic,
            messages=messages,
            body_bytes=BODY_BYTES,
            limit_s=limit_s,
            progress=begin("writing the messages that are read next", messages),
        )
        for goal, form in ((READ_COLUMNS, "columns"), (READ_MESSAGES, "messages")):
            progress = begin(goal.name, expected.messages * repeat)
            reads = [
                measure_consume(topic, form=form, expected=expected, limit_s=limit_s, progress=progress)
                for _ in range(repeat)
            ]
            yield judge(goal, [one.messages_per_s for one in reads], f"{reads[0].messages} messages a run")
