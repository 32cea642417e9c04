"""``commitmq store rebuild``: see :mod:`commitmq.offline.rebuild`."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import json_option, print_json


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", type=click.Choice(["queues", "index"]), help="One kind of files.  [default: both]")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
@json_option
def rebuild(
    folder: Path, only: str | None, config_file: Path | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Make the ConsumeQueues and the index of the store in DIR anew, from its CommitLog alone.

    The node must be stopped. The old files are kept beside the new ones. Sizes of files are those the store has; the
    index gets the configuration's.
    """
    from commitmq import config as node_config
    from commitmq.cli.progress import byte_progress
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.rebuild import KINDS
    from commitmq.offline.rebuild import rebuild as work

    config = node_config.load(config_file, overrides)
    with HeldStore(folder, config) as store, byte_progress("rebuilding", quiet=as_json) as progress:
        done = work(store, KINDS if only is None else (only,), progress)
    if as_json:
        print_json(done.to_json())
    else:
        click.echo(done.line(only))
        click.echo(f"the old files are in {done.kept}")
