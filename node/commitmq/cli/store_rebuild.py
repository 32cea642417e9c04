"""``commitmq store rebuild``: see :mod:`commitmq.offline.rebuild`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import json_option, print_json
from commitmq.supervision.exit_codes import CliExit


@click.command(cls=NodeVerb)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", type=click.Choice(["queues", "index"]), help="One kind of files.  [default: both]")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
@json_option
def rebuild(
    folder: Path, only: str | None, config_file: Path | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Rebuild the ConsumeQueues and the index of the store in DIR from its CommitLog alone.

    The node must be stopped. The old files are kept too. File sizes are the store's own; for the index
    others can be given with --set. Afterwards the store is compared as `store verify` does it, and the exit code is 65
    when something is not right: a log may hold records that no queue can show.
    """
    from commitmq import config as node_config
    from commitmq.cli.output import byte_progress
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.rebuild import KINDS
    from commitmq.offline.rebuild import rebuild as work
    from commitmq.offline.rebuild_check import checked

    config = node_config.load(config_file, overrides, environment=os.environ)
    kinds = KINDS if only is None else (only,)
    with (
        HeldStore(folder, config, new_index="index" in kinds) as store,
        byte_progress("rebuilding", quiet=as_json) as progress,
    ):
        done = checked(store, work(store, kinds, progress), kinds, progress)
    if as_json:
        print_json(done.to_json())
    else:
        click.echo(done.line(only))
        click.echo(f"the old files are in {done.kept}")
        for line in done.left_lines():
            click.echo(line)
    if done.left:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))
