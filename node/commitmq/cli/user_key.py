"""``commitmq user key``: the public keys of a user, as in ``authorized_keys``, and profiles for its clients."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from commitmq.cli.options import json_option, yes_option
from commitmq.cli.output import ask_before, complain, fail, print_json, usage
from commitmq.cli.users import access_file, known_user, store_option
from commitmq.errors import StoreError

if TYPE_CHECKING:
    from commitmq.security.access_file import AccessTable
    from commitmq.security.policy import User

_KEYS_WITH_DASHES: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
"""A public key may begin with a dash; it is no option then, nor are the letters in it, as -h."""
_node_option = click.option(
    "--node", required=True, metavar="HOST:PORT", help="Where the user's clients find the node: HOST:PORT."
)
output_option = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the profile to a new file, mode 0600."
)


@click.group()
def key() -> None:
    """The keys of a user's clients. The node keeps public keys only."""


@key.command()
@click.argument("name")
@_node_option
@output_option
@store_option
def new(name: str, node: str, output: Path | None, store: Path) -> None:
    """Make a key for user NAME, and print the profile for its clients.

    It belongs into ~/.config/commitmq/PROFILE.toml of the client's account, mode 0600. The secret in it is kept nowhere else.
    """
    check_profile_for(store, node)
    tell_profile(give_profile(store, name, node, output), name, output)


@key.command()
@click.argument("name")
@_node_option
@output_option
@store_option
@json_option
def rotate(name: str, node: str, output: Path | None, store: Path, as_json: bool) -> None:
    """Make a new key for user NAME beside the old ones, and print the profile for its clients.

    The old keys stay valid, so that clients change over one after the other and none stops. When all have the new profile,
    take each old key with `commitmq user key remove`; the old keys are named on standard error, with --json in `old_keys`.

    \b
    Example: commitmq user key rotate shop --node db.example:7310 --output shop.toml --store /var/lib/commitmq
    """
    check_profile_for(store, node)
    if not known_user(access_file(store).load(), name).keys:
        raise click.UsageError(f"user {name} has no key to change over from; `commitmq user key new {name}` makes one")
    made = give_profile(store, name, node, output)
    if as_json:
        print_json({"name": name, "old_keys": made.old_keys, **made.to_json(output)})
        return
    tell_profile(made, name, output)
    for one in made.old_keys:
        words = shlex.join((name, one, "--store", str(store)))
        complain(f"when all clients have the new profile: commitmq user key remove {words}")


@key.command(context_settings=_KEYS_WITH_DASHES)
@click.argument("name")
@click.argument("public_key")
@store_option
def add(name: str, public_key: str, store: Path) -> None:
    """Let user NAME in with a key pair that was made elsewhere."""
    from commitmq.security.policy import check_key

    checked = usage(lambda: check_key(public_key))
    _change(store, name, lambda user: user if checked in user.keys else replace(user, keys=(*user.keys, checked)))
    click.echo(f"user {name} has the key {checked}")


@key.command(context_settings=_KEYS_WITH_DASHES)
@click.argument("name")
@click.argument("public_key")
@yes_option
@store_option
def remove(name: str, public_key: str, yes: bool, store: Path) -> None:
    """Take a key from user NAME. A client that is connected with it is refused within a second.

    \b
    Example: commitmq user key remove shop 'OLD-KEY' --store /var/lib/commitmq
    """

    def without(user: User) -> User:
        if public_key not in user.keys:
            raise click.UsageError(f"user {name} has no such key; `commitmq user key list {name}` shows them")
        return replace(user, keys=tuple(one for one in user.keys if one != public_key))

    without(known_user(access_file(store).load(), name))
    ask_before(f"take the key {public_key} from user {name}", yes)
    _change(store, name, without)
    click.echo(f"user {name} has no longer the key {public_key}")


