"""``commitmq pipeline replay``: see :mod:`commitmq_plugins.spark.jobs.replay`."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import json_option, node_option, print_json
from commitmq_plugins.spark.command_options import job_session, master_option, sources_argument


@click.command()
@sources_argument
@click.option("--topic", required=True, metavar="NAME", help="The topic to send again.")
@click.option("--to", "target", required=True, metavar="NAME", help="The topic that gets it.")
@click.option(
    "--state",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The job's state file. With the same file an interrupted run continues, and a finished one sends nothing.",
)
@click.option(
    "--from", "start", metavar="TIME", help="Stored from then on: ISO 8601 (UTC), or milliseconds since 1970."
)
@click.option("--until", "end", metavar="TIME", help="Stored before then.")
@click.option("--tags", default="", metavar="'A || B'", help="With one of these tags.")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="With this key; repeatable.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), metavar="N", help="At most so many messages a second.")
@click.option("--allow-data-loss", is_flag=True, help="Skip messages that expired or are damaged.")
@node_option
@master_option
@json_option
def replay(
    sources: tuple[str, ...],
    topic: str,
    target: str,
    state: Path,
    start: str | None,
    end: str | None,
    tags: str,
    keys: tuple[str, ...],
    rate: float | None,
    allow_data_loss: bool,
    node: str,
    master: str,
    as_json: bool,
) -> None:
    """Send messages of a topic in SOURCES to another topic of a node, in their order, each once."""
    from commitmq_plugins.spark.jobs.replay import replay as work
    from commitmq_plugins.spark.options import milliseconds

    with job_session(master, "replaying", quiet=as_json, sources=sources) as spark:
        done = work(
            spark,
            sources,
            topic,
            target,
            state,
            node=node,
            start_ms=None if start is None else milliseconds("--from", start),
            end_ms=None if end is None else milliseconds("--until", end),
            tags=tags,
            keys=keys,
            per_second=rate,
            fail_on_data_loss=not allow_data_loss,
        )
    if as_json:
        print_json(done.to_json())
        return
    before = f", {done.sent.repeated} of them by an earlier run" if done.sent.repeated else ""
    click.echo(f"{done.sent.messages} messages of {topic} are in {target}{before}")
    if done.sent.empty:
        click.echo(f"{done.sent.empty} messages have neither a body nor a key, or a damaged body, and were left out")
