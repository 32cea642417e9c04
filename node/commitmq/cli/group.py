"""``commitmq group list|lag|describe|reset|clone|config``: the consumer groups of a running node."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from commitmq.cli.output import json_option, node_option, print_json, print_table
from commitmq.cli.quantity import MAX_INT, long


@click.group()
def group() -> None:
    """List consumer groups and their lag, describe one, reset its offsets."""


@group.command(name="list")
@json_option
@node_option
def list_(as_json: bool, node: str) -> None:
    """List the groups with their members and the topics they have consumed."""
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        groups = admin.groups()
    if as_json:
        print_json(groups)
    elif not groups:
        click.echo("no groups")
    else:
        rows = [(one["name"], one["members"], ", ".join(one["topics"]) or "-") for one in groups]
        print_table(("GROUP", "MEMBERS", "TOPICS"), rows, left=(0, 2))


@group.command()
@click.argument("name")
@json_option
@node_option
def lag(name: str, as_json: bool, node: str) -> None:
    """Show how far group NAME is behind in every queue that it has consumed."""
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        rows = admin.group_lag(name)
    total = sum(row.lag for row in rows)
    if as_json:
        print_json({"group": name, "lag": total, "queues": rows})
        return
    print_table(
        ("TOPIC", "QUEUE", "COMMITTED", "NEXT OFFSET", "LAG", "MEMBER"),
        [(row.topic, row.queue, row.committed, row.end, row.lag, row.member or "-") for row in rows],
        left=(0, 5),
    )
    click.echo(f"group {name} is {total} messages behind")
    for row in rows:
        if row.problem:
            click.echo(f"{row.topic} queue {row.queue}: {row.problem}")


@group.command()
@click.argument("name")
@json_option
@node_option
def describe(name: str, as_json: bool, node: str) -> None:
    """Show the members of group NAME, the queues of each, and the committed offsets."""
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        described = admin.group(name)
    if as_json:
        print_json(described)
        return
    click.echo(f"group {name}  {described['state']}")
    if described["members"]:
        print_table(
            ("MEMBER", "TOPICS", "QUEUES", "HEARD MS AGO"),
            [
                (one["member"], ", ".join(one["topics"]), len(one["queues"]), one["heard_ms_ago"])
                for one in described["members"]
            ],
            left=(0, 1),
        )
    holders = {(topic, queue): member for topic, queue, member in described["queues"]}
    committed = {(topic, queue): offset for topic, queue, offset in described["offsets"]}
    rows = [
        (topic, queue, committed.get((topic, queue), "-"), holders.get((topic, queue), "-"))
        for topic, queue in sorted({*holders, *committed})
    ]
    if rows:
        print_table(("TOPIC", "QUEUE", "COMMITTED", "MEMBER"), rows, left=(0, 3))


@group.command()
@click.argument("name")
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option(
    "--to",
    "position",
    required=True,
    metavar="earliest|latest|TIME|OFFSET",
    help="Where the group continues: TIME is ISO 8601 (UTC without an offset), OFFSET a queue offset.",
)
@click.option(
    "--queue", "queues", type=click.IntRange(0, MAX_INT), multiple=True, help="Only this queue; may be repeated."
)
@click.option("--dry-run", is_flag=True, help="Only say where the group would continue.")
@json_option
@node_option
def reset(
    name: str, topics: tuple[str, ...], position: str, queues: tuple[int, ...], dry_run: bool, as_json: bool, node: str
) -> None:
    """Set the committed offsets of group NAME, back or ahead, in the given topics or in all that it reads.

    Members may run: each continues at its new offsets with its next heartbeat.
    """
    from commitmq.client.admin import Admin
    from commitmq.errors import GroupNotFoundError

    target = parse_position(position)
    with Admin(node) as admin:
        try:
            before = {(topic, queue): offset for topic, queue, offset in admin.group(name)["offsets"]}
        except GroupNotFoundError:
            if not topics:
                raise
            before = {}
        try:
            stored = admin.reset_offsets(
                name, topics or None, target, queues=list(queues) or None, running=True, dry_run=dry_run
            )
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--queue") from None
    if as_json:
        moved = [[*one, before.get(one[:2])] for one in stored]
        print_json(
            {"group": name, "dry_run": dry_run, "offsets": [one[:3] for one in moved], "before": [x[3] for x in moved]}
        )
        return
    rows = [(one.topic, one.queue, before.get(one[:2], "-"), one.offset) for one in stored]
    print_table(("TOPIC", "QUEUE", "BEFORE", "WOULD BE" if dry_run else "COMMITTED"), rows)


@group.command()
@click.argument("source", metavar="FROM")
@click.argument("name", metavar="TO")
@click.option("--dry-run", is_flag=True, help="Only say where group TO would continue.")
@json_option
@node_option
def clone(source: str, name: str, dry_run: bool, as_json: bool, node: str) -> None:
    """Let group TO continue where group FROM is, in every queue that FROM has committed.

    Offsets of TO move ahead, or begin; none goes back (`group reset` does that). No member of TO may read those queues.
    Retries and dead letters stay with FROM.

    \b
    Example: commitmq group clone kitchen kitchen2 --dry-run
    """
    from commitmq.client.admin import Admin
    from commitmq.errors import GroupNotFoundError
    from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX

    with Admin(node) as admin:
        offsets = [
            (topic, queue, offset)
            for topic, queue, offset in admin.group(source)["offsets"]
            if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
        ]
        try:
            before = {(topic, queue): offset for topic, queue, offset in admin.group(name)["offsets"]}
        except GroupNotFoundError:
            before = {}
        ahead = [(topic, queue, max(offset, before.get((topic, queue), 0))) for topic, queue, offset in offsets]
        stored = ahead if dry_run or not ahead else [tuple(one) for one in admin.commit_offsets(name, ahead)]
    if as_json:
        print_json({"from": source, "group": name, "dry_run": dry_run, "offsets": [list(one) for one in stored]})
        return
    rows = [(topic, queue, before.get((topic, queue), "-"), offset) for topic, queue, offset in stored]
    print_table(("TOPIC", "QUEUE", "BEFORE", "WOULD BE" if dry_run else "COMMITTED"), rows)


@group.command()
@click.argument("name")
@click.option("--set", "pairs", metavar="SETTING=VALUE", multiple=True, help="Change this setting; may be repeated.")
@json_option
@node_option
def config(name: str, pairs: tuple[str, ...], as_json: bool, node: str) -> None:
    """Show or change the settings of group NAME, under RocketMQ's names.

    consumeEnable=false switches a group off. --set makes a group that does not exist.
    """
    from commitmq.client.admin import Admin

    changes = dict(_setting(pair) for pair in pairs)
    with Admin(node) as admin:
        settings = admin.group_config(name, changes or None)
    if as_json:
        print_json(settings)
        return
    rows = [(setting, _json(value)) for setting, value in settings.items() if setting != "groupName"]
    print_table(("SETTING", "VALUE"), rows, left=(0, 1))


def _setting(pair: str) -> tuple[str, object]:
    """A setting and its value from SETTING=VALUE. Raises BadParameter."""
    name, separator, value = pair.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{pair!r}: write SETTING=VALUE", param_hint="--set")
    if value in ("true", "false"):
        return name, value == "true"
    return name, long(value, "--set") if value.isascii() and value.isdigit() else value


def _json(value: object) -> str:
    """``value`` as JSON."""
    import orjson

    return orjson.dumps(value).decode()


def parse_position(text: str) -> str | int | datetime:
    """``earliest``, ``latest``, a queue offset or a time with a zone; click.BadParameter for anything else."""
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return long(text, "--to")
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not earliest, latest, an ISO 8601 time or a queue offset", param_hint="--to"
        ) from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
