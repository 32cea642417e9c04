"""``commitmq acl allow|deny|remove|copy|import|list|test``: what each user may do (RocketMQ's ACL 2.0).

``commitmq acl import``: takes over RocketMQ's users and policies.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.options import dry_run_option, in_turn, json_option
from commitmq.cli.output import complain, fail, print_json, print_table, usage
from commitmq.cli.users import access_file, known_user, print_entries, store_option
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.security.access_file import AccessTable
    from commitmq.security.imported_access import AccessChange, ImportedAccess
    from commitmq.security.policy import Policies


_MOST_BYTES = 64 << 20


@click.command(name="import")
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@dry_run_option()
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
    from commitmq.security.imported_access import has_tables, read_json, read_tables

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


_entry_options = in_turn(
    click.argument("user"),
    click.argument("resource"),
    click.argument("actions"),
    click.option("--from", "networks", metavar="IP|NETWORK", multiple=True, help="Only from there; may be repeated."),
    click.option("--replace", is_flag=True, help="Also an entry of the other decision for RESOURCE."),
    store_option,
)


@click.group()
def acl() -> None:
    """Allow and deny what users do.

    RESOURCE is Topic:orders, Group:billing, Topic:orders-* (all names that begin so), Topic:*, Cluster:* or *. ACTIONS are
    Pub, Sub, Create, Update, Delete, Get, List or All, with commas. The most exact entry decides; among equal ones Deny.
    As in RocketMQ a user has one entry for each resource.
    """


acl.add_command(import_)


@acl.command()
@_entry_options
def allow(**given: Any) -> None:
    """Let USER do ACTIONS on RESOURCE; replaces the entry that USER had for RESOURCE, and shows it.

    An entry that denies is replaced only with --replace.

    \b
    Example: commitmq acl allow shop Topic:orders Pub,Sub --store /var/lib/commitmq
    """
    _put(**given, allow=True)


@acl.command()
@_entry_options
def deny(**given: Any) -> None:
    """Refuse USER's ACTIONS on RESOURCE; replaces the entry that USER had for RESOURCE, and shows it.

    An entry that allows is replaced only with --replace. What no entry allows needs no denial.

    \b
    Example: commitmq acl deny shop Topic:orders-secret All --store /var/lib/commitmq
    """
    _put(**given, allow=False)


def _put(
    user: str, resource: str, actions: str, networks: tuple[str, ...], store: Path, allow: bool, replace: bool
) -> None:
    from commitmq.security.policy import Policies, PolicyEntry, ResourcePattern, parse_actions, parse_network

    entry = usage(
        lambda: PolicyEntry(
            ResourcePattern.parse(resource),
            parse_actions(actions.split(",")),
            tuple(parse_network(one) for one in networks),
            allow,
        )
    )

    replaced: list[PolicyEntry] = []

    def apply(table: AccessTable) -> None:
        known_user(table, user)
        policies = table.policies.get(user, Policies())
        former = policies.entry_for(entry.pattern)
        if former is not None and former.allow != allow and not replace:
            raise click.UsageError(
                f"user {user} has the entry {former}, and as in RocketMQ one entry for each resource: this one would take its"
                f" place. --replace does that; `commitmq acl remove {user} {former.pattern}` removes it; nothing was changed"
            )
        replaced.extend(() if former is None or former == entry else (former,))
        table.policies[user] = policies.with_entry(entry)

    access_file(store).change(apply)
    verb = "allowed" if allow else "denied"
    click.echo(f"user {user}: {verb} {', '.join(sorted(entry.actions))} on {entry.pattern}")
    for former in replaced:
        click.echo(f"before: {former}\nafter:  {entry}")


@acl.command()
@click.argument("user")
@click.argument("resource")
@store_option
def remove(user: str, resource: str, store: Path) -> None:
    """Remove USER's entry for RESOURCE."""
    from commitmq.security.policy import Policies, ResourcePattern

    pattern = usage(lambda: ResourcePattern.parse(resource))

    def apply(table: AccessTable) -> None:
        known_user(table, user)
        try:
            table.policies[user] = table.policies.get(user, Policies()).without(pattern)
        except KeyError:
            raise click.UsageError(f"user {user} has no entry for {pattern}; `commitmq acl list {user}`") from None

    access_file(store).change(apply)
    click.echo(f"user {user}: no entry for {pattern}")


