"""``commitmq pipeline compact``: see :mod:`commitmq_plugins.spark.jobs.compact`."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import json_option, node_option, print_json
from commitmq_plugins.spark.command_options import job_session, master_option, sources_argument


@click.command()
@sources_argument
@click.option("--topic", required=True, metavar="NAME", help="The topic to compact.")
@click.option("--to", "target", required=True, metavar="NAME", help="The topic that gets the newest messages.")
@click.option(
    "--state",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The job's state file. With the same file an interrupted run is repeated, and a finished one does nothing.",
)
@click.option("--across-queues", is_flag=True, help="One message of a key in the whole topic, not in each queue.")
@click.option("--without-key", type=click.Choice(["drop", "keep", "refuse"]), default="drop", show_default=True)
@click.option("--allow-data-loss", is_flag=True, help="Skip messages that expired or are damaged.")
@node_option
@master_option
@json_option
def compact(
    sources: tuple[str, ...],
    topic: str,
    target: str,
    state: Path,
    across_queues: bool,
    without_key: str,
    allow_data_loss: bool,
    node: str,
    master: str,
    as_json: bool,
) -> None:
    """Send the newest message of each key of a topic in SOURCES to a new topic, as RocketMQ compacts topics.

    A message with an empty body deletes its key.
    """
    from commitmq_plugins.spark.jobs.compact import compact as work

    with job_session(master, "compacting", quiet=as_json, sources=sources) as spark:
        done = work(
            spark,
            sources,
            topic,
            target,
            state,
            node=node,
            across_queues=across_queues,
            without_key=without_key,
            fail_on_data_loss=not allow_data_loss,
        )
    if as_json:
        print_json(done.to_json())
        return
    if not done.read:
        click.echo(f"nothing to do: the job of {state} is finished, or {topic} was empty")
        return
    click.echo(f"{done.sent.messages} messages are in {target}, the newest of {done.keys} keys in {done.read} messages")
    if done.deleted:
        click.echo(f"{done.deleted} keys are deleted: their newest body is empty")
    if done.without_key:
        click.echo(f"{done.without_key} messages have no key ({without_key})")
