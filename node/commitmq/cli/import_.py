"""``commitmq import config``: gives a node the topics, groups and users of a file that `commitmq export config` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.node_verb import address_of
from commitmq.cli.options import dry_run_option, json_option, node_options
from commitmq.cli.output import complain, fail, node_unless, print_json, print_table
from commitmq.cli.shown_changes import entry_lines, value_text
from commitmq.cli.users import access_file, complain_without_keys, store_for_users
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.client.admin_config import ConfigChange
    from commitmq.security.access_file import AccessTable
    from commitmq.security.imported_access import ExportedUsers, UserImport

_MOST_BYTES = 256 << 20
_ADVICE = "nothing was changed; correct the file, or make it again with `commitmq export config`"


@click.group(name="import")
def import_() -> None:
    """Give a node the topics, groups and users of a file."""


@import_.command()
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--offsets", is_flag=True, help="Also what the groups have committed, where that is ahead.")
@click.option("--users", is_flag=True, help="Also the users and what they may do, without secrets; needs --store.")
@dry_run_option()
@json_option
@node_options
def config(
    file: Path,
    offsets: bool,
    users: bool,
    dry_run: bool,
    as_json: bool,
    node: str | None,
    store: Path | None,
    timeout_s: float,
) -> None:
    """Give a node the settings of the topics and groups in FILE, which `commitmq export config` wrote.

    Topics and groups that are missing are made, others get the settings of FILE. What FILE does not name stays. When the node
    can never take a part of it, nothing changes, and the exit code is 1; so it is when the node refused a change.

    With --users a user that is there keeps its secret and its keys. A new one has the keys of FILE, and no secret that anybody
    knows: `commitmq user alter NAME --new-secret` makes one.

    \b
    Example: commitmq import config node.json --dry-run
    """
    from commitmq.client.admin import Admin
    from commitmq.client.admin_config import ConfigChange

    of_users = store_for_users(store) if users else None
    document = _read(file)
    try:
        wanted, planned = _plan_users(document, of_users)
        with Admin(address_of(store, node_unless(store, node)), timeout_s=timeout_s) as admin:
            done = admin.import_config(document, offsets=offsets, dry_run=dry_run or wanted is not None)
            conflicts = [*done.conflicts, *planned.conflicts]
            if wanted is not None and of_users is not None and not dry_run and not conflicts:
                planned = _put_users(wanted, of_users) if planned.changes else planned
                done = admin.import_config(document, offsets=offsets)
                conflicts = done.conflicts
    except ValueError as error:
        fail(f"{file}: {error}; {_ADVICE}")
    changes = [*done.changes, *(ConfigChange("user", one.name, one.before, one.after) for one in planned.changes)]
    if as_json:
        rows = [one._asdict() for one in changes]
        told = {"dry_run": dry_run, "applied": done.applied, "changes": rows, "conflicts": conflicts}
        print_json({**told, "keys_kept": planned.keys_kept} if users else told)
    elif changes:
        headers = ("WHAT", "NAME", "BEFORE", "AFTER" if done.applied else "WOULD BE")
        print_table(headers, [_row(one) for one in changes], left=(0, 1, 2, 3))
        for one in changes:
            _print_policies(one)
    elif not conflicts:
        click.echo("nothing differs")
    if of_users is not None and planned.changes and not conflicts:
        complain_without_keys(of_users)
    if not users and (count := _users_in(document)):
        complain(f"{count} users of {file} were omitted; --users takes them too, and needs --store")
    for name in planned.keys_kept:
        complain(f"user {name} has other keys than in {file}, and keeps them; `commitmq user key add` gives it one")
    for conflict in conflicts:
        complain(conflict)
    refused = [one for one in changes if one.error]
    for one in refused:
        complain(f"{one.kind} {one.name}: {one.error}")
    if conflicts:
        complain("nothing was changed")
    if conflicts or refused:
        raise SystemExit(int(CliExit.FAILURE))


def _plan_users(document: Any, store: Path | None) -> tuple[ExportedUsers | None, UserImport]:
    """The users of ``document``, and what the import of them would change; nothing without ``store``. Raises ValueError."""
    from commitmq.security.imported_access import ExportedUsers, UserImport

    if store is None:
        return None, UserImport([], [], [])
    wanted = ExportedUsers.of(document)
    return wanted, wanted.compared(access_file(store).load())


def _put_users(wanted: ExportedUsers, store: Path) -> UserImport:
    """Change the users of ``store``. Raises ValueError, and changes none, for what can never be."""
    done: list[UserImport] = []

    def apply(table: AccessTable) -> None:
        done.append(wanted.put_into(table))

    access_file(store).change(apply)
    return done[-1]


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
    """Entries of policies are only counted: :func:`_print_policies` prints them."""
    return " ".join(
        f"policies={len(entry_lines(value))}" if name == "policies" else f"{name}={value_text(value)}"
        for name, value in settings.items()
    )


def _print_policies(one: ConfigChange) -> None:
    """The entries of a user before and after, one a line."""
    if "policies" not in one.after:
        return
    before, after = (entry_lines((side or {}).get("policies", {})) for side in (one.before, one.after))
    click.echo(f"policies of user {one.name}:")
    for entry in before:
        if entry not in after:
            click.echo(f"  {entry}  (goes)")
    for entry in after:
        click.echo(f"  {entry}")


def _users_in(document: Any) -> int:
    rows = document.get("users") if isinstance(document, dict) else None
    return len(rows) if isinstance(rows, list) else 0
