"""``commitmq store verify``: see :mod:`commitmq.offline.verify`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import fail, json_option, print_json
from commitmq.supervision.exit_codes import CliExit


@click.command(cls=NodeVerb)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
@json_option
def verify(folder: Path, config_file: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Read the whole store in DIR and compare log, ConsumeQueues, index and timer wheel. Changes nothing; exits 65 for damage.

    The node must be stopped; `commitmq store snapshot` copies the store of a running one, and verifies the copy.
    File sizes are the store's own. Cuts of the log that are kept in commitmq/cut are reported too; they are no damage of the
    rest.
    """
    from commitmq import config as node_config
    from commitmq.cli.output import byte_progress
    from commitmq.errors import StoreLockedError
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.verify import verify as work
    from commitmq.store.recovery import cut_record

    config = node_config.load(config_file, overrides, environment=os.environ)
    try:
        with HeldStore(folder, config) as store, byte_progress("verifying", quiet=as_json) as progress:
            report = work(store, progress)
            cuts = [cut for cut in cut_record.load(store.layout) if not cut.restored]
    except StoreLockedError as error:
        way = "stop the node; or `commitmq store snapshot` makes a copy of a running node's store, and verifies it"
        fail(f"{error}; {way}", CliExit.STORE_LOCKED)
    if as_json:
        print_json({**report.to_json(), "cuts": [cut.to_json(store.layout) for cut in cuts]})
    else:
        click.echo("\n".join(report.lines()))
        for cut in cuts:
            click.echo(f"was cut from the log, {cut_record.sentence(store.layout, cut)}")
    if not report.is_sound:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))
