"""``commitmq bench``: measurements of a running node, printed as a table or written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.options import in_turn, json_option, node_option
from commitmq.cli.output import can_draw, drawn_bars, print_json, print_table
from commitmq.cli.quantity import Quantity
from commitmq.cli.quantity import seconds as time_in_seconds

if TYPE_CHECKING:
    from commitmq.bench.target import Progress, Spread

_Function = TypeVar("_Function", bound=Callable[..., Any])

_body_option = click.option(
    "--body", type=Quantity("bytes", low=1, high=4 << 20), default=1024, show_default=True, help="Bytes of each body."
)
_topic_option = click.option("--topic", metavar="TOPIC", help="Use this topic and keep it.  [default: a fresh one]")


def _number_option(name: str, default: int | None, text: str, *, high: int = 10**9) -> Callable[[_Function], _Function]:
    """An option for a number of 1 to ``high``."""
    return click.option(
        name, type=click.IntRange(1, high), default=default, show_default=default is not None, help=text
    )


_common_options = in_turn(
    _number_option("--repeat", 3, "Runs.", high=100),
    click.option(
        "--seconds",
        type=time_in_seconds(0.1),
        default=60.0,
        show_default=True,
        help="Stop a run after this long; its figures are then of fewer messages.",
    ),
    json_option,
    node_option,
)


@click.group()
def bench() -> None:
    """Measure a running node: produce, consume, latency, and a memory topic beside a durable one.

    Each measurement uses a topic of its own, which is deleted afterwards; its messages take room in the log until their
    segments expire.
    """


@bench.command(short_help="Single synchronous sends.")
@_body_option
@_number_option("--count", 4000, "Sends of each ack level.")
@click.option("--ack", type=click.Choice(["memory", "flushed", "both"]), default="both", show_default=True)
@_topic_option
@_common_options
def latency(
    body: int, count: int, ack: str, topic: str | None, repeat: int, seconds: float, as_json: bool, node: str
) -> None:
    """How long a single synchronous send takes, with each ack level in turn."""
    from commitmq.bench.sends import measure_latency
    from commitmq.bench.target import BenchTopic, Spread, machine

    acks = ("memory", "flushed") if ack == "both" else (ack,)
    host = machine()
    with BenchTopic(node, topic) as target, _progress_bars() as begin:
        advance = begin("latency", count * repeat)
        runs = [
            measure_latency(target, body_bytes=body, count=count, acks=acks, limit_s=seconds, progress=advance)
            for _ in range(repeat)
        ]
    sends = {one: [run.sends[at].send for run in runs] for at, one in enumerate(acks)}
    summary = {one: Spread.of([send.p50_us for send in found]) for one, found in sends.items()}
    if as_json:
        _print_report("latency", host, runs=runs, summary={"p50_us": summary})
        return
    columns = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")
    rows = []
    for one, found in sends.items():
        medians = (Spread.of([getattr(send, column) for send in found]).median for column in columns)
        rows.append((f"send, {one}", *(f"{value:.1f}" for value in medians)))
    _print_machine(host)
    click.echo(
        f"{sum(run.count for run in sends[acks[0]])} sends of {body} bytes each, microseconds, {_median_of(repeat)}"
    )
    print_table(("", "p50", "p90", "p99", "p99.9", "max"), rows)
    _say_cut_short(any(run.cut_short for run in runs), seconds)


@bench.command(short_help="Messages a second from one producer.")
@click.option(
    "--mode",
    type=click.Choice(["batch", "async", "sync"]),
    default="batch",
    show_default=True,
    help="send_batch, pipelined send_async, or one send after the other.",
)
@_number_option("--batch", 1000, "Messages a batch.", high=100_000)
@_body_option
@_number_option("--messages", 200_000, "Messages a run.")
@click.option("--ack", type=click.Choice(["flushed", "memory"]), default="flushed", show_default=True)
@_number_option("--queues", 4, "Queues of a fresh topic.", high=4096)
@_number_option(
    "--topics", 1, "Fresh topics; with more than one, batches go to all queues of all topics in turn.", high=100_000
)
@_topic_option
@_common_options
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
    from commitmq.bench.sends import measure_produce
    from commitmq.bench.target import BenchTopic, Spread, machine

    if topics > 1 and (mode != "batch" or topic is not None):
        raise click.UsageError("--topics is for batches to fresh topics: leave out --mode and --topic")
    host = machine()
    with BenchTopic(node, topic, queues=queues, topics=topics) as target, _progress_bars() as begin:
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
        _print_report("produce", host, runs=runs, summary={"messages_per_s": rate})
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


@bench.command(cls=NodeVerb, short_help="Messages a second of one consumer that catches up.")
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
@_number_option(
    "--messages",
    None,
    "Messages to write first and read in each run; with --topic, the number to read from it.  "
    "[default: 200000, with --topic all]",
)
@_topic_option
@_common_options
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

    Reads the messages that it has written itself, and checks them; with --topic the existing messages, unchanged.
    """
    from commitmq.bench.reads import fill, measure_consume
    from commitmq.bench.target import BenchTopic, Spread, machine

    host = machine()
    with BenchTopic(node, topic) as target, _progress_bars() as begin:
        expected = None
        if topic is None:
            wanted = messages or 200_000
            written = begin("writing", wanted)
            expected = fill(target, messages=wanted, body_bytes=body, limit_s=seconds, progress=written)
            messages = expected.messages
        advance = begin(f"consume ({form})", (messages or target.readable()) * repeat)
        runs = [
            measure_consume(
                target, form=form, mode=via, messages=messages, expected=expected, limit_s=seconds, progress=advance
            )
            for _ in range(repeat)
        ]
    rate = Spread.of([run.messages_per_s for run in runs])
    if as_json:
        _print_report("consume", host, runs=runs, summary={"messages_per_s": rate})
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
@_number_option("--messages", 100_000, "Messages a run.")
@_number_option("--batch", 1000, "Messages a batch.", high=100_000)
@_number_option("--count", 2000, "Single sends of each kind.")
@_common_options
def memory(
    body: int, messages: int, batch: int, count: int, repeat: int, seconds: float, as_json: bool, node: str
) -> None:
    """A memory topic beside a durable one: batches and single sends, which take turns in one run."""
    from commitmq.bench.sends import KINDS, measure_memory
    from commitmq.bench.target import machine

    host = machine()
    with _progress_bars() as begin:
        result = measure_memory(
            node,
            body_bytes=body,
            messages=messages,
            batch=batch,
            count=count,
            repeat=repeat,
            limit_s=seconds,
            progress=begin("memory", len(KINDS) * messages * repeat + count),
        )
    if as_json:
        _print_report("memory", host, result=result)
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


