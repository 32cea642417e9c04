"""``commitmq bench``: measurements of a running node; ``rolls``, ``restart`` and ``trace-points`` run nodes of their own.

The others are ``produce``, ``consume``, ``latency``, ``memory`` and ``all``. Results are printed or written as JSON;
they can be saved as a baseline, or compared with one.
"""

from __future__ import annotations

import click

from commitmq.cli.bench.everything import all_
from commitmq.cli.bench.own_nodes import restart, rolls, trace_points
from commitmq.cli.bench.reads import consume
from commitmq.cli.bench.sends import latency, memory, produce


@click.group()
def bench() -> None:
    """Measure a node: produce, consume, latency, and a memory topic beside a durable one. With nodes of its own: the
    cost of a segment's end, a start after kill -9, and where the time of a send goes.

    Each measurement uses a topic of its own, which is deleted afterwards; its messages take room in the log until their
    segments expire.

    --save FILE keeps the figures of a measurement, with the raw speed of the machine at that moment (a bare ZeroMQ
    echo, fdatasync, a memory copy, a Python loop). --compare FILE shows how a later measurement compares, as measured
    and corrected by how much the machine itself became faster or slower; with --fail-below RATIO it exits with 1 when a
    figure fell below that.
    """


for _command in (latency, produce, consume, memory, rolls, restart, trace_points, all_):
    bench.add_command(_command)
