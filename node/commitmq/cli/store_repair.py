"""``commitmq store repair``: see :mod:`commitmq.offline.repair`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commitmq.cli.node_verb import NodeVerb
from commitmq.cli.output import ask_before, json_option, print_json
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.offline.extents import Extent
    from commitmq.offline.held_store import HeldStore


@click.command(cls=NodeVerb)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--cut", "how", flag_value="cut", help="End the log where the damage begins.")
@click.option(
    "--skip", "how", flag_value="skip", help="Take out the damaged records only, and keep the records behind them."
)
@click.option(
    "--restore-cut", "how", flag_value="restore-cut", help="Put back the bytes of the last cut, from commitmq/cut."
)
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of keys.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def repair(
    folder: Path, how: str | None, config_file: Path | None, overrides: tuple[str, ...], yes: bool, as_json: bool
) -> None:
    """Show the damage in the log of the store in DIR; with --cut or --skip, repair it.

    The node must be stopped. The removed bytes are copied to commitmq/cut first, and --restore-cut puts back the last
    cut of a repair or a start, unless messages were stored in its place since. Exits 65 while there is damage.
    """
    from commitmq import config as node_config
    from commitmq.cli.output import byte_progress
    from commitmq.offline.held_store import HeldStore
    from commitmq.offline.log_damage import find_damage
    from commitmq.offline.repair import repair as work

    with HeldStore(folder, node_config.load(config_file, overrides, environment=os.environ)) as store:
        if how == "restore-cut":
            _restore(store, yes, as_json)
            return
        if how is None:
            _show(find_damage(store), store.config.commit_log.segment_bytes, as_json)
            return
        if how == "cut":
            ask_before(f"end the log in {folder} where its damage begins, without the messages after it", yes)
        else:
            ask_before(f"take the damaged records out of the log in {folder}", yes)
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
        ended = f"the log ends at {done.damage[0].start} now, " if how == "cut" else ""
        click.echo(f"{ended}{done.lost_bytes} bytes were taken out of it ({len(done.damage)} damaged place(s))")
        if done.blanked_units:
            click.echo(f"{done.blanked_units} message(s) cannot be read any more; the others kept their offsets")
        for path in done.evidence:
            click.echo(f"the removed bytes are copied to {path}")


def _restore(store: HeldStore, yes: bool, as_json: bool) -> None:
    from commitmq.cli.output import byte_progress
    from commitmq.offline.restore import restorable, restore
    from commitmq.store.recovery import cut_record

    cuts = restorable(store)
    if cuts and not yes:
        click.echo(cut_record.sentence(store.layout, cuts[0]))
    if cuts:
        ask_before("put this back", yes)
    with byte_progress("restoring", quiet=as_json) as progress:
        done = restore(store, progress)
    if as_json:
        cut = None if done.cut is None else done.cut.to_json(store.layout)
        print_json({"restored": cut, "bytes": done.restored_bytes, "damage": list(done.damage), "left": len(cuts[1:])})
    elif done.cut is None:
        click.echo("nothing was cut from this log, or everything is back")
    else:
        click.echo(
            f"put back {done.restored_bytes} bytes at physical offset {done.cut.parts[0].begin if done.cut.parts else 0}"
        )
        for line in done.damage:
            click.echo(line)
        if cuts[1:]:
            click.echo(f"{len(cuts) - 1} older cut(s) are kept too")
    if done.damage:
        raise SystemExit(int(CliExit.DAMAGE_FOUND))


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
