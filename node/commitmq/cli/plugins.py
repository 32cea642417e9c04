"""``commitmq plugins``: the installed plugins, the parts that each adds, and the reason why one is omitted."""

from __future__ import annotations

import os
from pathlib import Path

import click

from commitmq.cli.options import json_option
from commitmq.cli.output import complain, print_json, print_table


@click.group(invoke_without_command=True)
@click.option("--all", "show_all", is_flag=True, help="Also the built-in ones.")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Configuration file to ask them with.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One configuration key; repeatable.")
@json_option
@click.pass_context
def plugins(
    ctx: click.Context, show_all: bool, config_path: Path | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """List plugins and the parts that they add. They are imported in a process of their own."""
    if ctx.invoked_subcommand is not None:
        return
    from commitmq.config import load
    from commitmq.extras import need_node

    need_node("`commitmq plugins`")
    from commitmq.plugin.loading import OWN_DISTRIBUTION
    from commitmq.supervision.discovery import discover_in_child

    config = load(config_path, overrides, environment=os.environ)
    found = discover_in_child(config, timeout_s=config.supervisor.plugin_load_timeout_s)
    reports = [one for one in found["plugins"] if show_all or one["distribution"] != OWN_DISTRIBUTION]
    for report in reports:
        for kind in ("dispatchers", "workers"):
            report[kind] = [one["name"] for one in found[kind] if one["plugin"] == report["name"]]
        report["filters"] = [one["type"] for one in found["filters"] if one["plugin"] == report["name"]]
    for sentence in found["config_errors"]:
        complain(sentence)
    if as_json:
        print_json(reports)
        return
    if not reports:
        click.echo("no plugins besides the built-in ones (--all lists those)")
        return
    print_table(
        ["plugin", "distribution", "version", "hooks", "state"],
        [
            [
                one["name"],
                one["distribution"],
                one["version"],
                ", ".join(one["hooks"]),
                f"failed in {one['failed_in']}" if one["failure"] else "loaded",
            ]
            for one in reports
        ],
        left=(0, 1, 3, 4),
    )
    for one in reports:
        if one["failure"]:
            click.echo(f"\n{one['name']} ({one['distribution']} {one['version']}) failed in {one['failed_in']}:")
            click.echo(one["failure"].rstrip())


@plugins.command()
@click.argument("name")
@click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False, exists=True), default=".", help="Parent folder."
)
def new(name: str, into: Path) -> None:
    """Write a plugin of your own: a project NAME with a dispatcher, settings, a verb, and tests that pass."""
    from commitmq.cli.main import VERBS
    from commitmq.plugin.project import write

    folder = write(name, into, set(VERBS))
    click.echo(
        f"{folder} is a plugin that works. `python -m pytest {folder}` tests it, `pip install {folder}` installs it."
    )
