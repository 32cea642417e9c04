"""``commitmq user add|copy|alter|delete|show|list``: the users of a store, with whose names and secrets clients sign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.options import in_turn, json_option, yes_option
from commitmq.cli.output import ask_before, print_either, print_json, print_table, read_secret, usage
from commitmq.cli.user_key import check_profile_for, give_profile, key, output_option, tell_profile
from commitmq.cli.users import access_file, complain_without_keys, known_user, print_entries, store_option

if TYPE_CHECKING:
    from commitmq.security.access_file import AccessTable
    from commitmq.security.policy import Secret, User

_secret_option = click.option(
    "--secret-stdin", is_flag=True, help="Read the secret from standard input, one line; else a new one is made."
)


_credential_options = in_turn(
    click.option(
        "--profile-for",
        metavar="HOST:PORT",
        help="Make a key too, and print the profile for clients of the node there.",
    ),
    output_option,
    _secret_option,
    store_option,
    json_option,
)
"""Those of a verb that gives a new user credentials: the keyword arguments of :func:`_add`."""


@click.group()
def user() -> None:
    """Add, change, delete and list users.

    With the first user RocketMQ's clients must sign their requests; a running node knows a change within a second. The
    node's own protocol asks for users when the node has keys too (`commitmq keys init`).
    """


user.add_command(key)


@user.command()
@click.argument("name")
@click.option("--super", "is_super", is_flag=True, help="May do everything.")
@_credential_options
def add(name: str, is_super: bool, **given: Any) -> None:
    """Add user NAME, and print the secret that was made for it, once; with --profile-for the profile instead."""
    from commitmq.security.policy import User

    def make(table: AccessTable, new: str, secret: Secret) -> User:
        return User(new, secret, is_super)

    _add(name, make, **given)


@user.command()
@click.argument("name")
@click.argument("new")
@_credential_options
def copy(name: str, new: str, **given: Any) -> None:
    """Add user NEW, who may do what user NAME may: with its type, status, quotas and entries.

    NEW gets credentials of its own, as with `user add`; those of NAME are not copied.

    \b
    Example: commitmq user copy shop kiosk --store /var/lib/commitmq
    """
    from dataclasses import replace

    def make(table: AccessTable, checked: str, secret: Secret) -> User:
        known = known_user(table, name)
        if name in table.policies:
            table.policies[checked] = table.policies[name]
        return replace(known, name=checked, secret=secret, keys=())

    _add(new, make, **given)


def _add(
    name: str,
    make: Callable[[AccessTable, str, Secret], User],
    profile_for: str | None,
    output: Path | None,
    secret_stdin: bool,
    store: Path,
    as_json: bool,
) -> None:
    """Add the user ``name`` that ``make`` makes with its secret, and tell of it. Raises UsageError when there is one."""
    from commitmq.security.policy import check_name

    checked = usage(lambda: check_name(name))
    if output is not None and profile_for is None:
        raise click.UsageError("--output needs --profile-for")
    if profile_for is not None:
        check_profile_for(store, profile_for)
    secret = read_secret() if secret_stdin else _new_secret()

    def apply(table: AccessTable) -> None:
        if checked in table.users:
            raise click.UsageError(f"there is a user {checked} already; `commitmq user alter` changes it")
        table.users[checked] = make(table, checked, secret)

    if profile_for is not None:
        made = give_profile(store, checked, profile_for, output, apply)
        if as_json:
            print_json({**_shown(access_file(store).load().users[checked]), **made.to_json(output)})
        else:
            tell_profile(made, checked, output)
        return
    table = access_file(store).change(apply)
    _tell(table.users[checked], None if secret_stdin else secret, as_json)
    complain_without_keys(store)


@user.command()
@click.argument("name")
@click.option("--super/--normal", "is_super", default=None, help="Whether the user may do everything.")
@click.option("--enable/--disable", "is_enabled", default=None, help="Whether the user may do anything.")
@click.option("--new-secret", is_flag=True, help="Make a new secret and print it.")
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="NAME=NUMBER",
    help="What the user may take, as send_bytes_per_s=10MiB or connections=20; 0 for no bound, default for the node's.",
)
@_secret_option
@store_option
@json_option
def alter(
    name: str,
    is_super: bool | None,
    is_enabled: bool | None,
    new_secret: bool,
    quotas: tuple[str, ...],
    secret_stdin: bool,
    store: Path,
    as_json: bool,
) -> None:
    """Change user NAME: its kind, its secret, whether it may do anything, its quotas.

    Example: commitmq user alter shop --quota send_bytes_per_s=10MiB --store /var/lib/commitmq
    """
    from dataclasses import replace

    from commitmq.security.policy import parse_quota, quotas_from_json

    wanted = usage(lambda: [parse_quota(one) for one in quotas])
    if new_secret and secret_stdin:
        raise click.UsageError("give --new-secret or --secret-stdin")
    if is_super is None and is_enabled is None and not new_secret and not secret_stdin and not wanted:
        options = "--super, --normal, --enable, --disable, --new-secret, --secret-stdin, --quota"
        raise click.UsageError(f"say what changes: {options}")
    secret = _new_secret() if new_secret else read_secret() if secret_stdin else None
    changed: list[User] = []

    def apply(table: AccessTable) -> None:
        known = known_user(table, name)
        others = dict(known.quotas)
        for quota, number in wanted:
            others.pop(quota, None)
            if number is not None:
                others[quota] = number
        one = replace(
            known,
            is_super=known.is_super if is_super is None else is_super,
            is_enabled=known.is_enabled if is_enabled is None else is_enabled,
            secret=secret or known.secret,
            quotas=quotas_from_json(others),
        )
        table.users[name] = one
        changed.append(one)

    access_file(store).change(apply)
    _tell(changed[-1], secret if new_secret else None, as_json)


@user.command()
@click.argument("name")
@yes_option
@click.option("--force", is_flag=True, help="Also the last super user that is enabled.")
@store_option
@json_option
def delete(name: str, yes: bool, force: bool, store: Path, as_json: bool) -> None:
    """Delete user NAME and its policies. Without any user everybody is let in: deleting the last one is refused.

    `commitmq user alter NAME --disable` keeps everybody out. The last super user that is enabled goes only with --force.

    \b
    Example: commitmq user delete shop --store /var/lib/commitmq
    """

    def check(table: AccessTable) -> None:
        one = known_user(table, name)
        if len(table.users) == 1:
            raise click.UsageError(
                f"{name} is the last user, and without users everybody is let in; to have that, stop the node and remove"
                f" {access_file(store).folder}"
            )
        supers = [user.name for user in table.users.values() if user.is_super and user.is_enabled]
        if not force and one.name in supers and len(supers) == 1:
            raise click.UsageError(
                f"{name} is the last super user that is enabled, and only super users change users over a network; make"
                " another one first (`commitmq user alter OTHER --super`), or give --force"
            )

    def apply(table: AccessTable) -> None:
        check(table)
        del table.users[name]
        table.policies.pop(name, None)

    check(access_file(store).load())
    ask_before(f"delete user {name} with its keys and entries", yes)
    access_file(store).change(apply)
    print_either(as_json, {"name": name, "deleted": True}, f"user {name} deleted")


@user.command()
@click.argument("name")
@store_option
@json_option
def show(name: str, store: Path, as_json: bool) -> None:
    """Show user NAME: its kind, quotas, public keys and entries, without its secret.

    \b
    Example: commitmq user show shop --store /var/lib/commitmq
    """
    from commitmq.security.policy import Policies

    table = access_file(store).load()
    one = known_user(table, name)
    policies = table.policies.get(name, Policies())
    if as_json:
        keys = list(one.keys)
        print_json(
            {"name": name, **one.shown(), "keys": keys, "quotas": dict(one.quotas), "policies": policies.to_json()}
        )
        return
    _tell(one, None, as_json=False)
    for key_ in one.keys:
        click.echo(f"key: {key_}")
    if policies.custom or policies.default:
        print_entries({name: policies})
    elif not one.is_super:
        click.echo("no entries: it may do nothing")


@user.command(name="list")
@store_option
@json_option
def list_(store: Path, as_json: bool) -> None:
    """List the users."""
    users = access_file(store).load().users.values()
    if as_json:
        print_json([{"name": one.name, **one.shown(), **one.shown_quotas()} for one in users])
    elif not users:
        click.echo("no users: everybody who reaches the node is let in")
    elif any(one.quotas for one in users):
        rows = [(one.name, *one.shown().values(), _quotas(one)) for one in users]
        print_table(("USER", "TYPE", "STATUS", "QUOTAS"), rows, left=(0, 1, 2, 3))
    else:
        print_table(("USER", "TYPE", "STATUS"), [(one.name, *one.shown().values()) for one in users], left=(0, 1, 2))


def _new_secret() -> Secret:
    from commitmq.security.policy import Secret

    return Secret.make()


def _quotas(one: User) -> str:
    return " ".join(f"{name}={number}" for name, number in one.quotas)


def _shown(one: User) -> dict[str, Any]:
    return {"name": one.name, **one.shown(), **one.shown_quotas()}


def _tell(one: User, secret: Secret | None, as_json: bool) -> None:
    if as_json:
        print_json(_shown(one) if secret is None else {**_shown(one), "secret": secret.reveal()})
        return
    click.echo(f"user {one.name}: {', '.join(one.shown().values())}d")
    if one.quotas:
        click.echo(f"quotas: {_quotas(one)}")
    if secret is not None:
        click.echo(f"secret: {secret.reveal()}  (it is not shown again)")
