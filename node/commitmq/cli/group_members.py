"""``commitmq group members|pop``: who reads for a group, and what its consumers have in flight."""

from __future__ import annotations

from typing import Any

import click

from commitmq.cli.output import json_option, node_option, print_json, print_table


@click.command()
@click.argument("name")
@json_option
@node_option
def members(name: str, as_json: bool, node: str) -> None:
    """Show the members of group NAME: where each is, what it reads, and when it was heard last.

    ADDRESS is that of the member's connection, or on the node's host its process. A client of RocketMQ comes through the
    node's broker process; its own address begins its name. Consumers that share queues are no members: `group pop`.

    \b
    Example: commitmq group members kitchen
    """
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        described = admin.group(name)
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
