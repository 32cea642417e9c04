"""``commitmq pipeline import``: see :mod:`commitmq_plugins.spark.jobs.replay`."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import json_option, node_option, print_json
from commitmq_plugins.spark.command_options import job_session, master_option


@click.command(name="import")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--topic", "topics", metavar="NAME", multiple=True, help="Only this topic; repeatable.  [default: all]")
@click.option(
    "--to", "target", metavar="NAME", default="", help="Another topic than the one it was; for a single --topic."
)
@click.option(
    "--state",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The import's state file; for a single --topic.  [default: beside the manifest]",
)
@node_option
@master_option
@json_option
def import_(
    folder: Path, topics: tuple[str, ...], target: str, state: Path | None, node: str, master: str, as_json: bool
) -> None:
    """Send the messages of the export in DIR to topics of a node, each once.

    Queues keep their numbers and their order. Importing again adds the messages exported since.
    """
    if (target or state) and len(topics) != 1:
        raise click.UsageError("--to and --state are for a single --topic")
    from commitmq_plugins.spark.jobs.replay import import_export, topics_of

    done = {}
    with job_session(master, "importing", quiet=as_json) as spark:
        for topic in topics or topics_of(folder):
            done[topic] = import_export(spark, folder, topic, target=target, node=node, state=state)
    if as_json:
        print_json({topic: one.to_json() for topic, one in done.items()})
        return
    for topic, one in done.items():
        before = f", {one.sent.repeated} of them by an earlier run" if one.sent.repeated else ""
        left = f"; {one.sent.empty} without a body or with a damaged one were left out" if one.sent.empty else ""
        click.echo(f"{one.sent.messages} messages are in {target or topic}{before}{left}")
