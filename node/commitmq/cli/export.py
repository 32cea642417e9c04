"""``commitmq export config``: the settings of a node's topics and groups as a file, which `commitmq import config` reads."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.output import fail, json_option, node_option, print_json


@click.group()
def export() -> None:
    """Write the settings of a node's topics and groups to a file."""


@export.command()
@click.option(
    "--to",
    "target",
    metavar="FILE",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to make, mode 0600.",
)
@click.option("--offsets", is_flag=True, help="Also what the groups have committed.")
@json_option
@node_option
def config(target: Path, offsets: bool, as_json: bool, node: str) -> None:
    """Write the settings of all topics and groups to FILE, as JSON; `commitmq import config FILE` gives them to a node.

    Topics of the system and those of retries and dead letters are not in it, and neither are messages, users and secrets. A
    file that is there already stays.

    \b
    Example: commitmq export config --to node.json
    """
    import orjson

    from commitmq.client.admin import Admin
    from commitmq.files import atomic_file

    if target.exists():
        fail(f"{target} is there already, and an export overwrites nothing: remove it, or name another file")
    with Admin(node) as admin:
        document = admin.export_config(offsets=offsets)
    data = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    try:
        atomic_file.replace(target, data, "export", mode=0o600, hidden=True)
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}")
    counts = {part: len(document[part] or ()) for part in ("topics", "groups", "offsets")}
    if as_json:
        print_json({"file": str(target), "bytes": len(data), **counts})
    else:
        click.echo(f"{target}: {', '.join(f'{count} {part}' for part, count in counts.items())}")