@acl.command()
@click.argument("source", metavar="FROM")
@click.argument("name", metavar="TO")
@store_option
@json_option
def copy(source: str, name: str, store: Path, as_json: bool) -> None:
    """Give user TO the entries of user FROM too.

    An entry that TO has for the same resource is replaced; its other entries stay.

    \b
    Example: commitmq acl copy shop kiosk --store /var/lib/commitmq
    """
    from commitmq.security.policy import Policies

    copied: list[Policies] = []

    def apply(table: AccessTable) -> None:
        known_user(table, source)
        known_user(table, name)
        found = table.policies.get(source, Policies())
        if not (found.custom or found.default):
            raise click.UsageError(f"user {source} has no entries; `commitmq acl list` shows who has")
        copied.append(table.policies.get(name, Policies()).with_all(found))
        table.policies[name] = copied[-1]

    access_file(store).change(apply)
    if as_json:
        print_json({name: copied[-1].to_json()})
    else:
        print_entries({name: copied[-1]})


@acl.command(name="list")
@click.argument("user", required=False)
@store_option
@json_option
def list_(user: str | None, store: Path, as_json: bool) -> None:
    """List the entries of USER, or of all users."""
    table = access_file(store).load()
    if user is not None:
        known_user(table, user)
    found = {name: one for name, one in table.policies.items() if user in (None, name)}
    if as_json:
        print_json({name: one.to_json() for name, one in found.items()})
        return
    if any(one.custom or one.default for one in found.values()):
        print_entries(found)
    else:
        click.echo("no entries: users that are not super users may do nothing")


@acl.command()
@click.argument("user")
@click.argument("action")
@click.argument("resource")
@click.option("--from", "address", metavar="IP", default="127.0.0.1", show_default=True, help="The peer's address.")
@store_option
@json_option
def test(user: str, action: str, resource: str, address: str, store: Path, as_json: bool) -> None:
    """Say whether USER may do ACTION on RESOURCE, and which entry decides. The exit code is 1 where it may not.

    \b
    Example: commitmq acl test shop Pub Topic:orders --from 10.1.2.3 --store /var/lib/commitmq
    """
    from commitmq.security.policy import (
        Policies,
        Resource,
        ResourcePattern,
        ResourceType,
        of_other_addresses,
        parse_actions,
        parse_address,
    )

    pattern = usage(lambda: ResourcePattern.parse(resource))
    if pattern.prefix or pattern.type is ResourceType.ANY:
        raise click.UsageError(f"name one resource, such as Topic:orders, not {resource}")
    if (peer := parse_address(address)) is None:
        raise click.UsageError(f"--from is an IP, not {address!r}")
    wanted = usage(lambda: parse_actions([action]))
    table, asked = access_file(store).load(), Resource(pattern.type, pattern.name)
    is_bound = not known_user(table, user).is_super
    decision = table.decide(user, asked, wanted, address)
    others = of_other_addresses(table.policies.get(user, Policies()), asked, wanted, peer) if is_bound else []
    if as_json:
        found = {"allowed": decision.allowed, "reason": decision.reason, "from": address}
        print_json({**found, "other_addresses": [one.to_json() for one in others]})
    else:
        click.echo(f"{'allowed' if decision.allowed else 'refused'} from {address}: {decision.reason}")
        for one in others:
            click.echo(f"does not count from {address}: {one}")
    if not decision.allowed:
        raise SystemExit(int(CliExit.FAILURE))
