"""``commitmq config``: the settings of a running node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from commitmq.cli.node_verb import address_of, request
from commitmq.cli.options import json_option, node_options
from commitmq.cli.output import complain, node_unless, print_json, print_table
from commitmq.config import schema


@click.group()
def config() -> None:
    """Show the settings of a running node, and change those that need no restart."""


@config.command()
@click.argument("prefix", metavar="[KEY]", default="")
@click.option("--changed", is_flag=True, help="Only settings with another value than the profile's default.")
@node_options
@json_option
def show(prefix: str, changed: bool, node: str | None, store: Path | None, timeout_s: float, as_json: bool) -> None:
    """Show the settings: value, default, where the value comes from, and whether it can change at once (live).

    KEY is the beginning of names, such as flow or log.level.

    \b
    Example: commitmq config show --changed
    """
    answer = request(address_of(store, node_unless(store, node)), "config.show", timeout_s=timeout_s)
    rows = [row for row in answer["settings"] if row["key"].startswith(prefix)]
    if prefix and not rows:
        raise click.BadParameter(f"there is no setting {prefix!r}", param_hint="KEY")
    if changed:
        rows = [row for row in rows if row["value"] != row["default"]]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("setting", "value", "default", "from", "change"),
        [
            (
                row["key"],
                shown(row["key"], row["value"]),
                "" if row["value"] == row["default"] else shown(row["key"], row["default"]),
                row["source"],
                "live" if row["live"] else "restart",
            )
            for row in rows
        ],
        left=(0, 1, 2, 3, 4),
    )


@config.command(name="set")
@click.argument("key")
@click.argument("value")
@node_options
@json_option
def set_(key: str, value: str, node: str | None, store: Path | None, timeout_s: float, as_json: bool) -> None:
    """Give the live setting KEY the value VALUE at once, without a restart.

    The node keeps the change in commitmq/settings.json of its store, where it goes over the configuration file and the
    environment at the next start. A --set of that start goes over it. `config unset` gives it up. A KEY that is not live
    is refused: change the file and restart.

    \b
    Example: commitmq config set log.level DEBUG
    """
    _tell(
        request(address_of(store, node_unless(store, node)), "config.set", timeout_s=timeout_s, key=key, value=value),
        as_json,
    )


@config.command()
@click.argument("key")
@node_options
@json_option
def unset(key: str, node: str | None, store: Path | None, timeout_s: float, as_json: bool) -> None:
    """Give up a change of KEY: its value is again the one of --set, the environment, the file or the default.

    \b
    Example: commitmq config unset log.level
    """
    answer = request(address_of(store, node_unless(store, node)), "config.unset", timeout_s=timeout_s, key=key)
    _tell(answer, as_json)


def _tell(answer: dict[str, Any], as_json: bool) -> None:
    told = {name: answer[name] for name in ("key", "before", "value", "source", "until_restart", "not_yet")}
    if as_json:
        print_json(told)
        return
    key = told["key"]
    click.echo(f"{key}: {shown(key, told['before'])} -> {shown(key, told['value'])} ({told['source']})")
    if told["until_restart"]:
        complain(f"the node was started with --set {key}: started so again, it takes that value")
    if told["not_yet"]:
        complain(f"these processes have not taken it yet, and will: {', '.join(told['not_yet'])}")


def shown(name: str, value: Any) -> str:
    """``value`` of the setting ``name`` as an operator reads it, and could write it."""
    if value is None:
        return "-"
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int and schema.unit_of(name) == "bytes":
        return schema.human(value)
    return str(value) or '""'
