"""``commitmq topic create|update|list|describe|delete``: the topics of a running node."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from commitmq.cli.output import confirm, human_bytes, json_option, node_option, print_json, print_table
from commitmq.cli.quantity import MAX_INT

if TYPE_CHECKING:
    from commitmq.client.admin_results import TopicInfo

_PERMISSIONS = ((4, "r"), (2, "w"), (1, "i"))


@click.group()
def topic() -> None:
    """Create, update, list, describe and delete topics."""


@topic.command()
@click.argument("name")
@click.option("--queues", type=click.IntRange(1, MAX_INT), help="Number of queues.  [default: topics.default_queues]")
@click.option("--memory", is_flag=True, help="Keep its messages in memory only: they are lost when the node stops.")
@click.option(
    "--attribute", "pairs", metavar="KEY=VALUE", multiple=True, help="An attribute of the topic; may be repeated."
)
@json_option
@node_option
def create(name: str, queues: int | None, memory: bool, pairs: tuple[str, ...], as_json: bool, node: str) -> None:
    """Create topic NAME. One that exists with the same settings is no error.

    Attributes are RocketMQ's (queue.type, message.type, cleanup.policy, reserve.time) and storage.type, which is log
    (default) or memory; --memory is short for storage.type=memory. message.type limits what RocketMQ's proxy may send
    to the topic: the node stores it and takes every message, as RocketMQ's broker does.
    """
    from commitmq.client.admin import Admin

    attributes = _attributes_of((*pairs, *(["storage.type=memory"] if memory else ())))
    with Admin(node) as admin:
        answer = admin.topic_create(name, queues, attributes=attributes or None)
    if as_json:
        print_json({"created": answer.created, "topic": answer.topic})
        return
    verb = "created" if answer.created else "exists already"
    click.echo(f"topic {name} {verb}: {answer.topic.write_queues} queues{_attributes(answer.topic)}")


@topic.command()
@click.argument("name")
@click.option(
    "--queues", type=click.IntRange(1, MAX_INT), help="Number of queues. Fewer leave messages of the others unread."
)
@click.option(
    "--perm", type=click.Choice(["rw", "r", "w", "-"]), help="Permission of clients: r read, w write, - neither."
)
@click.option("--attribute", "pairs", metavar="KEY=VALUE", multiple=True, help="An attribute to set; may be repeated.")
@json_option
@node_option
def update(name: str, queues: int | None, perm: str | None, pairs: tuple[str, ...], as_json: bool, node: str) -> None:
    """Change settings of topic NAME; settings that are not named stay.

    The storage of its messages (storage.type, queue.type, cleanup.policy) cannot change.
    """
    from commitmq.client.admin import Admin

    if queues is None and perm is None and not pairs:
        raise click.UsageError("give --queues, --perm or --attribute")
    bits = None if perm is None else sum(bit for bit, letter in _PERMISSIONS if letter in perm)
    with Admin(node) as admin:
        described = admin.topic_update(name, queues, perm=bits, attributes=_attributes_of(pairs) or None)
    if as_json:
        print_json({"topic": described})
        return
    click.echo(
        f"topic {name} updated: {described.write_queues} queues  perm {permission(described.perm)}"
        f"{_attributes(described)}"
    )


@topic.command(name="list")
@click.option("--all", "with_system", is_flag=True, help="Also the topics that the node made for itself.")
@json_option
@node_option
def list_(with_system: bool, as_json: bool, node: str) -> None:
    """List the topics."""
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        topics = [one for one in admin.topics() if with_system or not one.system]
    if as_json:
        print_json(topics)
    elif not topics:
        click.echo("no topics")
    else:
        print_table(
            ("TOPIC", "READ QUEUES", "WRITE QUEUES", "PERM"),
            [(one.name, one.read_queues, one.write_queues, permission(one.perm)) for one in topics],
        )


@topic.command()
@click.argument("name")
@json_option
@node_option
def describe(name: str, as_json: bool, node: str) -> None:
    """Show the settings of topic NAME, its queues with their offsets, and the groups that have consumed it."""
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        described = admin.topic(name)
        queues = admin.offsets(name)
        in_memory = described.attributes.get("storage.type") == "memory"
        use = admin.memory_use(name) if in_memory else {}
    rows = [{"queue": one.queue, "min": one.min, "max": one.max} for one in queues]
    if as_json:
        print_json({**described, "queues": rows, **({"memory": use} if in_memory else {})})
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


@topic.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@node_option
def delete(name: str, yes: bool, as_json: bool, node: str) -> None:
    """Delete topic NAME, its messages and the offsets of its groups."""
    from commitmq.client.admin import Admin

    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"to delete topic {name} with all its messages without being asked, give --yes")
        confirm(f"Delete topic {name} with all its messages?")
    with Admin(node) as admin:
        admin.topic_delete(name)
    if as_json:
        print_json({"deleted": name})
    else:
        click.echo(f"topic {name} deleted")


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
