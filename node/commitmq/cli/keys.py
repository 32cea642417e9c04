"""``commitmq keys``: the node's own keys, with which its tcp ports encrypt and ask everybody for a key."""

from __future__ import annotations

from pathlib import Path

import click

from commitmq.cli import options
from commitmq.cli.options import json_option
from commitmq.cli.output import fail, print_either, print_json
from commitmq.cli.users import access_file, store_option
from commitmq.supervision.exit_codes import CliExit


@click.group()
def keys() -> None:
    """The keys of a node: encrypted connections, for users that have a key."""


@keys.command()
@options.store_option("The store; also one that is not there yet.", exists=False)
@json_option
def init(store: Path, as_json: bool) -> None:
    """Make the node's keys. From its next start on its tcp ports take only clients with a user's key.

    A store that has keys keeps them: every profile names them.
    """
    from commitmq.security.node_keys import make_node_keys
    from commitmq.store.access import private_files, refusals_told

    with private_files(store):
        with refusals_told(store):
            store.mkdir(parents=True, exist_ok=True)
        try:
            made = make_node_keys(store)
        except FileExistsError as error:
            fail(f"{error}; `commitmq keys show` prints the public one")
    if as_json:
        print_json({"public_key": made.public})
    else:
        click.echo(f"public key of the node: {made.public}")
        click.echo(
            "start the node, or stop and start it; then `commitmq user add NAME --profile-for HOST:PORT` lets one in"
        )


@keys.command()
@store_option
@json_option
def show(store: Path, as_json: bool) -> None:
    """Print the node's public key."""
    from commitmq.security.node_keys import load_node_keys

    access_file(store)
    found = load_node_keys(store)
    if found is None:
        fail("the node has no keys; `commitmq keys init` makes them", CliExit.FAILURE)
    print_either(as_json, {"public_key": found.public}, found.public)
