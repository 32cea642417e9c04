"""``commitmq bench produce|consume|latency|memory|all|rolls|restart``: measurements of a running node (rolls and restart: of
nodes of their own), printed or as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from commitmq.cli.output import json_option, node_option, print_json, print_table

if TYPE_CHECKING:
    from commitmq.bench.figures import Progress, Spread
    from commitmq.bench.goals import Outcome

_Function = TypeVar("_Function", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure a node: produce, consume, latency, and a memory topic beside a durable one; or, with nodes of its own, what
    the end of a segment costs, and a start after kill -9.

    Each measurement uses a topic of its own, which is deleted afterwards; its messages take room in the log until their
    segments expire.
    """


def _common(function: _Function) -> _Function:
    """The options that all measurements share."""
    for decorate in (
        node_option,
        json_option,
        click.option(
            "--seconds",
            type=click.FloatRange(min=0.1),
            default=60.0,
            show_default=True,
            help="Stop a run after this long; its figures are then of fewer messages.",
        ),
        click.option("--repeat", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs."),
    ):
        function = decorate(function)
    return function


_topic_option = click.option("--topic", metavar="TOPIC", help="Use this topic and keep it.  [default: a fresh one]")
_body_option = click.option(
    "--body", type=click.IntRange(1, 4 * 1024 * 1024), default=1024, show_default=True, help="Bytes of each body."
)


@bench.command(short_help="Single synchronous sends, beside a bare ZeroMQ echo.")
@_body_option
@click.option("--count", type=click.IntRange(min=1), default=4000, show_default=True, help="Sends of each ack level.")
@click.option("--ack", type=click.Choice(["memory", "flushed", "both"]), default="both", show_default=True)
@_topic_option
@_common
def latency(
    body: int, count: int, ack: str, topic: str | None, repeat: int, seconds: float, as_json: bool, node: str
) -> None:
    """Single synchronous sends, beside a bare ZeroMQ echo of the same size.

    Echo and sends take turns in short rounds, so that their ratio holds on a busy machine too.
    """
    from commitmq.bench.figures import Spread, machine, to_json
    from commitmq.bench.latency import measure_latency
    from commitmq.bench.target import BenchTopic

    host = machine()
    acks = ("memory", "flushed") if ack == "both" else (ack,)
    with BenchTopic(node, topic) as target, _progress() as begin:
        advance = begin("latency", count * repeat)
        runs = [
            measure_latency(target, body_bytes=body, count=count, acks=acks, limit_s=seconds, progress=advance)
            for _ in range(repeat)
        ]
    ratios = {one: Spread.of([run.sends[at].ratio_p50 for run in runs]) for at, one in enumerate(acks)}
    if as_json:
        summary = {"ratio_p50": {one: to_json(ratio) for one, ratio in ratios.items()}}
        print_json({"bench": "latency", "machine": host, "runs": [to_json(run) for run in runs], "summary": summary})
        return
    lists = [[run.echo for run in runs], *([run.sends[at].send for run in runs] for at in range(len(acks)))]
    names = [f"echo ({runs[0].transport})", *(f"send, {one}" for one in acks)]
    devices = [run.device for run in runs if run.device is not None]
    if devices:
        lists.append(devices)
        names.append("fdatasync alone")
    columns = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")
    rows = []
    for name, results in zip(names, lists, strict=True):
        medians = (Spread.of([getattr(one, column) for one in results]).median for column in columns)
        rows.append((name, *(f"{value:.1f}" for value in medians)))
    _print_machine(host)
    click.echo(f"{sum(one.count for one in lists[0])} samples of {body} bytes each, microseconds, {_median_of(repeat)}")
    print_table(("", "p50", "p90", "p99", "p99.9", "max"), rows)
    for one, ratio in ratios.items():
        click.echo(f"send, {one}: p50 is {_spread(ratio, '.2f')} times the echo's")
    _say_cut_short(any(run.cut_short for run in runs), seconds)


@bench.command(short_help="Messages a second from one producer.")
@click.option(
    "--mode",
    type=click.Choice(["batch", "async", "sync"]),
    default="batch",
    show_default=True,
    help="send_batch, pipelined send_async, or one send after the other.",
)
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Messages a batch.")
@_body_option
@click.option("--messages", type=click.IntRange(min=1), default=200_000, show_default=True, help="Messages a run.")
@click.option("--ack", type=click.Choice(["flushed", "memory"]), default="flushed", show_default=True)
@click.option("--queues", type=click.IntRange(1, 4096), default=4, show_default=True, help="Queues of a fresh topic.")
@click.option(
    "--topics",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="Fresh topics; with more than one, batches go to all queues of all topics in turn.",
)
@_topic_option
@_common
def produce(
    mode: str,
    batch: int,
    body: int,
    messages: int,
    ack: str,
    queues: int,
    topics: int,
    topic: str | None,
    repeat: int,
    seconds: float,
    as_json: bool,
    node: str,
) -> None:
    """Messages a second from one producer; the clock stops when a consumer could read the last one."""
    from commitmq.bench.figures import Spread, machine, to_json
    from commitmq.bench.produce import measure_produce
    from commitmq.bench.target import BenchTopic

    if topics > 1 and (mode != "batch" or topic is not None):
        raise click.UsageError("--topics is for batches to fresh topics: leave out --mode and --topic")
    host = machine()
    with BenchTopic(node, topic, queues=queues, topics=topics) as target, _progress() as begin:
        advance = begin(f"produce ({mode})", messages * repeat)
        runs = [
            measure_produce(
                target,
                mode=mode,
                ack=ack,
                body_bytes=body,
                messages=messages,
                batch=batch,
                limit_s=seconds,
                progress=advance,
            )
            for _ in range(repeat)
        ]
    rate = Spread.of([run.messages_per_s for run in runs])
    if as_json:
        summary = {"messages_per_s": to_json(rate)}
        print_json({"bench": "produce", "machine": host, "runs": [to_json(run) for run in runs], "summary": summary})
        return
    _print_machine(host)
    click.echo(f"{mode}, ack {ack}, {body} bytes a body{f', {batch} messages a batch' if mode == 'batch' else ''}")
    if topics > 1:
        click.echo(f"over {topics * queues} queues: {topics} topics with {queues} each")
    print_table(
        ("messages", "seconds to the last ack", "until visible", "messages/s", "MiB/s"),
        [
            (one.messages, f"{one.acked_seconds:.3f}", f"{one.seconds:.3f}", f"{one.messages_per_s:.0f}", one.mib_per_s)
            for one in runs
        ],
        left=(),
    )
    click.echo(f"{_spread(rate, '.0f')} messages/s, {_median_of(repeat)}")
    _say_cut_short(any(run.cut_short for run in runs), seconds)


@bench.command(short_help="Messages a second of one consumer that catches up.")
@click.option(
    "--as",
    "form",
    type=click.Choice(["columns", "messages"]),
    default="columns",
    show_default=True,
    help="columns: arrays, and a checksum of every body byte. messages: a Message object with its body for each.",
)
@click.option(
    "--via",
    type=click.Choice(["auto", "ranges", "bytes"]),
    default="auto",
    show_default=True,
    help="How bodies get here: ranges maps the node's files, bytes has them sent; auto is ranges on the node's host.",
)
@_body_option
@click.option(
    "--messages",
    type=click.IntRange(min=1),
    help="Messages to write first and read in each run; with --topic, how many of it to read.  "
    "[default: 200000, with --topic all]",
)
@_topic_option
@_common
def consume(
    form: str,
    via: str,
    body: int,
    messages: int | None,
    topic: str | None,
    repeat: int,
    seconds: float,
    as_json: bool,
    node: str,
) -> None:
    """Messages a second of one consumer that catches up from the beginning.

    Reads what it has written itself, and checks it; with --topic what is there, untouched.
    """
    from commitmq.bench.consume import fill, measure_consume
    from commitmq.bench.figures import Spread, machine, to_json
    from commitmq.bench.target import BenchTopic

    host = machine()
    with BenchTopic(node, topic) as target, _progress() as begin:
        expected = None
        if topic is None:
            wanted = messages or 200_000
            advance = begin("writing", wanted)
            expected = fill(target, messages=wanted, body_bytes=body, limit_s=seconds, progress=advance)
        advance = begin(
            f"consume ({form})", (expected.messages if expected else messages or target.readable()) * repeat
        )
        runs = [
            measure_consume(
                target,
                form=form,
                mode=via,
                messages=expected.messages if expected else messages,
                expected=expected,
                limit_s=seconds,
                progress=advance,
            )
            for _ in range(repeat)
        ]
    rate = Spread.of([run.messages_per_s for run in runs])
    if as_json:
        summary = {"messages_per_s": to_json(rate)}
        print_json({"bench": "consume", "machine": host, "runs": [to_json(run) for run in runs], "summary": summary})
        return
    _print_machine(host)
    click.echo(f"catch-up read as {form}, via {via}{', content checked' if all(run.checked for run in runs) else ''}")
    print_table(
        ("messages", "seconds", "messages/s", "MiB/s of bodies"),
        [(one.messages, f"{one.seconds:.3f}", f"{one.messages_per_s:.0f}", one.mib_per_s) for one in runs],
        left=(),
    )
    click.echo(f"{_spread(rate, '.0f')} messages/s, {_median_of(repeat)}")
    _say_cut_short(any(run.cut_short for run in runs), seconds)


@bench.command(short_help="A memory topic beside a durable one: batches and single sends.")
@_body_option
@click.option("--messages", type=click.IntRange(min=1), default=100_000, show_default=True, help="Messages a run.")
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Messages a batch.")
@click.option("--count", type=click.IntRange(min=1), default=2000, show_default=True, help="Single sends of each kind.")
@_common
def memory(
    body: int, messages: int, batch: int, count: int, repeat: int, seconds: float, as_json: bool, node: str
) -> None:
    """A memory topic beside a durable one: batches and single sends, which take turns in one run."""
    from commitmq.bench.figures import machine, to_json
    from commitmq.bench.memory import KINDS, measure_memory

    host = machine()
    with _progress() as begin:
        advance = begin("memory", len(KINDS) * messages * repeat + count)
        result = measure_memory(
            node,
            body_bytes=body,
            messages=messages,
            batch=batch,
            count=count,
            repeat=repeat,
            limit_s=seconds,
            progress=advance,
        )
    if as_json:
        print_json({"bench": "memory", "machine": host, "result": to_json(result)})
        return
    _print_machine(host)
    click.echo(f"{body} bytes a body, {batch} messages a batch, {_median_of(repeat)}")
    print_table(
        ("", "batches: messages/s", "single: p50 us", "p99 us"),
        [
            (one.name, _spread(one.messages_per_s, ".0f"), f"{one.single.p50_us:.1f}", f"{one.single.p99_us:.1f}")
            for one in result.kinds
        ],
    )
    click.echo(
        f"the memory topic has {result.rate_ratio} times the rate and {result.p50_ratio} times the p50 of"
        " the durable one with ack flushed"
    )
    _say_cut_short(result.cut_short, seconds)


@bench.command(short_help="Sends that meet the end of a segment, with preallocation and without.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where the two stores are made, on the disk to be measured.  [default: the folder for temporary files]",
)
@_body_option
@click.option("--batch", type=click.IntRange(2, 10_000), default=32, show_default=True, help="Messages a batch.")
@click.option("--rolls", "count", type=click.IntRange(min=1), default=20, show_default=True, help="Rolls of each kind.")
@click.option("--ack", type=click.Choice(["memory", "flushed", "both"]), default="both", show_default=True)
@click.option(
    "--segment-bytes", type=click.IntRange(min=65536), default=16 << 20, show_default=True, help="Size of a segment."
)
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of both nodes.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=300.0, show_default=True, help="Stop after this long."
)
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
    with _progress() as begin:
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
    _print_machine(host)
    click.echo(f"segments of {segment_bytes} bytes, {body} bytes a body, {batch} messages a batch; microseconds")
    rows = []
    for one in result.latencies:
        for which, figures in (("all", one.sends), ("at rolls", one.at_rolls)):
            values = (figures.p50_us, figures.p99_us, figures.p999_us, figures.max_us)
            rows.append((one.kind, one.ack, one.side, which, figures.count, *(f"{value:.1f}" for value in values)))
    print_table(
        ("sends", "ack", "segments", "", "count", "p50", "p99", "p99.9", "max"), sorted(rows), left=(0, 1, 2, 3)
    )
    _say_cut_short(result.cut_short, seconds)


