"""``commitmq doctor``: one page of what is wrong with a node, and what to do. The rules: :mod:`commitmq.cli.findings`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli import findings
from commitmq.cli.node_verb import address_of, request
from commitmq.cli.options import json_option, node_options
from commitmq.cli.output import node_unless, print_json
from commitmq.cli.status import security_lines
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.client.admin import Admin

MAX_GROUPS = 200


@click.command()
@click.option(
    "--groups", "most", type=click.IntRange(0), default=MAX_GROUPS, show_default=True, help="Groups to look at."
)
@node_options
@json_option
def doctor(most: int, node: str | None, store: Path | None, timeout_s: float, as_json: bool) -> None:
    """Examine a node: disk, limits, clock, lags, dispatchers, subscriptions, dead letters, restarts, listeners, users
    and keys, a drain.

    The exit code is 1 when an error was found, else 0. For a cluster of RocketMQ: `commitmq rocketmq doctor`.

    \b
    Example: commitmq doctor --json
    """
    examined = examine(address_of(store, node_unless(store, node)), most, timeout_s)
    if as_json:
        print_json(examined)
    else:
        _print(examined)
    if any(one["level"] == findings.ERROR for one in examined["findings"]):
        raise SystemExit(int(CliExit.FAILURE))


def _print(examined: dict[str, Any]) -> None:
    for line in security_lines(examined):
        click.echo(line)
    if not examined["findings"]:
        click.echo(f"nothing was found; {examined['groups']} of {examined['all_groups']} groups were looked at")
        return
    for one in examined["findings"]:
        click.secho(
            f"{one['level']}: {one['what']}: {one['says']}",
            fg={"error": "red", "warning": "yellow"}.get(one["level"]),
        )
        click.echo(f"    {one['do']}")
    if examined["groups"] < examined["all_groups"]:
        click.echo(f"{examined['groups']} of {examined['all_groups']} groups were looked at (--groups)")


def examine(address: str, most_groups: int, timeout_s: float) -> dict[str, Any]:
    """``findings`` as JSON shows them, and how many groups were looked at. Raises NodeUnavailableError and ProtocolError."""
    from commitmq.client.admin import Admin
    from commitmq.errors import CommitMQError

    report = request(address, "status", timeout_s=timeout_s)
    found = [*findings.of_report(report), *findings.of_limits(_descriptors(report))]
    names: list[str] = []
    looked = 0
    if report["node"]["state"] == "ready":
        with Admin(address, timeout_s=timeout_s) as admin:
            names = [str(one["name"]) for one in admin.groups()]
            for name in names[:most_groups]:
                try:
                    found += findings.of_group(admin.group(name), admin.group_lag(name))
                except CommitMQError as error:
                    found.append(
                        findings.DoctorFinding(
                            findings.WARNING, f"group {name}", f"cannot be examined: {error}", "look again"
                        )
                    )
                looked += 1
            found += _of_dead_letters(admin, most_groups)
            if report["node"]["security"]["users"]:
                found += findings.of_retry_topics((one.name for one in admin.topics()), names)
    return {
        "node": report["node"]["admin"][0],
        **{part: report["node"][part] for part in ("security", "listeners", "refuses_sends")},
        "findings": [one.to_json() for one in findings.ordered(found)],
        "groups": looked,
        "all_groups": len(names),
    }


def _of_dead_letters(admin: Admin, most_groups: int) -> list[findings.DoctorFinding]:
    from commitmq.errors import CommitMQError

    if not most_groups:
        return []
    try:
        counts, following = admin.dlq_groups(max_groups=most_groups)
    except CommitMQError as error:
        return [
            findings.DoctorFinding(findings.WARNING, "dead letters", f"they cannot be counted: {error}", "look again")
        ]
    found = findings.of_dead_letters(counts)
    if following is not None:
        says = f"only those of {most_groups} groups were counted"
        found.append(
            findings.DoctorFinding(findings.NOTE, "dead letters", says, f"`commitmq dlq list --after {following}`")
        )
    return found


def _descriptors(report: dict[str, Any]) -> dict[str, int]:
    """The number of descriptors that each process may open; only those of this machine that this account may look at."""
    token = report["node"]["token"]
    try:
        if (Path(report["node"]["store"]) / "run" / "token").read_text(encoding="ascii").strip() != token:
            return {}
    except (OSError, UnicodeDecodeError):
        return {}
    found = {}
    for row in report["processes"]:
        try:
            limits = Path(f"/proc/{row['pid']}/limits").read_text(encoding="ascii")
            line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
            soft = line.split()[3]
            found[str(row["role"])] = 1 << 30 if soft == "unlimited" else int(soft)
        except (OSError, StopIteration, ValueError, IndexError):
            continue
    return found
