"""``commitmq status``: the processes of a node with CPU, memory, position and lag, once or again and again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from commitmq.cli.node_verb import address_of, request
from commitmq.cli.options import (
    json_option,
    node_or_none_option,
    running_store_option,
    timeout_option,
    watch_option,
)
from commitmq.cli.output import human_bytes, looks, new_page, node_unless, print_json, print_table
from commitmq.config.fitting import no_index
from commitmq.supervision.exit_codes import progress_sentence

_PARTS = ("node", "processes", "positions", "disk_flags", "disk_warnings", "dispatchers", "plugins")
_POSITIONS = ("min_offset", "dispatched", "reput", "flushed", "written", "allocated")


@click.command()
@node_or_none_option
@running_store_option
@timeout_option(5.0)
@watch_option
@json_option
def status(node: str | None, store: Path | None, timeout_s: float, every_s: float | None, as_json: bool) -> None:
    """Show every process of a node: pid, state, restarts, CPU, memory, position and lag.

    Watched output that is not a terminal gets one page after the other; --json a line for each look. It ends with Ctrl-C, or
    when the node does not answer.

    \b
    Example: commitmq status --watch 5
    """
    node = node_unless(store, node)
    for _ in looks(every_s):
        answer = request(address_of(store, node), "status", timeout_s=timeout_s)
        report = {key: answer[key] for key in _PARTS}
        if as_json:
            print_json(report)
            continue
        if every_s is not None:
            new_page()
        _print(report)


def _print(report: dict[str, Any]) -> None:
    processes = report["processes"]
    _print_node(report["node"], report["disk_warnings"])
    click.echo()
    _print_processes(processes)
    _print_expiry(next((row["info"].get("expiry") for row in processes if row["role"] == "cleanup"), None))
    _print_clock(next((row["info"].get("clock") for row in processes if row["role"] == "writer"), None))
    _print_stopped_plugins(report["dispatchers"], report["plugins"])
    words = report["positions"]
    click.echo("\nlog " + "  ".join(f"{name} {words[name]}" for name in _POSITIONS))


def _print_node(node: dict[str, Any], disk_warnings: list[str]) -> None:
    click.echo(f"node {node['admin'][0]}  {node['state']}  epoch {node['epoch']}  {node['flush_mode']} flush")
    click.echo(f"store {node['store']}  id {node['store_id']}")
    for line in [*security_lines(node), *node["security"]["faults"]]:
        click.echo(line)
    if node["refuses_sends"]:
        click.secho("SENDS ARE REFUSED: the node is drained; `commitmq drain off` ends that", fg="red", bold=True)
    if node.get("progress"):
        click.echo(f"{node['progress']['role']}: {progress_sentence(node['progress'])}")
    for told in node.get("remaking") or []:
        click.echo(f"{told['role']}: {progress_sentence(told)}")
    for sentence in node.get("insecure") or []:
        click.secho(f"INSECURE: {sentence}", fg="red", bold=True)
    if node["keeper"] == "gone":
        click.echo("keeper is gone: nothing starts this node's supervisor again if it is killed")
    for cut in node.get("cuts") or []:
        where = ", ".join(cut["copies"]) or "nothing was left to keep"
        records = f", {cut['records']} whole records among them" if cut["records"] >= 0 else ""
        ended = f"; the log ended at {cut['log_end']}" if cut["log_end"] >= 0 else ""
        what = f"{_utc(cut['time_ms'])} by {cut['by']}: {cut['bytes']} bytes{records}{ended}"
        click.echo(f"cut from the log {what} ({cut['reason']}); kept in {where}")
    if (last := node.get("last_log_cut")) and last["lowered"]["positions"]:
        lowered, when = last["lowered"], _utc(last["time_ms"])
        click.echo(f"the log ended at {last['end']} {when} ({last['by']}), before what groups had committed:", nl=False)
        click.echo(f" {lowered['positions']} offset(s) of {lowered['groups']} group(s) were lowered by", nl=False)
        click.echo(f" {lowered['messages']} message(s) together")
    for sentence in [*disk_warnings, *(node.get("audit_faults") or [])]:
        click.echo(sentence)
    if node["index_problem"]:
        click.echo(no_index(node["index_problem"]))


def _utc(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def security_lines(node: dict[str, Any]) -> list[str]:
    """Whether users and node keys are on, and where the node listens."""
    security = node["security"]
    words = {True: "on", False: "off", None: "unknown"}
    addresses = "  ".join(f"{name} {address.removeprefix('tcp://')}" for name, address in node["listeners"].items())
    return [
        f"users {words[security['users']]}  node keys {words[security['node_keys']]}",
        f"listens {addresses}",
    ]


def _print_processes(processes: list[dict[str, Any]]) -> None:
    """Print a table of the processes with its totals, and the last ends of those that ended."""
    rows = [
        (
            row["role"],
            row["state"],
            row["pid"] or "-",
            row["restarts"],
            "-" if row["cpu_percent"] is None else f"{row['cpu_percent']:.1f}",
            human_bytes(row["memory_bytes"]),
            row.get("position", ""),
            "" if row.get("lag_bytes") is None else human_bytes(row["lag_bytes"]),
        )
        for row in processes
    ]
    restarts = sum(row["restarts"] for row in processes)
    cpu_percent = sum(row["cpu_percent"] or 0 for row in processes)
    memory_bytes = sum(row["memory_bytes"] or 0 for row in processes)
    rows.append(("total", "", "", restarts, f"{cpu_percent:.1f}", human_bytes(memory_bytes), "", ""))
    print_table(("process", "state", "pid", "restarts", "cpu %", "memory", "position", "lag"), rows, left=(0, 1))
    refused = {row["role"]: row["refused"] for row in processes if row.get("refused")}
    if refused:
        click.echo(f"\nrequests refused by rates ([flow]): {', '.join(f'{role} {n}' for role, n in refused.items())}")
    ended = [row for row in processes if row.get("last_exit") and row["state"] != "done"]
    if ended:
        click.echo("\nlast ends:")
    for row in ended:
        click.echo(f"  {row['role']}: {row['last_exit']}{': ' + row['last_error'] if row.get('last_error') else ''}")


def _print_clock(clock: dict[str, Any] | None) -> None:
    if clock:
        click.echo(
            f"\nthe clock was {clock['was_ahead_ms'] / 1000:.0f} s ahead: so are the store timestamps of messages below offset"
            f" {clock['until_offset']}"
        )


def _print_stopped_plugins(dispatchers: list[dict[str, Any]], plugins: list[dict[str, Any]]) -> None:
    """Print the parked dispatchers, and the plugins that failed."""
    for row in dispatchers:
        if row["state"] == "parked":
            click.echo(f"\ndispatcher {row['name']} is parked: see `commitmq dispatcher list`")
    for plugin in plugins:
        if plugin["failure"]:
            why = plugin["failure"].strip().splitlines()[-1]
            click.echo(f"\nplugin {plugin['name']} failed in {plugin['failed_in']}: {why}")
            click.echo("  `commitmq plugins` shows the whole failure")


def _print_expiry(expiry: dict[str, Any] | None) -> None:
    """Print the last deletion of cleanup, the reason why it deletes nothing now, and the time of the next deletion."""
    if expiry is None:
        return  # its first look comes a minute after the start
    click.echo(f"\nexpiry: oldest segment {expiry['oldest_segment'] or '-'}: {expiry['kept_because']}")
    if expiry["next_by_age_ms"] is not None:
        click.echo(f"  it expires by age from {_when(expiry['next_by_age_ms'])} on")
    if expiry["last_round"]:
        last = expiry["last_round"]
        click.echo(
            f"  last deleted at {_when(last['at_ms'])}: {last['segments']} segments, "
            f"{human_bytes(last['disk_bytes'])}, because of {', '.join(last['reasons'])}"
        )
    if expiry["held_bytes"]:
        who = ", ".join(expiry["held_by"]) or "a process that cannot be seen"
        click.echo(f"  {human_bytes(expiry['held_bytes'])} of deleted segments are still held by {who}")
    if expiry["overrode"]:
        over = expiry["overrode"]
        click.echo(
            f"  AT {_when(over['at_ms'])} THE DISK WAS SO FULL THAT {over['segments']} SEGMENTS WERE DELETED "
            f"although they were needed by {over['needed_by']}"
        )
    if expiry["error"]:
        click.echo(f"  it fails: {expiry['error']}")


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec="seconds")
