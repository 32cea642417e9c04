"""``commitmq acl import``: takes over RocketMQ's users and policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from commitmq.cli.output import complain, fail, json_option, print_json, print_table
from commitmq.cli.users import access_file, print_entries, store_option
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.security.access_table import AccessTable
    from commitmq.security.imported_access import AccessChange, ImportedAccess

_MOST_BYTES = 64 << 20


@click.command(name="import")
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@store_option
@json_option
def import_(files: tuple[Path, ...], dry_run: bool, store: Path, as_json: bool) -> None:
    """Take over the users and policies of RocketMQ in FILE, with their secrets.

    A FILE is what `mqadmin listUser` or `listAcl` of RocketMQ's ACL 2.0 prints, or the JSON of these. Several are read as
    one. All is taken or nothing: a user that is there already and differs is a conflict, and the exit code is 1.

    \b
    Example: commitmq acl import users.txt acls.txt --dry-run --store /var/lib/commitmq
    """
    wanted = _read(files)
    held = access_file(store)
    changes, conflicts = wanted.compared(held.load())
    if changes and not conflicts and not dry_run:
        done: list[list[AccessChange]] = []

        def apply(table: AccessTable) -> None:
            done.append(wanted.put_into(table))

        try:
            held.change(apply)
        except ValueError as error:  # another has changed the users since they were compared
            fail(f"{error}; nothing was changed")
        changes = done[-1]
    is_applied = not conflicts and not dry_run
    if as_json:
        rows = [{"name": one.name, "is_new": one.user is not None, **one.shown()} for one in changes]
        told = {"dry_run": dry_run, "applied": is_applied, "changes": rows}
        print_json({**told, "conflicts": conflicts})
    else:
        _print(changes, is_applied, bool(conflicts))
    for sentence in conflicts:
        complain(sentence)
    if conflicts:
        complain("nothing was changed")
        raise SystemExit(int(CliExit.FAILURE))


def _read(files: tuple[Path, ...]) -> ImportedAccess:
    """What is in the files. Exits with a sentence for one that cannot be read."""
    from commitmq.security.imported_access import ImportedAccess

    found = ImportedAccess()
    for file in files:
        try:
            with open(file, "rb") as opened:
                data = opened.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"at most {_MOST_BYTES} bytes are read")
            found.merge(_read_text(data.decode("utf-8-sig")))
        except UnicodeDecodeError:
            fail(f"{file} is no text in UTF-8; nothing was changed")
        except ValueError as error:
            fail(f"{file}: {error}; nothing was changed")
        except OSError as error:
            fail(f"{file} cannot be read: {error.strerror}")
    return found


def _read_text(text: str) -> ImportedAccess:
    from commitmq.security.mqadmin_acl import has_tables, read_json, read_tables

    if has_tables(text):
        return read_tables(text)
    if text.lstrip().startswith(("[", "{")):
        return read_json(text)
    raise ValueError("it is no output of mqadmin listUser or listAcl, and no JSON of ACL 2.0")


def _print(changes: list[AccessChange], is_applied: bool, has_conflicts: bool) -> None:
    if not changes:
        if not has_conflicts:
            click.echo("nothing differs")
        return
    new = [one for one in changes if one.user is not None]
    if new:
        rows = [(one.name, *one.user.shown().values()) for one in new if one.user is not None]
        print_table(("USER" if is_applied else "USER THAT WOULD BE", "TYPE", "STATUS"), rows, left=(0, 1, 2))
    entries = {one.name: one.policies for one in changes if one.policies.custom or one.policies.default}
    if entries:
        if new:
            click.echo()
        print_entries(entries)
