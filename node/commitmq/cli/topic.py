"""``commitmq topic create|update|list|describe|offset|time|delete|prune``: the topics of a running node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from commitmq.cli.options import admin_options, dry_run_option, yes_option
from commitmq.cli.output import ask_before, confirm, count_progress, human_bytes, print_either, print_json, print_table
from commitmq.cli.quantity import MAX_INT, MAX_LONG, milliseconds, parse_time, seconds, utc
from commitmq.client.checks import KINDS, kind_of
from commitmq.errors import ProtocolError

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.admin_results import TopicInfo

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PERMISSIONS = ((4, "r"), (2, "w"), (1, "i"))


def _queue_options(function: _Function) -> _Function:
    """--queues, or the two numbers that RocketMQ's tools call -r and -w."""
    number = click.IntRange(1, MAX_INT)
    for option in (
        click.option("--write-queues", type=number, help="Number of queues that producers write to."),
        click.option("--read-queues", type=number, help="Number of queues that consumers read."),
        click.option("--queues", type=number, help="Both numbers.  [default for a new topic: topics.default_queues]"),
    ):
        function = option(function)
    return function


def _check_queues(queues: int | None, read_queues: int | None, write_queues: int | None) -> None:
    if queues is not None and (read_queues, write_queues) != (None, None):
        raise click.UsageError("give --queues, or --read-queues and --write-queues")


def _queues(described: TopicInfo) -> str:
    if described.read_queues == described.write_queues:
        return f"{described.write_queues} queues"
    return f"{described.read_queues} read queues and {described.write_queues} write queues"


@click.group()
def topic() -> None:
    """Create, update, list, describe and delete topics."""


@topic.command()
@click.argument("name")
@_queue_options
@click.option("--memory", is_flag=True, help="Keep its messages in memory only: they are lost when the node stops.")
@click.option(
    "--attribute", "pairs", metavar="KEY=VALUE", multiple=True, help="An attribute of the topic; may be repeated."
)
@admin_options
def create(
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    memory: bool,
    pairs: tuple[str, ...],
    as_json: bool,
    admin: Admin,
) -> None:
    """Create topic NAME. One that exists with the same settings is no error.

    Attributes are RocketMQ's (queue.type, message.type, cleanup.policy, reserve.time) and storage.type, which is log
    (default) or memory; --memory is short for storage.type=memory. message.type limits what RocketMQ's proxy may send
    to the topic: the node stores it and takes every message, as RocketMQ's broker does.
    """
    _check_queues(queues, read_queues, write_queues)
    attributes = _attributes_of((*pairs, *(["storage.type=memory"] if memory else ())))
    answer = admin.topic_create(
        name, queues, read_queues=read_queues, write_queues=write_queues, attributes=attributes or None
    )
    if as_json:
        print_json({"created": answer.created, "topic": answer.topic})
        return
    verb = "created" if answer.created else "exists already"
    click.echo(f"topic {name} {verb}: {_queues(answer.topic)}{_attributes(answer.topic)}")


@topic.command()
@click.argument("name")
@_queue_options
@click.option(
    "--perm", type=click.Choice(["rw", "r", "w", "-"]), help="Permission of clients: r read, w write, - neither."
)
@click.option("--attribute", "pairs", metavar="KEY=VALUE", multiple=True, help="An attribute to set; may be repeated.")
@click.option("--force", is_flag=True, help="Also if groups then miss messages that they have not read.")
@admin_options
def update(
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | None,
    pairs: tuple[str, ...],
    force: bool,
    as_json: bool,
    admin: Admin,
) -> None:
    """Change settings of topic NAME; settings that are not named stay.

    For fewer queues lower --write-queues, wait until the groups have read the others, then lower --read-queues: nobody reads
    the messages beyond. The storage of its messages (storage.type, queue.type, cleanup.policy) cannot change.

    \b
    Example: commitmq topic update orders --write-queues 2
    """
    _check_queues(queues, read_queues, write_queues)
    if all(one is None for one in (queues, read_queues, write_queues, perm)) and not pairs:
        raise click.UsageError("give --queues, --read-queues, --write-queues, --perm or --attribute")
    bits = None if perm is None else sum(bit for bit, letter in _PERMISSIONS if letter in perm)
    described = admin.topic_update(
        name,
        queues,
        read_queues=read_queues,
        write_queues=write_queues,
        perm=bits,
        attributes=_attributes_of(pairs) or None,
        force=force,
    )
    print_either(
        as_json,
        {"topic": described},
        f"topic {name} updated: {_queues(described)}  perm {permission(described.perm)}{_attributes(described)}",
    )