def _print_report(name: str, host: dict[str, Any], **found: Any) -> None:
    """The figures as JSON, with the machine they are of."""
    print_json({"bench": name, "machine": host, **found})


def _print_machine(host: dict[str, Any]) -> None:
    """Print one line: the machine of the figures below."""
    click.echo(
        f"{host['processor']}, {host['cores']} cores, load {host['load_average_1min']}, Linux {host['kernel']},"
        f" Python {host['python']}, libzmq {host['libzmq']}"
    )


def _median_of(repeat: int) -> str:
    """The number of runs behind a figure."""
    return "one run" if repeat == 1 else f"median of {repeat} runs"


def _spread(value: Spread, form: str) -> str:
    """The median, and the range when there was more than one run."""
    if value.low == value.high:
        return format(value.median, form)
    return f"{format(value.median, form)} ({format(value.low, form)} to {format(value.high, form)})"


def _say_cut_short(cut_short: bool, seconds: float) -> None:
    """Report that a run was ended early, if one was."""
    if cut_short:
        click.echo(f"a run was ended after {seconds:g} seconds (--seconds), before it had sent or read everything")


@contextmanager
def _progress_bars() -> Iterator[Callable[[str, int], Progress]]:
    """``begin(name, total)`` starts a bar and returns the function that advances it; nothing when no bar can be drawn."""
    if not can_draw():
        yield lambda _name, _total: lambda _done: None
        return
    # The bar is drawn by a thread of its own. Drawing ten times a second would show in the figures.
    with drawn_bars("BarColumn", "MofNCompleteColumn", "TimeElapsedColumn", refreshes_per_s=2) as bars:

        def begin(name: str, total: int) -> Progress:
            for task in bars.task_ids:
                bars.remove_task(task)
            task = bars.add_task(name, total=total)
            return lambda done: bars.update(task, advance=done)

        yield begin
