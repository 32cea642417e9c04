"""What the verbs of users share: the store's option, its file of users, errors of usage, and the table of entries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from commitmq.cli import options
from commitmq.cli.output import print_table
from commitmq.errors import CommitMQError

if TYPE_CHECKING:
    from commitmq.security.access_file import AccessFile, AccessTable
    from commitmq.security.policy import Policies, User

store_option = options.store_option("The store, whether a node runs on it or not; or an empty folder for one.")


class UserNotFoundError(CommitMQError):
    """The user does not exist."""


def access_file(store: Path) -> AccessFile:
    """The file of users of a store, also of one that was never started. Raises StoreError for a folder that is none."""
    from commitmq.security.access_file import AccessFile
    from commitmq.store.access import require_store_or_new
    from commitmq.store.layout import StoreLayout

    require_store_or_new(StoreLayout(store))
    return AccessFile(store)


def store_for_users(store: Path | None) -> Path:
    """The store's folder, for ``--users``. Raises UsageError without one."""
    if store is None:
        raise click.UsageError(
            "--users needs --store, the folder of the node's store: only its owner may read and change all users"
        )
    return store


def complain_without_keys(store: Path) -> None:
    """Say to standard error that users do not close the node's own protocol, where the store has no node keys."""
    from commitmq.cli.output import complain
    from commitmq.security.node_keys import load_node_keys

    if load_node_keys(store) is None:
        complain(
            "the store has no node keys: users close the RocketMQ server only, and the node's own protocol asks nobody who"
            f" they are; `commitmq keys init --store {store}` and a new start change that"
        )


def known_user(table: AccessTable, name: str) -> User:
    """The user of that name. Raises UserNotFoundError."""
    known = table.users.get(name)
    if known is None:
        raise UserNotFoundError(f"there is no user {name!r}; `commitmq user list` shows them")
    return known


def print_entries(found: dict[str, Policies]) -> None:
    """A table of the entries of each user."""
    rows = [
        (
            name,
            str(entry.pattern),
            ", ".join(sorted(entry.actions)),
            "Allow" if entry.allow else "Deny",
            ", ".join(str(network) for network in entry.networks) or "everywhere",
        )
        for name, policies in found.items()
        for entry in (*policies.custom, *policies.default)
    ]
    print_table(("USER", "RESOURCE", "ACTIONS", "DECISION", "FROM"), rows, left=(0, 1, 2, 3, 4))