@key.command(name="list")
@click.argument("name")
@store_option
@json_option
def list_(name: str, store: Path, as_json: bool) -> None:
    """List the public keys of user NAME."""
    found = known_user(access_file(store).load(), name).keys
    if as_json:
        print_json(list(found))
    else:
        for one in found:
            click.echo(one)


def check_profile_for(store: Path, node: str) -> str:
    """The address in ``node``. Exits where the node has no keys; raises UsageError for what is no address."""
    from commitmq.security.node_keys import load_node_keys

    access_file(store)
    if load_node_keys(store) is None:
        fail("the node has no keys yet; `commitmq keys init` makes them")
    host, colon, port = node.rpartition("://")[2].rpartition(":")
    if not colon or not host or not port.isdecimal() or any(one in '@"\\' or not one.isprintable() for one in host):
        raise click.UsageError(f"{node!r:.100} must be HOST:PORT, as in db.example:7310")
    return f"{host}:{port}"


class MadeKey(NamedTuple):
    """A new key of a user: its public part, those that the user had before, and the profile, which has the secret."""

    key: str
    old_keys: list[str]
    text: str

    def to_json(self, output: Path | None) -> dict[str, str]:
        """``key``, and the ``profile``, or the file of it in ``output``."""
        return {"key": self.key, **({"profile": self.text} if output is None else {"output": str(output)})}


def give_profile(
    store: Path, name: str, node: str, output: Path | None, make: Callable[[AccessTable], None] | None = None
) -> MadeKey:
    """Give user ``name`` a new key beside those it has; the profile is in ``output`` before the node knows the key.

    ``make`` adds the user in the same change: a profile that cannot be written leaves no user without one.
    """
    from commitmq.protocol.node_address import Profile
    from commitmq.security.node_keys import KeyPair, load_node_keys

    address, of_node, pair = check_profile_for(store, node), load_node_keys(store), KeyPair.make()
    assert of_node is not None
    if make is None:
        known_user(access_file(store).load(), name)
    text = Profile(name, address, of_node.public, pair.public, pair.secret.reveal()).text(name)
    if output is not None:
        _write_private(output, text)
    old_keys: list[str] = []

    def with_key(user: User) -> User:
        old_keys.extend(user.keys)
        return replace(user, keys=(*user.keys, pair.public))

    try:
        _change(store, name, with_key, make)
    except Exception:
        if output is not None and not _may_be_known(store, name, pair.public):
            output.unlink(missing_ok=True)  # the profile of a key that nobody knows, which would stop the next try
        raise
    return MadeKey(pair.public, old_keys, text)


def _may_be_known(store: Path, name: str, public_key: str) -> bool:
    """Whether the user may have the key, as it may when the folder's sync failed: then its profile is worth something."""
    try:
        user = access_file(store).load().users.get(name)
    except StoreError:
        return True
    return user is not None and public_key in user.keys


def tell_profile(made: MadeKey, name: str, output: Path | None) -> None:
    """Print the profile, or say that it is in ``output``."""
    if output is None:
        sys.stdout.write(made.text)
    else:
        click.echo(f"profile of user {name}: {output}")


def _change(
    store: Path, name: str, apply: Callable[[User], User], make: Callable[[AccessTable], None] | None = None
) -> None:
    from commitmq.security.policy import MAX_KEYS

    def changed(table: AccessTable) -> None:
        if make is not None:
            make(table)
        user = apply(known_user(table, name))
        if len(user.keys) > MAX_KEYS:
            raise click.UsageError(f"a user has at most {MAX_KEYS} keys; `commitmq user key remove` takes one away")
        for one in user.keys:
            owner = table.owner_of(one)
            if owner is not None and owner.name != name:
                raise click.UsageError(f"user {owner.name} has this key already")
        table.users[name] = user

    access_file(store).change(changed)


def _write_private(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        fail(f"{path} is there already; remove it, or write another file")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)  # half a profile would stand in the way of the next try
        fail(f"cannot write {path}: {error.strerror}")
