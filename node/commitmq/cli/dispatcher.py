"""``commitmq dispatcher list|retry|restart|skip|reset|query``: the dispatchers of a running node."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.options import admin_option, admin_options, yes_option
from commitmq.cli.output import confirm, human_bytes, print_either, print_json, print_table
from commitmq.cli.quantity import long

if TYPE_CHECKING:
    from commitmq.client.admin import Admin


@click.group()
def dispatcher() -> None:
    """List dispatchers; move one that is stuck."""


@dispatcher.command(name="list")
@admin_options
def list_(as_json: bool, admin: Admin) -> None:
    """List the dispatchers: position, lag, and the record that a parked one stopped at."""
    rows = admin.dispatchers()
    if as_json:
        print_json(rows)
        return
    print_table(
        ("DISPATCHER", "PLUGIN", "STATE", "POSITION", "LAG", "RESTARTS", "SKIPPED"),
        [
            (
                row["name"],
                row["plugin"] or "built in",
                row["state"],
                row["position"],
                human_bytes(row["lag_bytes"]),
                row["restarts"],
                len(row["skipped"]),
            )
            for row in rows
        ],
        left=(0, 1, 2),
    )
    for row in rows:
        if row["state"] == "parked" and row["parked"]:
            click.echo(f"\n{row['name']} is parked at {_record(row['parked'])}")
            if row["last_error"] or row["last_exit"]:
                click.echo(f"  it died {row['parked']['deaths']} times there: {row['last_error'] or row['last_exit']}")
            click.echo(f"  `commitmq dispatcher retry {row['name']}` tries it again, `… skip …` leaves it out for ever")
        elif row["last_exit"] and row["restarts"]:
            click.echo(f"\n{row['name']} died last with {row['last_exit']}: {row['last_error'] or '-'}")
        for start, end in row["gaps"]:
            click.echo(
                f"\n{row['name']} missed physical offsets {start} to {end}: they were deleted before it came there"
            )


@dispatcher.command()
@click.argument("name")
@admin_options
def retry(name: str, as_json: bool, admin: Admin) -> None:
    """Let the parked dispatcher NAME try again, with its code loaded again."""
    admin.dispatcher_retry(name)
    print_either(as_json, {"retried": name}, f"dispatcher {name} starts again")


@dispatcher.command()
@click.argument("name")
@admin_options
def restart(name: str, as_json: bool, admin: Admin) -> None:
    """Restart dispatcher NAME in a new process: after its plugin was replaced by another version."""
    admin.dispatcher_restart(name)
    print_either(as_json, {"restarted": name}, f"dispatcher {name} starts again")


@dispatcher.command()
@click.argument("name")
@yes_option
@admin_options
def skip(name: str, yes: bool, as_json: bool, admin: Admin) -> None:
    """Let the parked dispatcher NAME continue without the record it is parked at."""
    row = next((one for one in admin.dispatchers() if one["name"] == name), None)
    parked: dict[str, Any] = (row or {}).get("parked") or {"physical_offset": -1}
    if parked["physical_offset"] >= 0 and not yes:
        confirm(f"Leave out {_record(parked)} for dispatcher {name}, for ever?")
    skipped = admin.dispatcher_skip(name, parked["physical_offset"])
    print_either(as_json, {"skipped": skipped}, f"dispatcher {name} continues without {_record(skipped)}")


@dispatcher.command()
@click.argument("name")
@click.option("--to", required=True, help="begin, end, a record's physical offset, or a time (2026-11-21T10:00).")
@yes_option
@admin_options
def reset(name: str, to: str, yes: bool, as_json: bool, admin: Admin) -> None:
    """Move dispatcher NAME: forwards skips records, backwards repeats them."""
    target = _target(to)
    if not yes:
        confirm(f"Move dispatcher {name} to {to}?")
    moved = admin.dispatcher_reset(name, target)
    print_either(
        as_json, moved, f"dispatcher {name} moved from physical offset {moved['before']} to {moved['position']}"
    )


@dispatcher.command()
@click.argument("name")
@click.argument("request", default="{}")
@admin_option
def query(name: str, request: str, admin: Admin) -> None:
    """Query dispatcher NAME; REQUEST is a JSON object, and so is the printed answer."""
    import orjson

    try:
        wanted = orjson.loads(request)
    except orjson.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="REQUEST") from error
    if not isinstance(wanted, dict):
        raise click.BadParameter("it must be a JSON object", param_hint="REQUEST")
    print_json(admin.dispatcher_query(name, wanted))


def _target(to: str) -> str | int | datetime:
    if to in ("begin", "end"):
        return to
    if to.isdecimal():
        return long(to, "--to")
    try:
        return datetime.fromisoformat(to)
    except ValueError:
        raise click.BadParameter(f"{to!r} is not begin, end, a physical offset or a time", param_hint="--to") from None


def _record(record: dict[str, Any]) -> str:
    place = f"physical offset {record['physical_offset']}"
    if "topic" not in record:
        return place
    return f"message {record['queue_offset']} of {record['topic']} queue {record['queue']} ({place})"
