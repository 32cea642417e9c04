"""``commitmq plugins``: what is installed, what each adds, and why one is left out."""

from __future__ import annotations

from typing import Any

import click

from commitmq.cli.output import json_option, print_json, print_table


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Also the built-in ones.")
@json_option
def plugins(show_all: bool, as_json: bool) -> None:
    """List plugins and what they add."""
    from commitmq import plugins as loader
    from commitmq.config import NodeConfig

    loaded = loader.load()
    loaded.dispatchers(NodeConfig())  # a hook that raises shows only when it is called
    reports = [report for report in loaded.reports if show_all or report.distribution != loader.OWN_DISTRIBUTION]
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "name": one.name,
                "distribution": one.distribution,
                "version": one.version,
                "hooks": one.hooks,
                "failure": one.failure,
            }
            for one in reports
        ]
        print_json(rows)
        return
    if not reports:
        click.echo("no plugins besides the built-in ones (--all lists those)")
        return
    print_table(
        ["plugin", "distribution", "version", "hooks", "state"],
        [
            [one.name, one.distribution, one.version, ", ".join(one.hooks), "failed" if one.failure else "loaded"]
            for one in reports
        ],
        left=(0, 1, 3, 4),
    )
    for one in reports:
        if one.failure:
            click.echo(f"\n{one.name} ({one.distribution} {one.version}) is left out:\n{one.failure}")