@topic.command(name="list")
@click.option("--all", "with_system", is_flag=True, help="Also the topics that the node made for itself.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Only of this kind; may be repeated.")
@click.option("--idle", "idle_s", type=seconds(), metavar="TIME", help="Only those without a new message for so long.")
@admin_options
def list_(with_system: bool, kinds: tuple[str, ...], idle_s: float | None, as_json: bool, admin: Admin) -> None:
    """List the topics.

    Kinds: normal, batch (BatchCQ), memory, retry and dlq (of groups), system. --idle asks the node once for each topic.

    \b
    Example: commitmq topic list --kind dlq --idle 7d
    """
    if idle_s is None:
        topics = admin.topics()
    else:
        with count_progress("topics", quiet=as_json) as progress:
            topics = admin.topics_idle(_before(idle_s), kinds or (KINDS if with_system else None), on_progress=progress)
    topics = [one for one in topics if (kind_of(one) in kinds if kinds else with_system or not one.system)]
    if as_json:
        print_json([{**asdict(one), "kind": kind_of(one)} for one in topics])
    elif not topics:
        click.echo("no topics")
    else:
        print_table(
            ("TOPIC", "READ QUEUES", "WRITE QUEUES", "PERM", "KIND"),
            [(one.name, one.read_queues, one.write_queues, permission(one.perm), kind_of(one)) for one in topics],
            left=(0, 4),
        )


@topic.command()
@click.argument("name")
@admin_options
def describe(name: str, as_json: bool, admin: Admin) -> None:
    """Show the settings of topic NAME, its queues with their offsets, and the groups that have consumed it."""
    described = admin.topic(name)
    queues, hidden = admin.offsets(name), admin.hidden_queues(name)
    in_memory = described.attributes.get("storage.type") == "memory"
    use = admin.memory_use(name) if in_memory else {}
    rows, unread = ([{"queue": one.queue, "min": one.min, "max": one.max} for one in part] for part in (queues, hidden))
    if as_json:
        print_json(
            {**asdict(described), "queues": rows, "hidden_queues": unread, **({"memory": use} if in_memory else {})}
        )
        return
    click.echo(f"topic {name}  perm {permission(described.perm)}{_attributes(described)}")
    if in_memory:
        click.echo(
            "kept in memory only: its messages are lost when the node stops, and the oldest go when memory is full"
        )
        click.echo(
            f"it uses {human_bytes(use['topic_used_bytes'])} and lost {use['topic_evicted_segments']} segments;"
            f" all memory topics use {human_bytes(use['used_bytes'])} of {human_bytes(use['budget_bytes'])}"
        )
    click.echo(f"groups {', '.join(described.groups) or 'none'}")
    print_table(
        ("QUEUE", "FIRST OFFSET", "NEXT OFFSET", "MESSAGES"),
        [(row["queue"], row["min"], row["max"], row["max"] - row["min"]) for row in rows],
    )
    for row in unread:
        click.echo(f"queue {row['queue']} (no longer read): {row['max'] - row['min']} messages")


@topic.command()
@click.argument("name")
@click.option("--time", "text", metavar="TIME", required=True, help="ISO 8601 (UTC unless it says otherwise), or ms.")
@admin_options
def offset(name: str, text: str, as_json: bool, admin: Admin) -> None:
    """Show for each queue of topic NAME the offset of the first message that was stored at TIME or later.

    Where all messages are older, it is the next offset.

    \b
    Example: commitmq topic offset orders --time 2026-06-01T12:00
    """
    when_ms = milliseconds(parse_time(text, "--time"))
    queues = admin.offsets(name, when_ms)
    rows = [{"queue": one.queue, "offset": one.by_time, "min": one.min, "max": one.max} for one in queues]
    if as_json:
        print_json({"topic": name, "time": when_ms, "queues": rows})
        return
    print_table(
        ("QUEUE", "OFFSET", "FIRST OFFSET", "NEXT OFFSET", "MESSAGES SINCE"),
        [(one.queue, one.by_time, one.min, one.max, one.max - (one.by_time or 0)) for one in queues],
    )


@topic.command(name="time")
@click.argument("name")
@click.option("--offset", "at", type=click.IntRange(0, MAX_LONG), required=True, help="A queue offset.")
@click.option("--queue", type=click.IntRange(0, MAX_INT), help="Only this queue.  [default: all that have the offset]")
@admin_options
def time_(name: str, at: int, queue: int | None, as_json: bool, admin: Admin) -> None:
    """Show when the message at an offset of topic NAME was stored.

    \b
    Example: commitmq topic time orders --offset 4711 --queue 0
    """
    asked = [queue] if queue is not None else [one.queue for one in admin.offsets(name) if one.min <= at < one.max]
    if not asked:
        raise ProtocolError("INVALID_PARAMETER", f"no queue of topic {name} has a message at offset {at}")
    found = [admin.message_at(name, one, at) for one in asked]
    rows = [
        {
            "queue": one,
            "offset": at,
            "store_timestamp": message.store_timestamp,
            "born_timestamp": message.born_timestamp,
        }
        for one, message in zip(asked, found, strict=True)
    ]
    if as_json:
        print_json({"topic": name, "messages": rows})
        return
    print_table(
        ("QUEUE", "OFFSET", "STORED (UTC)", "SENT (UTC)"),
        [(one["queue"], at, utc(one["store_timestamp"]), utc(one["born_timestamp"])) for one in rows],
    )