@bench.command(short_help="Starts after kill -9, of a large store beside a small one.")
@click.option("--gib", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="GiB of the log.")
@click.option("--topics", type=click.IntRange(1, 10_000), default=100, show_default=True)
@click.option("--queues", type=click.IntRange(1, 4096), default=10, show_default=True, help="Queues of each topic.")
@click.option(
    "--tail-mib", type=click.IntRange(min=0), default=256, show_default=True, help="MiB of it that are never flushed."
)
@_body_option
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
    """How long a node takes to serve again after kill -9, beside the same with hardly any log.

    Runs nodes of its own on stores of its own, which are removed. What is acknowledged must be there after each start.
    """
    from commitmq.bench.figures import machine, to_json
    from commitmq.bench.restart import measure_restart

    host = machine()
    with _progress() as begin:
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
    _print_machine(host)
    click.echo(
        f"{gib:g} GiB in {topics * queues} queues, {tail_mib} MiB of it not flushed, killed, "
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


@bench.command(name="all", short_help="Everything in one table, beside what it should be.")
@click.option("--count", type=click.IntRange(min=1), default=4000, show_default=True, help="Sends of each ack level.")
@click.option("--messages", type=click.IntRange(min=1), default=200_000, show_default=True, help="Messages a run.")
@_common
def all_(count: int, messages: int, repeat: int, seconds: float, as_json: bool, node: str) -> None:
    """Everything with 1 KiB bodies, in one table, beside what it should be."""
    from commitmq.bench.figures import machine, to_json
    from commitmq.bench.goals import measure_all

    host = machine()
    with _progress() as begin:
        outcomes = list(measure_all(node, repeat=repeat, count=count, messages=messages, limit_s=seconds, begin=begin))
    missed = sum(one.met is False for one in outcomes)
    if as_json:
        results = [to_json(one) for one in outcomes]
        print_json({"bench": "all", "machine": host, "results": results, "summary": {"missed": missed}})
        return
    _print_machine(host)
    print_table(
        ("", "median", "low", "high", "unit", "goal", "", "how"),
        [_row(one) for one in outcomes],
        left=(0, 4, 5, 6, 7),
    )
    told = "all goals met" if not missed else f"{missed} of {sum(one.met is not None for one in outcomes)} goals missed"
    click.echo(f"{told} ({_median_of(repeat)})")


def _row(one: Outcome) -> tuple[object, ...]:
    goal = one.goal
    form = ",.0f" if goal.unit == "messages/s" else ".2f"
    limit = "-" if goal.limit is None else f"{'<=' if goal.at_most else '>='} {format(goal.limit, ',g')}"
    verdict = {None: "", True: "met", False: "MISSED"}[one.met]
    figures = (format(value, form) for value in (one.measured.median, one.measured.low, one.measured.high))
    return (goal.name, *figures, goal.unit, limit, verdict, one.note)


# ---------------------------------------------------------------- how it is told


def _print_machine(host: dict[str, Any]) -> None:
    click.echo(
        f"{host['processor']}, {host['cores']} cores, load {host['load_average_1min']}, Linux {host['kernel']},"
        f" Python {host['python']}, libzmq {host['libzmq']}"
    )


def _median_of(repeat: int) -> str:
    return "one run" if repeat == 1 else f"median of {repeat} runs"


def _spread(spread: Spread, form: str) -> str:
    if spread.low == spread.high:
        return format(spread.median, form)
    return f"{format(spread.median, form)} ({format(spread.low, form)} to {format(spread.high, form)})"


def _say_cut_short(cut_short: bool, seconds: float) -> None:
    if cut_short:
        click.echo(f"a run was ended after {seconds:g} seconds (--seconds), before it had sent or read everything")


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Progress]]:
    """``begin(name, total)`` starts a bar and returns what advances it; without a terminal nothing is drawn."""
    if not sys.stderr.isatty():
        yield lambda _name, _total: lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The bar is drawn by a thread of its own; ten times a second would show in the figures.
    with Bars(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bars:

        def begin(name: str, total: int) -> Progress:
            for task in bars.task_ids:
                bars.remove_task(task)
            task = bars.add_task(name, total=total)
            return lambda done: bars.update(task, advance=done)

        yield begin
