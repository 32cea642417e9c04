"""``commitmq dlq list|show|resend|purge|stuck``: the dead letters of a group, and what cannot even become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from commitmq.cli.options import admin_options, dry_run_option, yes_option
from commitmq.cli.output import ask_before, complain, count_progress, print_json, print_table
from commitmq.cli.quantity import MAX_INT, optional_time, utc

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.dead_letters import DeadLetter, DeadLetterFilter

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHOWN_FAILURES = 10
_MOST_LETTERS = 64
_MOST_GROUPS = 200


def _filter_options(function: _Function) -> _Function:
    """The options that select dead letters, as keyword arguments of the verb."""
    for option in (
        click.option("--offset", "offsets", type=click.IntRange(0, MAX_INT), multiple=True,
                     help="Only the dead letter with this queue offset; may be repeated."),
        click.option("--until", metavar="TIME", help="Only those that died at this time or earlier."),
        click.option("--since", metavar="TIME",
                     help="Only those that died at this time or later; ISO 8601 (UTC unless it says otherwise), or ms."),
        click.option("--key", metavar="KEY", help="Only messages with this key."),
        click.option("--tag", metavar="TAG", help="Only messages with this tag."),
        click.option("--topic", metavar="TOPIC", help="Only messages that came from this topic."),
    ):  # fmt: skip
        function = option(function)
    return function


@click.group()
def dlq() -> None:
    """List dead letters, send them again, give them up."""


@dlq.command(name="list")
@click.argument("group", required=False)
@_filter_options
@click.option("--after", metavar="GROUP", help="Without GROUP: only groups after this one.")
@click.option("--all", "all_states", is_flag=True, help="Also those that were resent or purged.")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, MAX_INT),
    help="Dead letters to show, or groups to look at.  [default: 64; 200 groups]",
)
@admin_options
def list_(
    group: str | None,
    after: str | None,
    all_states: bool,
    most: int | None,
    as_json: bool,
    admin: Admin,
    **conditions: Any,
) -> None:
    """List the oldest dead letters of GROUP: those that a resend would send. Without GROUP list the groups that have some.

    The number of a group's dead letters still counts those that a resend with a filter sent.

    \b
    Example: commitmq dlq list kitchen --all
    """
    if group is None:
        if all_states or any(conditions.values()):
            raise click.UsageError("give the GROUP whose dead letters are to be selected")
        _list_groups(admin, after or "", most or _MOST_GROUPS, as_json)
        return
    if after is not None:
        raise click.UsageError("--after is for the list of groups, without GROUP")
    most = most or _MOST_LETTERS
    found = admin.dlq_list(group, _selected(conditions), max_messages=most, all_states=all_states)
    if as_json:
        print_json({"group": group, "dead_letters": [one.to_json() for one in found]})
    elif not found:
        click.echo(f"group {group} has no such dead letters")
    else:
        rows = [
            (
                utc(one.message.store_timestamp), one.message.queue_id, one.message.queue_offset, one.topic or "-",
                one.message.reconsume_times, one.message.tags, " ".join(one.message.keys), one.state,
            )
            for one in found
        ]  # fmt: skip
        print_table(
            ("DIED (UTC)", "QUEUE", "OFFSET", "FROM TOPIC", "TRIES", "TAG", "KEYS", "STATE"), rows, left=(0, 3, 5, 6, 7)
        )


def _list_groups(admin: Admin, after: str, most: int, as_json: bool) -> None:
    found, following = admin.dlq_groups(after=after, max_groups=most)
    if as_json:
        print_json({"groups": [one._asdict() for one in found], "next": following})
        return
    if found:
        print_table(("GROUP", "DEAD LETTERS"), found)
    else:
        click.echo(
            "no group has dead letters" if not after and following is None else "none of these groups has dead letters"
        )
    if following is not None:
        complain(f"there are more groups: --after {following}")


@dlq.command()
@click.argument("group")
@click.argument("offset", type=click.IntRange(0, MAX_INT))
@click.option("--queue", type=click.IntRange(0, MAX_INT), default=0, show_default=True, help="The queue it lies in.")
@admin_options
def show(group: str, offset: int, queue: int, as_json: bool, admin: Admin) -> None:
    """Show the dead letter of GROUP with the queue offset OFFSET: its properties and its body."""
    letter = admin.dlq_show(group, offset, queue=queue)
    if as_json:
        print_json(letter.to_json())
        return
    message = letter.message
    click.echo(f"{message.stored_topic} queue {queue} offset {offset}: {letter.state}")
    click.echo(f"from topic {letter.topic or '-'}, message id {letter.origin_id or '-'}")
    click.echo(f"died {utc(message.store_timestamp)} UTC, delivered {message.reconsume_times} times")
    for name, value in message.properties.items():
        click.echo(f"  {name}={value}")
    click.echo(_body(letter))


@dlq.command()
@click.argument("group")
@_filter_options
@click.option("--rate", type=click.FloatRange(0, 1_000_000, min_open=True), default=500.0, show_default=True,
              help="Messages a second at most.")  # fmt: skip
@click.option("--max", "most", type=click.IntRange(1, MAX_INT), help="Stop after this many.")
@dry_run_option("Only say what would be sent.")
@admin_options
def resend(
    group: str, rate: float, most: int | None, dry_run: bool, as_json: bool, admin: Admin, **conditions: Any
) -> None:
    """Send the dead letters of GROUP to their original topics again, each once.

    An interrupted resend can be repeated: what was resent is skipped.
    """
    with count_progress("dead letters", quiet=as_json) as progress:
        result = admin.dlq_resend(
            group, _selected(conditions), rate=rate, max_messages=most, dry_run=dry_run, on_progress=progress
        )
    if as_json:
        print_json({**asdict(result), "positions": [list(one) for one in result.positions]})
        return
    what = "would be resent" if dry_run else "resent"
    click.echo(f"{result.sent} dead letters of group {group} {what}, {result.sent_before} were resent before")
    for topic, count in sorted(result.topics.items()):
        click.echo(f"  {topic}: {count}")
    if result.left:
        click.echo(f"{result.left} were omitted by the filter")
    if result.failed:
        click.echo(f"{result.failed} stay dead letters:")
    for failure in result.failures[:_SHOWN_FAILURES]:
        click.echo(f"  queue {failure.queue} offset {failure.offset}, topic {failure.topic or '-'}: {failure.reason}")
    if not result.complete:
        click.echo("there are more")


@dlq.command()
@click.argument("group")
@click.option(
    "--until", metavar="TIME", help="Spare those that died later; ISO 8601 (UTC unless it says otherwise), or ms."
)
@dry_run_option("Only say how many.")
@yes_option
@admin_options
def purge(group: str, until: str | None, dry_run: bool, yes: bool, as_json: bool, admin: Admin) -> None:
    """Give up the dead letters of GROUP: a later resend begins after them. Without --until it asks.

    The messages stay in the log until they expire, as all messages do.

    \b
    Example: commitmq dlq purge kitchen --until 2026-06-01
    """
    if until is None and not dry_run:
        ask_before(f"give up all dead letters of group {group}", yes)
    result = admin.dlq_purge(group, until=optional_time(until, "--until"), dry_run=dry_run)
    if as_json:
        print_json({**asdict(result), "positions": [list(one) for one in result.positions]})
        return
    click.echo(f"{result.purged} dead letters of group {group} {'would be ' if dry_run else ''}given up")
    for one in result.positions:
        click.echo(f"  queue {one.queue}: a resend begins at offset {one.offset}")
    click.echo("they stay in the log until they expire")


def _selected(conditions: dict[str, Any]) -> DeadLetterFilter:
    from commitmq.client.dead_letters import DeadLetterFilter

    return DeadLetterFilter(
        topic=conditions["topic"],
        tag=conditions["tag"],
        key=conditions["key"],
        begin=optional_time(conditions["since"], "--since"),
        end=optional_time(conditions["until"], "--until"),
        offsets=conditions["offsets"] or None,
    )


@dlq.command()
@click.argument("group", required=False)
@admin_options
def stuck(group: str | None, as_json: bool, admin: Admin) -> None:
    """List messages that were set aside: they could not be delivered again, nor become dead letters. With GROUP only its.

    WHY says the reason: no copy fits a record, or the message's topic or record is gone or damaged. Such a message is
    still in its queue, and its group has gone past it. The list has the last 1,000 of each process.

    \b
    Example: commitmq dlq stuck --json
    """
    found = [one for one in admin.set_aside() if group in (None, one.get("group"))]
    if as_json:
        print_json({"messages": found})
    elif not found:
        click.echo("no message is set aside")
    else:
        rows = [
            (
                utc(one["at"]), one["process"], one.get("group", "-"), one.get("topic", "-"), one.get("queue", "-"),
                one.get("queue_offset", "-"), one["why"],
            )
            for one in found
        ]  # fmt: skip
        print_table(("WHEN (UTC)", "PROCESS", "GROUP", "TOPIC", "QUEUE", "OFFSET", "WHY"), rows, left=(0, 1, 2, 3, 6))


def _body(letter: DeadLetter) -> str:
    message = letter.message
    if message.damage is not None:
        return f"({message.damage})"
    text = message.body.decode("utf-8", "backslashreplace")
    return "".join(one if one.isprintable() or one in "\n\t" else "·" for one in text)