@topic.command()
@click.argument("name")
@yes_option
@admin_options
def delete(name: str, yes: bool, as_json: bool, admin: Admin) -> None:
    """Delete topic NAME, its messages and the offsets of its groups."""
    ask_before(f"delete topic {name} with all its messages", yes)
    admin.topic_delete(name)
    print_either(as_json, {"deleted": name}, f"topic {name} deleted")


@topic.command()
@click.option(
    "--idle", "idle_s", type=seconds(1), metavar="TIME", required=True, help="Those without a new message for so long."
)
@click.option(
    "--kind", "kinds", type=click.Choice([one for one in KINDS if one != "system"]), multiple=True,
    default=("normal", "batch"), show_default=True, help="Only of this kind; may be repeated.",
)  # fmt: skip
@dry_run_option("Only say which topics would be deleted.")
@yes_option
@admin_options
def prune(idle_s: float, kinds: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool, admin: Admin) -> None:
    """Delete the topics that got no message for a time, with the messages that they still have.

    System topics stay, and so does a topic that got a message since the list was made. A topic without messages counts
    from when it was made. A message that waits for its time, or for the end of its transaction, is none of its topic yet.

    \b
    Example: commitmq topic prune --idle 30d --dry-run
    """
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise click.UsageError("to delete topics with their messages without being asked, give --yes; or --dry-run")
    before_ms = _before(idle_s)
    with count_progress("topics", quiet=as_json) as progress:
        found = admin.topics_idle(before_ms, kinds, on_progress=progress)
    rows = [row for one in found if (row := _idle_row(admin, one)) is not None]
    if not as_json and rows:
        print_table(
            ("TOPIC", "KIND", "MESSAGES", "GROUPS"),
            [(row["topic"], row["kind"], row["messages"], ", ".join(row["groups"]) or "-") for row in rows],
            left=(0, 1, 3),
        )
    if rows and not (dry_run or yes):
        confirm(f"Delete these {len(rows)} topics with all their messages?")
    deleted = [] if dry_run else [row["topic"] for row in rows if admin.topic_delete_idle(row["topic"], before_ms)]
    if as_json:
        print_json({"idle_before": before_ms, "dry_run": dry_run, "topics": rows, "deleted": deleted})
    elif not rows:
        click.echo("no topic has been idle for so long")
    else:
        click.echo(f"{len(rows)} topics would be deleted" if dry_run else f"{len(deleted)} topics deleted")
        if left := [row["topic"] for row in rows if row["topic"] not in deleted and not dry_run]:
            click.echo(f"in use in the meantime: {', '.join(left)}")


def _idle_row(admin: Any, one: TopicInfo) -> dict[str, Any] | None:
    """A topic that may be pruned; None if it was deleted in the meantime."""
    from commitmq.errors import TopicNotFoundError

    try:
        groups = admin.topic(one.name).groups
        queues = [*admin.offsets(one.name), *admin.hidden_queues(one.name)]
        messages = sum(queue.max - queue.min for queue in queues)
    except TopicNotFoundError:
        return None
    return {"topic": one.name, "kind": kind_of(one), "messages": messages, "groups": groups}


def _before(idle_s: float) -> int:
    """The time so long ago, in milliseconds since 1970."""
    return max(0, int((time.time() - idle_s) * 1000))


def _attributes_of(pairs: Iterable[str]) -> dict[str, str]:
    """The attributes in ``pairs`` of KEY=VALUE. Raises BadParameter."""
    attributes: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{pair!r}: write KEY=VALUE", param_hint="--attribute")
        if attributes.setdefault(key, value) != value:
            raise click.BadParameter(
                f"{key} is given twice, as {attributes[key]} and {value}", param_hint="--attribute"
            )
    return attributes


def permission(perm: int) -> str:
    """Permission bits as letters: r read, w write, i inherited by topics created from it (spec 1.4)."""
    return "".join(letter for bit, letter in _PERMISSIONS if perm & bit) or "-"


def _attributes(described: TopicInfo) -> str:
    return "".join(f"  {key}={value}" for key, value in sorted(described.attributes.items()))
