"""``commitmq export config``: a node's topics, groups and users as a file, which `commitmq import config` reads."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli.node_verb import address_of
from commitmq.cli.options import json_option, node_options
from commitmq.cli.output import fail, node_unless, print_either
from commitmq.cli.users import access_file, store_for_users


@click.group()
def export() -> None:
    """Write a node's topics, groups and users to a file."""


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
@click.option("--users", is_flag=True, help="Also the users and what they may do, without secrets; needs --store.")
@json_option
@node_options
def config(
    target: Path, offsets: bool, users: bool, as_json: bool, node: str | None, store: Path | None, timeout_s: float
) -> None:
    """Write the settings of all topics and groups to FILE, as JSON; `commitmq import config FILE` gives them to a node.

    Topics of the system and those of retries and dead letters are not in it, and neither are messages and secrets. With
    --users it has each user's type, status, quotas, entries and public keys; only the store's owner can read these. A file
    that is there already stays.

    \b
    Example: commitmq export config --to node.json
    """
    import orjson

    from commitmq.client.admin import Admin
    from commitmq.files import atomic_file

    if target.exists():
        fail(f"{target} is there already, and an export overwrites nothing: remove it, or name another file")
    store_of_users = store_for_users(store) if users else None
    with Admin(address_of(store, node_unless(store, node)), timeout_s=timeout_s) as admin:
        document = admin.export_config(offsets=offsets)
    if store_of_users is not None:
        from commitmq.security.imported_access import exported_users

        document["users"] = exported_users(access_file(store_of_users).load())
    data = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    try:
        atomic_file.replace(target, data, "export", mode=0o600, hidden=True)
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}")
    counts = {part: len(document.get(part) or ()) for part in ("topics", "groups", "offsets", "users")}
    print_either(
        as_json,
        {"file": str(target), "bytes": len(data), **counts},
        f"{target}: {', '.join(f'{count} {part}' for part, count in counts.items())}",
    )
