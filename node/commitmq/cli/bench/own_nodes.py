"""``commitmq bench rolls|restart|trace-points``: measurements that run nodes of their own."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.bench.options import body_option
from commitmq.cli.bench.telling import print_machine, progress_bars, say_cut_short
from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import json_option, print_json, print_table
from commitmq.cli.quantity import Quantity
from commitmq.cli.quantity import seconds as time_in_seconds


@click.command(cls=NodeVerb, short_help="Sends that meet the end of a segment, with preallocation and without.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where the two stores are made, on the disk to be measured.  [default: the folder for temporary files]",
)
@body_option
@click.option("--batch", type=click.IntRange(2, 10_000), default=32, show_default=True, help="Messages a batch.")
@click.option(
    "--rolls", "count", type=click.IntRange(1, 10**9), default=20, show_default=True, help="Rolls of each kind."
)
@click.option("--ack", type=click.Choice(["memory", "flushed", "both"]), default="both", show_default=True)
@click.option(
    "--segment-bytes", type=Quantity("bytes", low=65536), default=16 << 20, show_default=True, help="Size of a segment."
)
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of both nodes.")
@click.option("--seconds", type=time_in_seconds(0.1), default=300.0, show_default=True, help="Stop after this long.")
@json_option
def rolls(
    folder: Path | None,
    body: int,
    batch: int,
    count: int,
    ack: str,
    segment_bytes: int,
    settings: tuple[str, ...],
    seconds: float,
    as_json: bool,
) -> None:
    """Sends that meet the end of a segment, with segments made ahead (preallocation) and made when needed.

    Starts two nodes of its own, which take turns on the same disk and are removed afterwards.
    """
    from commitmq.bench.figures import machine, to_json
    from commitmq.bench.rolls import measure_rolls

    host = machine()
    with progress_bars() as begin:
        result = measure_rolls(
            folder,
            segment_bytes=segment_bytes,
            body_bytes=body,
            batch=batch,
            rolls=count,
            acks=("memory", "flushed") if ack == "both" else (ack,),
            settings=settings,
            limit_s=seconds,
            progress=begin("rolls", count),
        )
    if as_json:
        print_json({"bench": "rolls", "machine": host, "result": to_json(result)})
        return
    print_machine(host)
    click.echo(f"segments of {segment_bytes} bytes, {body} bytes a body, {batch} messages a batch; microseconds")
    rows = []
    for one in result.latencies:
        for which, figures in (("all", one.sends), ("at rolls", one.at_rolls)):
            values = (figures.p50_us, figures.p99_us, figures.p999_us, figures.max_us)
            rows.append((one.kind, one.ack, one.side, which, figures.count, *(f"{value:.1f}" for value in values)))
    print_table(
        ("sends", "ack", "segments", "", "count", "p50", "p99", "p99.9", "max"), sorted(rows), left=(0, 1, 2, 3)
    )
    say_cut_short(result.cut_short, seconds)


@click.command(cls=NodeVerb, short_help="Starts after kill -9, of a large store beside a small one.")
@click.option(
    "--gib", type=Quantity("gib", low=0.01, whole=False), default=1.0, show_default=True, help="GiB of the log."
)
@click.option("--topics", type=click.IntRange(1, 10_000), default=100, show_default=True)
@click.option("--queues", type=click.IntRange(1, 4096), default=10, show_default=True, help="Queues of each topic.")
@click.option(
    "--tail-mib", type=Quantity("mib"), default=256, show_default=True, help="MiB of the store that are never flushed."
)
@body_option
@click.option("--cold", is_flag=True, help="Drop the store from the page cache before each start, as a boot does.")
@click.option("--repeat", type=click.IntRange(1, 100), default=3, show_default=True, help="Restarts.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Make the stores in this folder; it needs the log's size and 4 GiB more.  [default: a temporary one]",
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One key of the nodes; repeatable.")
@json_option
def restart(
    gib: float,
    topics: int,
    queues: int,
    tail_mib: int,
    body: int,
    cold: bool,
    repeat: int,
    folder: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """How long a node takes to serve again after kill -9, beside a node with hardly any log.

    Runs nodes of its own on stores of its own, which are removed. Every acknowledged message must be there after each
    start.
    """
    from commitmq.bench.figures import machine, to_json
    from commitmq.bench.restart import measure_restart

    host = machine()
    with progress_bars() as begin:
        runs = measure_restart(
            folder,
            log_bytes=int(gib * (1 << 30)),
            topics=topics,
            queues=queues,
            tail_bytes=tail_mib << 20,
            body_bytes=body,
            cold=cold,
            repeat=repeat,
            settings=overrides,
            begin=begin,
        )
    if as_json:
        print_json({"bench": "restart", "machine": host, "runs": [to_json(run) for run in runs]})
        return
    print_machine(host)
    click.echo(
        f"{gib:g} GiB in {topics * queues} queues, {tail_mib} MiB of them not flushed, killed, "
        f"{'page cache dropped' if cold else 'page cache warm'}; seconds since the command was started"
    )
    print_table(
        ("", "ready", "first ack", "all readable", "recovery", "writer", "checked MiB", "plain read s"),
        [
            (
                one.name,
                f"{one.ready_s:.2f}",
                f"{one.acked_s:.2f}",
                f"{one.readable_s:.2f}",
                f"{one.steps.get('recovery', 0):.2f}",
                f"{one.steps.get('writer', 0):.2f}",
                f"{one.recovery.get('scanned_bytes', 0) / (1 << 20):.0f}",
                f"{one.plain_read_s:.2f}",
            )
            for one in runs
        ],
    )


@click.command(cls=NodeVerb, short_help="Where the time of a single send goes, point by point.")
@body_option
@click.option(
    "--count", type=click.IntRange(1, 15_000), default=2000, show_default=True, help="Sends of each ack level."
)
@click.option("--ack", type=click.Choice(["memory", "flushed", "both"]), default="both", show_default=True)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where the store is made.  [default: the folder for temporary files]",
)
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of the node.")
@json_option
def trace_points(
    body: int, count: int, ack: str, folder: Path | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Where the time of a single synchronous send goes: client, socket, writer, flush, and the way back.

    Starts a node of its own that notes when a send passes each trace point. Noting takes a few microseconds itself, so the
    result shows shares; `bench latency` measures how long a send takes.
    """
    from commitmq.bench.figures import machine, to_json
    from commitmq.bench.trace_points import measure_trace_points

    host = machine()
    acks = ("memory", "flushed") if ack == "both" else (ack,)
    with progress_bars() as begin:
        advance = begin("trace points", count * len(acks))
        results = measure_trace_points(
            folder, body_bytes=body, count=count, acks=acks, settings=settings, progress=advance
        )
    if as_json:
        print_json({"bench": "trace_points", "machine": host, "results": [to_json(one) for one in results]})
        return
    print_machine(host)
    for result in results:
        click.echo(f"ack {result.ack}: {result.sends} sends of {body} bytes, microseconds")
        rows = [
            (one.name, f"{one.time.p50_us:.1f}", f"{one.time.p90_us:.1f}", f"{one.time.p99_us:.1f}", f"{one.share:.0%}")
            for one in result.steps
        ]
        total = result.total
        rows.append(("from call to return", f"{total.p50_us:.1f}", f"{total.p90_us:.1f}", f"{total.p99_us:.1f}", ""))
        print_table(("", "p50", "p90", "p99", "share"), rows)
