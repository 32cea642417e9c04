"""``commitmq group reset|clone``: where a group goes on."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from commitmq.cli.output import json_option, node_option, print_json, print_table
from commitmq.cli.quantity import MAX_INT, long


@click.command()
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


@click.command()
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
