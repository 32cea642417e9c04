"""``commitmq import config``: gives a node the topics and groups of a file that `commitmq export config` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.output import complain, fail, json_option, node_option, print_json, print_table
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.client.admin_config import ConfigChange

_MOST_BYTES = 256 << 20
_ADVICE = "nothing was changed; correct the file, or make it anew with `commitmq export config`"


@click.group(name="import")
def import_() -> None:
    """Give a node the topics and groups of a file."""


@import_.command()
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--offsets", is_flag=True, help="Also what the groups have committed, where that is ahead.")
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@json_option
@node_option
def config(file: Path, offsets: bool, dry_run: bool, as_json: bool, node: str) -> None:
    """Give a node the settings of the topics and groups in FILE, which `commitmq export config` wrote.

    Topics and groups that are missing are made, others get the settings of FILE. What FILE does not name stays. When the node
    can never take a part of it, nothing changes, and the exit code is 1; so it is when the node refused a change.

    \b
    Example: commitmq import config node.json --dry-run
    """
    from commitmq.client.admin import Admin

    document = _read(file)
    with Admin(node) as admin:
        try:
            done = admin.import_config(document, offsets=offsets, dry_run=dry_run)
        except ValueError as error:
            fail(f"{file}: {error}; {_ADVICE}")
    if as_json:
        rows = [one._asdict() for one in done.changes]
        print_json({"dry_run": dry_run, "applied": done.applied, "changes": rows, "conflicts": done.conflicts})
    elif done.changes:
        headers = ("WHAT", "NAME", "BEFORE", "AFTER" if done.applied else "WOULD BE")
        print_table(headers, [_row(one) for one in done.changes], left=(0, 1, 2, 3))
    elif not done.conflicts:
        click.echo("nothing differs")
    for conflict in done.conflicts:
        complain(conflict)
    refused = [one for one in done.changes if one.error]
    for one in refused:
        complain(f"{one.kind} {one.name}: {one.error}")
    if done.conflicts:
        complain("nothing was changed")
    if done.conflicts or refused:
        raise SystemExit(int(CliExit.FAILURE))


def _read(file: Path) -> Any:
    import orjson

    try:
        size = file.stat().st_size
        if size > _MOST_BYTES:
            fail(f"{file} has {size} bytes, at most {_MOST_BYTES} are read; {_ADVICE}")
        return orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        fail(f"{file} is no JSON, at line {error.lineno}, column {error.colno}: {error.msg}; {_ADVICE}")
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}")


def _row(one: ConfigChange) -> tuple[str, str, str, str]:
    return one.kind, one.name, "-" if one.before is None else _shown(one.before), _shown(one.after)


def _shown(settings: dict[str, Any]) -> str:
    import orjson

    return " ".join(f"{name}={orjson.dumps(value).decode()}" for name, value in settings.items())
