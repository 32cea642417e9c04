"""``commitmq group members|pop``: who reads for a group, and what its consumers have in flight."""

from __future__ import annotations

from typing import Any

import click

from commitmq.cli.client_questions import GATEWAY, NO_QUESTIONS, Questions, question_options
from commitmq.cli.output import complain, json_option, node_option, print_json, print_table
from commitmq.supervision.exit_codes import CliExit


@click.command()
@click.argument("name")
@click.option("--stack", is_flag=True, help="Instead, the stack of each member that is a client of RocketMQ.")
@question_options
@json_option
@node_option
def members(
    name: str, stack: bool, access_key: str | None, tls: bool, timeout_s: float, as_json: bool, node: str
) -> None:
    """Show the members of group NAME: where each is, what it reads, and when it was heard last.

    ADDRESS is that of the member's connection, or on the node's host its process. A client of RocketMQ comes through the
    node's broker process; its own address begins its name. Consumers that share queues are no members: `group pop`.

    With --stack the node's RocketMQ server asks each client what its threads do. The exit code is 1 when one does not tell.

    \b
    Example: commitmq group members kitchen --stack
    """
    from commitmq.client.admin import Admin

    if not stack and (access_key is not None or tls):
        raise click.UsageError("--access-key and --tls are for --stack")
    with Admin(node) as admin:
        described = admin.group(name)
        if stack:
            asked = {"access_key": access_key, "tls": tls, "timeout_s": timeout_s}
            _show_stacks(name, _stacks(admin, node, name, asked), as_json)
            return
    found = described["members"]
    if as_json:
        print_json({"group": name, "state": described["state"], "strategy": described["strategy"], "members": found})
        return
    if not found:
        click.echo(f"group {name} has no members")
        return
    print_table(
        ("MEMBER", "ADDRESS", "TOPICS", "QUEUES", "HEARD MS AGO"),
        [
            (
                one["member"],
                one["address"] or "-",
                ", ".join(one["topics"]),
                _queues(one["queues"]),
                one["heard_ms_ago"],
            )
            for one in found
        ],
        left=(0, 1, 2, 3),
    )
    click.echo(f"group {name} is {described['state']}; its members share queues by {described['strategy']}")


def _stacks(admin: Any, node: str, group: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each client that consumes in ``group``."""
    connected = admin.clients(group=group)
    if not connected.complete:
        complain(f"not every client of group {group} may be asked: the node keeps groups.max_listed_clients clients")
    gateways = {one.id: one.gateway for one in connected.clients if group in one.consumes}
    ids = [one for one, gateway in gateways.items() if gateway == GATEWAY]
    told = Questions(admin, node, **asked).stacks(group, ids) if ids else []
    found = dict(zip(ids, told, strict=True))
    rows = []
    for client_id, gateway in gateways.items():
        text, error = found.get(client_id, (None, NO_QUESTIONS))
        rows.append({"client": client_id, "gateway": gateway, "stack": text, "error": error})
    return rows


def _show_stacks(group: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"group": group, "clients": rows})
    elif not rows:
        click.echo(f"group {group} has no members")
    for one in () if as_json else rows:
        if one["stack"] is not None:
            click.echo(f"client {one['client']}\n{one['stack'].rstrip()}\n")
    for one in rows:
        if one["error"] is not None:
            complain(f"client {one['client']}: {one['error']}")
    if any(one["error"] is not None for one in rows):
        raise SystemExit(int(CliExit.FAILURE))


@click.command()
@click.argument("name")
@json_option
@node_option
def pop(name: str, as_json: bool, node: str) -> None:
    """Show what the consumers of group NAME that share queues have in flight.

    These are messages that they received and did not acknowledge. The last line tells for all groups how far the node is
    with messages that nobody acknowledged.

    \b
    Example: commitmq group pop kitchen --json
    """
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        found = admin.group_in_flight(name)
    if as_json:
        print_json({"group": name, **found})
        return
    if found["queues"]:
        rows = [(topic, stored, queue, count) for topic, stored, queue, count in found["queues"]]
        print_table(("TOPIC", "STORED IN", "QUEUE", "IN FLIGHT"), rows, left=(0, 1))
    click.echo(f"group {name} has {found['messages']} messages in flight")
    revive = found["revive"]
    late = f", the first is {revive['late_ms']} ms overdue" if revive["late_ms"] else ""
    click.echo(f"{revive['topic']}: {revive['unread']} records unread, {revive['waiting']} check points wait{late}")


def show_plan(name: str, plan: dict[str, Any], as_json: bool) -> None:
    """The answer of :meth:`commitmq.Admin.group_plan` for group ``name``."""
    if as_json:
        print_json({"group": name, **plan})
        return
    rows = [(member, topic, len(queues), _ranges(queues) or "-") for member, topic, queues in plan["shares"]]
    print_table(("MEMBER", "TOPIC", "COUNT", "QUEUES"), rows, left=(0, 1, 3))
    click.echo(f"by the strategy {plan['strategy']}")


def _queues(queues: list[list[Any]]) -> str:
    """Queues by topic: ``orders 0-3, prices 1``."""
    by_topic: dict[str, list[int]] = {}
    for topic, queue in queues:
        by_topic.setdefault(topic, []).append(queue)
    return ", ".join(f"{topic} {_ranges(sorted(found))}" for topic, found in sorted(by_topic.items())) or "-"


def _ranges(numbers: list[int]) -> str:
    """Numbers in rising order as ``0-3 5 7-8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
