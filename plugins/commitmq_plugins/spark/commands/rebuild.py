"""``commitmq pipeline rebuild``: see :mod:`commitmq_plugins.spark.jobs.rebuild`."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import json_option, print_json
from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.spark.command_options import config_options, job_session, master_option, stores_argument


@click.command()
@stores_argument
@click.option("--only", type=click.Choice(["queues", "index"]), help="One kind of files.  [default: both]")
@click.option(
    "--into", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
    help="Make the files in this empty folder; the store stays as it is.",
)  # fmt: skip
@config_options
@master_option
@json_option
def rebuild(
    folders: tuple[Path, ...],
    only: str | None,
    into: Path | None,
    config_file: Path | None,
    overrides: tuple[str, ...],
    master: str,
    as_json: bool,
) -> None:
    """Rebuild the ConsumeQueues and the index of the stores in DIRS from their CommitLogs, in parallel.

    The nodes must be stopped, and executors must see the folders by the same paths. The old files are kept beside the new
    ones. Afterwards the stores are compared as `pipeline verify` does it; exits 65 when something is not right.
    """
    from commitmq import config as node_config
    from commitmq.offline.rebuild import KINDS
    from commitmq_plugins.spark.jobs.rebuild import rebuild as work

    if into is not None and len(folders) > 1:
        raise click.UsageError("--into takes the files of one store only")
    config = node_config.load(config_file, overrides)
    with job_session(master, "rebuilding", quiet=as_json, sources=folders) as spark:
        done = work(spark, folders, kinds=KINDS if only is None else (only,), config=config, into=into)
    if as_json:
        print_json({"stores": [{"store": str(root), **one.to_json()} for root, one in done.items()]})
    for root, one in done.items() if not as_json else ():
        if len(done) > 1:
            click.echo(f"{root}:")
        click.echo(one.line(only))
        click.echo(f"the {'files' if into is not None else 'old files'} are in {one.kept}")
        for line in one.left_lines():
            click.echo(line)
    if any(one.left for one in done.values()):
        raise SystemExit(int(CliExit.DAMAGE_FOUND))
