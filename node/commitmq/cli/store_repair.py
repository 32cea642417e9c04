"""``commitmq store repair``: see :mod:`commitmq.offline.repair`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from commitmq.cli.exit_codes import CliExit
from commitmq.cli.output import json_option, print_json

if TYPE_CHECKING:
    from commitmq.offline.extents import Extent


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--cut", "how", flag_value="cut", help="End the log where the damage begins.")
@click.option("--skip", "how", flag_value="skip", help="Take out the damaged records only, and keep what follows.")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def repair(
    folder: Path, how: str | None, config_file: Path | None, overrides: tuple[str, ...], yes: bool, as_json: bool
) -> None:
    """Show the damage in the log of the store in DIR; with --cut or --skip, repair it.

    The node must be stopped. What goes is copied to commitmq/cut first. Exits 65 while there is damage.
    """
    from commitmq import config as node_config
    from commitmq.cli.progress import byte_progress
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.repair import find_damage
    from commitmq.offline.repair import repair as work

    with HeldStore(folder, node_config.load(config_file, overrides)) as store:
        if how is None:
            _show(find_damage(store), store.config.commit_log.segment_bytes, as_json)
            return
        if not yes:
            click.confirm(f"Repair the log in {folder} by {how}?", abort=True)
        with byte_progress("repairing", quiet=as_json) as progress:
            done = work(store, "cut" if how == "cut" else "skip", progress)
    if as_json:
        print_json(
            {
                "damage": [[one.start, one.end, one.damage] for one in done.damage],
                "lost_bytes": done.lost_bytes,
                "blanked_units": done.blanked_units,
                "evidence": [str(path) for path in done.evidence],
            }
        )
    elif not done.damage:
        click.echo("the log is whole, nothing was changed")
    else:
        click.echo(f"repaired {len(done.damage)} damaged extent(s): {done.lost_bytes} bytes of the log are gone")
        if done.blanked_units:
            click.echo(f"{done.blanked_units} message(s) cannot be read any more; the others kept their offsets")
        for path in done.evidence:
            click.echo(f"a copy of what went is {path}")


def _show(damage: list[Extent], segment_bytes: int, as_json: bool) -> None:
    if as_json:
        print_json({"damage": [[one.start, one.end, one.damage] for one in damage]})
    elif not damage:
        click.echo("the log is whole")
    for one in damage if not as_json else []:
        base = one.start - one.start % segment_bytes
        click.echo(f"segment {base:020d} at {one.start - base}, {one.end - one.start} bytes: {one.damage}")
    if damage:
        if not as_json:
            click.echo("--cut ends the log there; --skip takes out these bytes only")
        raise SystemExit(int(CliExit.DAMAGE_FOUND))
