"""``commitmq group reset|clone``: where a group goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from commitmq.cli.output import json_option, node_option, print_json, print_table
from commitmq.cli.quantity import MAX_INT, MAX_LONG
from commitmq.cli.times import parse_position


@click.command()
@click.argument("name")
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option(
    "--to",
    "position",
    metavar="earliest|latest|TIME|OFFSET",
    help="Where the group continues: TIME is ISO 8601 (UTC without an offset), OFFSET a queue offset.",
)
@click.option("--shift", type=int, metavar="±N", help="N messages ahead in each queue, or with a minus back.")
@click.option("--copy-from", "other", metavar="GROUP", help="Where this group is, also back.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the JSON of a reset or a describe was.",
)
@click.option(
    "--queue", "queues", type=click.IntRange(0, MAX_INT), multiple=True, help="Only this queue; may be repeated."
)
@click.option("--dry-run", is_flag=True, help="Only say where the group would continue.")
@json_option
@node_option
def reset(
    name: str,
    topics: tuple[str, ...],
    position: str | None,
    shift: int | None,
    other: str | None,
    path: Path | None,
    queues: tuple[int, ...],
    dry_run: bool,
    as_json: bool,
    node: str,
) -> None:
    """Set the committed offsets of group NAME, back or ahead, in the given topics or in all that it reads.

    Give one of --to, --shift, --copy-from and --file. Members may run: each continues at its new offsets with its next
    heartbeat. --file takes what `group describe --json` wrote before, so that the group can go back there.

    \b
    Example: commitmq group reset kitchen orders --shift -100 --dry-run
    """
    from commitmq.client.admin import Admin
    from commitmq.errors import GroupNotFoundError

    if sum(one is not None for one in (position, shift, other, path)) != 1:
        raise click.UsageError("give one of --to, --shift, --copy-from and --file")
    target = None if position is None else parse_position(position, "--to")
    of_file = None if path is None else _offsets_in(path)
    with Admin(node) as admin:
        try:
            before = {(topic, queue): offset for topic, queue, offset in admin.group(name)["offsets"]}
        except GroupNotFoundError:
            if shift is not None or (target is not None and not topics):
                raise
            before = {}
        try:
            if target is not None:
                stored = admin.reset_offsets(
                    name, topics or None, target, queues=list(queues) or None, running=True, dry_run=dry_run
                )
            else:
                if shift is not None:
                    offsets = [(*queue, max(0, min(offset + shift, MAX_LONG))) for queue, offset in before.items()]
                else:
                    offsets = of_file if of_file is not None else admin.group(str(other))["offsets"]
                chosen = _chosen(offsets, topics, queues)
                stored = admin.set_offsets(name, chosen, running=True, dry_run=dry_run, copied_from=other)
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
    Retries and dead letters stay with FROM. TO is made if it does not exist.

    \b
    Example: commitmq group clone kitchen kitchen2 --dry-run
    """
    from commitmq.client.admin import Admin
    from commitmq.errors import GroupNotFoundError, ProtocolError
    from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX

    with Admin(node) as admin:
        offsets = [
            (topic, queue, offset)
            for topic, queue, offset in admin.group(source)["offsets"]
            if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
        ]
        if not offsets:
            sentence = f"group {source} has committed no offset, so there is nothing at which {name} could continue"
            raise ProtocolError("INVALID_PARAMETER", sentence)
        try:
            before = {(topic, queue): offset for topic, queue, offset in admin.group(name)["offsets"]}
            is_new = False
        except GroupNotFoundError:
            before, is_new = {}, True
        ahead = [(topic, queue, max(offset, before.get((topic, queue), 0))) for topic, queue, offset in offsets]
        if dry_run or not ahead:
            stored = ahead
        else:
            committed = admin.commit_offsets(name, ahead, copied_from=source)
            stored = [(one[0], one[1], one[2]) for one in committed]
    if as_json:
        print_json(
            {
                "from": source,
                "group": name,
                "new": is_new,
                "dry_run": dry_run,
                "offsets": [list(one) for one in stored],
            }
        )
        return
    if is_new:
        click.echo(f"group {name} did not exist; it {'would be made' if dry_run else 'is made'}")
    rows = [(topic, queue, before.get((topic, queue), "-"), offset) for topic, queue, offset in stored]
    print_table(("TOPIC", "QUEUE", "BEFORE", "WOULD BE" if dry_run else "COMMITTED"), rows)


def _chosen(
    offsets: Iterable[Sequence[Any]], topics: Collection[str], queues: Collection[int]
) -> list[tuple[str, int, int]]:
    """Those of ``offsets`` that the words of a reset name. Raises UsageError when there is none."""
    from commitmq.client.group_offsets import is_of_failures

    found = [
        (topic, queue, offset)
        for topic, queue, offset in offsets
        if (topic in topics if topics else not is_of_failures(topic)) and (not queues or queue in queues)
    ]
    if not found:
        raise click.UsageError("there is no offset to begin from, in these topics and queues; --to sets one")
    return found


def _offsets_in(path: Path) -> list[tuple[str, int, int]]:
    """The committed offsets in a JSON object with ``offsets``: ``[topic, queue, offset]`` each. Raises BadParameter."""
    import orjson

    try:
        found = orjson.loads(path.read_bytes())["offsets"]
        offsets = [(topic, queue, offset) for topic, queue, offset in found]
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint="--file") from None
    except (ValueError, KeyError, TypeError):
        offsets = [("", 0, 0)]
    if not all(topic and type(topic) is str and type(queue) is type(offset) is int for topic, queue, offset in offsets):
        raise click.BadParameter(
            f'{path} must be a JSON object as `group describe --json` writes it, with "offsets": [[topic, queue, offset], …]',
            param_hint="--file",
        )
    return offsets
