"""``commitmq bench consume``: the rate of a consumer that catches up on a running node."""

from __future__ import annotations

import click

from commitmq.cli.bench.baseline import AgainstBaseline, baseline_options, figure
from commitmq.cli.bench.options import body_option, common_options, topic_option
from commitmq.cli.bench.telling import median_of, print_machine, progress_bars, say_cut_short, spread
from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import print_json, print_table


@click.command(cls=NodeVerb, short_help="Messages a second of one consumer that catches up.")
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
@body_option
@click.option(
    "--messages",
    type=click.IntRange(1, 10**9),
    help="Messages to write first and read in each run; with --topic, the number to read from it.  "
    "[default: 200000, with --topic all]",
)
@topic_option
@common_options
@baseline_options
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
    baseline: AgainstBaseline,
) -> None:
    """Messages a second of one consumer that catches up from the beginning.

    Reads the messages that it has written itself, and checks them; with --topic the existing messages, unchanged.
    """
    from commitmq.bench.consume import fill, measure_consume
    from commitmq.bench.figures import Spread, machine, to_json
    from commitmq.bench.floors import COPY, PYTHON
    from commitmq.bench.target import BenchTopic

    host = machine()
    baseline.begin("consume", node, form=form, via=via, body=body, messages=messages, topic=topic)
    with BenchTopic(node, topic) as target, progress_bars() as begin:
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
    name = f"catch-up read as {form}, via {via}"
    more = baseline.end(host, [figure(name, "messages/s", rate, COPY if form == "columns" else PYTHON)])
    if as_json:
        summary = {"messages_per_s": to_json(rate)}
        report = {"bench": "consume", "machine": host, "runs": [to_json(run) for run in runs], "summary": summary}
        print_json(report | more)
        return
    print_machine(host)
    click.echo(f"catch-up read as {form}, via {via}{', content checked' if all(run.checked for run in runs) else ''}")
    print_table(
        ("messages", "seconds", "messages/s", "MiB/s of bodies"),
        [(one.messages, f"{one.seconds:.3f}", f"{one.messages_per_s:.0f}", one.mib_per_s) for one in runs],
        left=(),
    )
    click.echo(f"{spread(rate, '.0f')} messages/s, {median_of(repeat)}")
    say_cut_short(any(run.cut_short for run in runs), seconds)
    baseline.tell()
