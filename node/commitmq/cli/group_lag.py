"""``commitmq group lag``: how far a group is behind, once or again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commitmq.cli.output import json_option, node_option, print_json, print_table
from commitmq.cli.quantity import MAX_LONG
from commitmq.cli.watching import looks, new_page, watch_option

if TYPE_CHECKING:
    from commitmq.client.admin_results import Lag


@click.command()
@click.argument("name")
@click.option(
    "--min",
    "least",
    type=click.IntRange(0, MAX_LONG),
    default=0,
    metavar="N",
    help="Show only queues where it is at least N messages behind, and those with a problem.",
)
@watch_option
@json_option
@node_option
def lag(name: str, least: int, every_s: float | None, as_json: bool, node: str) -> None:
    """Show how far group NAME is behind in every queue that it has consumed.

    The sum counts all queues, also those that --min hides. Watched output that is not a terminal gets one page after the
    other; --json a line for each look.

    \b
    Example: commitmq group lag kitchen --min 1 --watch 5
    """
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        for _ in looks(every_s):
            rows = admin.group_lag(name)
            total = sum(row.lag for row in rows)
            shown = [row for row in rows if row.lag >= least or row.problem]
            if as_json:
                print_json({"group": name, "lag": total, "queues": shown})
                continue
            if every_s is not None:
                new_page()
            _show(name, total, shown)


def _show(name: str, total: int, rows: list[Lag]) -> None:
    if rows:
        print_table(
            ("TOPIC", "QUEUE", "COMMITTED", "NEXT OFFSET", "LAG", "MEMBER"),
            [(row.topic, row.queue, row.committed, row.end, row.lag, row.member or "-") for row in rows],
            left=(0, 5),
        )
    click.echo(f"group {name} is {total} messages behind")
    for row in rows:
        if row.problem:
            click.echo(f"{row.topic} queue {row.queue}: {row.problem}")
