"""``commitmq transaction list|resolve``: the transactions without an end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commitmq.cli.options import admin_options, yes_option
from commitmq.cli.output import ask_before, print_json, print_table

if TYPE_CHECKING:
    from commitmq.client.admin import Admin


@click.group()
def transaction() -> None:
    """List open transactions; end one manually."""


@transaction.command(name="list")
@click.option("--group", help="Only those of this producer group.")
@admin_options
def list_(group: str | None, as_json: bool, admin: Admin) -> None:
    """List the transactions without an end, oldest first."""
    rows = [one for one in admin.transactions() if group in (None, one.group)]
    if as_json:
        print_json([one.to_json() for one in rows])
        return
    print_table(
        ("TRANSACTION", "GROUP", "TOPIC", "QUEUE", "AGE_S", "CHECKS", "KEYS"),
        [
            (one.unique_id, one.group, one.topic, one.queue, f"{one.age_ms / 1000:.1f}", one.checks, one.keys)
            for one in rows
        ],
        left=(0, 1, 2, 6),
    )


@transaction.command()
@click.argument("transaction_id")
@click.argument("decision", type=click.Choice(["commit", "rollback"]))
@yes_option
@admin_options
def resolve(transaction_id: str, decision: str, yes: bool, as_json: bool, admin: Admin) -> None:
    """Commit or roll back the open transaction TRANSACTION_ID, without asking its producers. A rollback asks for confirmation.

    \b
    Example: commitmq transaction resolve 7F0000010001ABCD0000000000000001 commit
    """
    if decision == "rollback":
        ask_before(f"roll back transaction {transaction_id}, whose message nobody gets then", yes)
    done = admin.transaction_resolve(transaction_id, decision)
    if as_json:
        print_json(done)
    elif decision == "commit":
        click.echo(f"committed: {done['topic']}/{done['queue']}@{done['queue_offset']}")
    else:
        click.echo("rolled back")
