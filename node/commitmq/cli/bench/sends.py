"""``commitmq bench latency|produce|memory``: measurements of sends to a running node."""

from __future__ import annotations

import click

from commitmq.cli.bench.baseline import AgainstBaseline, baseline_options, figure
from commitmq.cli.bench.options import body_option, common_options, topic_option
from commitmq.cli.bench.telling import median_of, print_machine, progress_bars, say_cut_short, spread
from commitmq.cli.output import print_json, print_table


@click.command(short_help="Single synchronous sends, beside a bare ZeroMQ echo.")
@body_option
@click.option(
    "--count", type=click.IntRange(1, 10**9), default=4000, show_default=True, help="Sends of each ack level."
)
@click.option("--ack", type=click.Choice(["memory", "flushed", "both"]), default="both", show_default=True)
@topic_option
@common_options
@baseline_options
def latency(
    body: int,
    count: int,
    ack: str,
    topic: str | None,
    repeat: int,
    seconds: float,
    as_json: bool,
    node: str,
    baseline: AgainstBaseline,
) -> None:
    """Single synchronous sends, beside a bare ZeroMQ echo of the same size.

    Echo and sends take turns in short rounds, so that their ratio holds on a busy machine too.
    """
    from commitmq.bench.figures import Spread, machine, to_json
    from commitmq.bench.floors import ECHO, ECHO_AND_SYNC
    from commitmq.bench.latency import measure_latency
    from commitmq.bench.target import BenchTopic

    host = machine()
    acks = ("memory", "flushed") if ack == "both" else (ack,)
    baseline.begin("latency", node, body=body, ack=ack)
    with BenchTopic(node, topic) as target, progress_bars() as begin:
        advance = begin("latency", count * repeat)
        runs = [
            measure_latency(target, body_bytes=body, count=count, acks=acks, limit_s=seconds, progress=advance)
            for _ in range(repeat)
        ]
    ratios = {one: Spread.of([run.sends[at].ratio_p50 for run in runs]) for at, one in enumerate(acks)}
    more = baseline.end(
        host,
        [
            figure(
                f"single send, ack {one}, p50",
                "us",
                Spread.of([run.sends[at].send.p50_us for run in runs]),
                ECHO if one == "memory" else ECHO_AND_SYNC,
            )
            for at, one in enumerate(acks)
        ],
    )
    if as_json:
        summary = {"ratio_p50": {one: to_json(ratio) for one, ratio in ratios.items()}}
        report = {"bench": "latency", "machine": host, "runs": [to_json(run) for run in runs], "summary": summary}
        print_json(report | more)
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
    print_machine(host)
    click.echo(f"{sum(one.count for one in lists[0])} samples of {body} bytes each, microseconds, {median_of(repeat)}")
    print_table(("", "p50", "p90", "p99", "p99.9", "max"), rows)
    for one, ratio in ratios.items():
        click.echo(f"send, {one}: p50 is {spread(ratio, '.2f')} times the echo's")
    say_cut_short(any(run.cut_short for run in runs), seconds)
    baseline.tell()


@click.command(short_help="Messages a second from one producer.")
@click.option(
    "--mode",
    type=click.Choice(["batch", "async", "sync"]),
    default="batch",
    show_default=True,
    help="send_batch, pipelined send_async, or one send after the other.",
)
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Messages a batch.")
@body_option
@click.option("--messages", type=click.IntRange(1, 10**9), default=200_000, show_default=True, help="Messages a run.")
@click.option("--ack", type=click.Choice(["flushed", "memory"]), default="flushed", show_default=True)
@click.option("--queues", type=click.IntRange(1, 4096), default=4, show_default=True, help="Queues of a fresh topic.")
@click.option(
    "--topics",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="Fresh topics; with more than one, batches go to all queues of all topics in turn.",
)
@topic_option
@common_options
@baseline_options
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
    baseline: AgainstBaseline,
) -> None:
    """Messages a second from one producer; the clock stops when a consumer could read the last one."""
    from commitmq.bench.figures import Spread, machine, to_json
    from commitmq.bench.floors import COPY, ECHO_RATE, PYTHON
    from commitmq.bench.produce import measure_produce
    from commitmq.bench.target import BenchTopic

    if topics > 1 and (mode != "batch" or topic is not None):
        raise click.UsageError("--topics is for batches to fresh topics: leave out --mode and --topic")
    host = machine()
    settings = {"mode": mode, "batch": batch, "body": body, "ack": ack, "queues": queues, "topics": topics}
    baseline.begin("produce", node, **settings)
    with BenchTopic(node, topic, queues=queues, topics=topics) as target, progress_bars() as begin:
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
    # The floor that each way of sending depends on: copies, the interpreter, round trips.
    floor = {"batch": COPY, "async": PYTHON, "sync": ECHO_RATE}[mode]
    more = baseline.end(host, [figure(f"produce ({mode}), ack {ack}", "messages/s", rate, floor)])
    if as_json:
        summary = {"messages_per_s": to_json(rate)}
        report = {"bench": "produce", "machine": host, "runs": [to_json(run) for run in runs], "summary": summary}
        print_json(report | more)
        return
    print_machine(host)
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
    click.echo(f"{spread(rate, '.0f')} messages/s, {median_of(repeat)}")
    say_cut_short(any(run.cut_short for run in runs), seconds)
    baseline.tell()


@click.command(short_help="A memory topic beside a durable one: batches and single sends.")
@body_option
@click.option("--messages", type=click.IntRange(1, 10**9), default=100_000, show_default=True, help="Messages a run.")
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Messages a batch.")
@click.option(
    "--count", type=click.IntRange(1, 10**9), default=2000, show_default=True, help="Single sends of each kind."
)
@common_options
@baseline_options
def memory(
    body: int,
    messages: int,
    batch: int,
    count: int,
    repeat: int,
    seconds: float,
    as_json: bool,
    node: str,
    baseline: AgainstBaseline,
) -> None:
    """A memory topic beside a durable one: batches and single sends, which take turns in one run."""
    from commitmq.bench.figures import Spread, machine, to_json
    from commitmq.bench.floors import COPY, ECHO, ECHO_AND_SYNC
    from commitmq.bench.memory import KINDS, measure_memory

    host = machine()
    baseline.begin("memory", node, body=body, batch=batch)
    with progress_bars() as begin:
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
    more = baseline.end(
        host,
        [figure(f"batches, {one.name}", "messages/s", one.messages_per_s, COPY) for one in result.kinds]
        + [
            figure(f"single send, {one.name}, p50", "us", Spread.of([one.single.p50_us]), floor)
            for one, floor in zip(result.kinds, (ECHO_AND_SYNC, ECHO, ECHO), strict=True)
        ],
    )
    if as_json:
        print_json({"bench": "memory", "machine": host, "result": to_json(result)} | more)
        return
    print_machine(host)
    click.echo(f"{body} bytes a body, {batch} messages a batch, {median_of(repeat)}")
    print_table(
        ("", "batches: messages/s", "single: p50 us", "p99 us"),
        [
            (one.name, spread(one.messages_per_s, ".0f"), f"{one.single.p50_us:.1f}", f"{one.single.p99_us:.1f}")
            for one in result.kinds
        ],
    )
    click.echo(
        f"the memory topic has {result.rate_ratio} times the rate and {result.p50_ratio} times the p50 of"
        " the durable one with ack flushed"
    )
    say_cut_short(result.cut_short, seconds)
    baseline.tell()
