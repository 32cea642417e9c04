"""``commitmq client list|show``: who is connected to a running node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commitmq.cli.output import complain, fail, json_option, node_option, print_json, print_table

if TYPE_CHECKING:
    from commitmq.client.admin_clients import ClientInfo

NOT_KNOWN = "Producers of the node's own protocol are not known to the node."
_INCOMPLETE = (
    "the list may not be complete: the node keeps groups.max_listed_clients clients, and some of each one's names"
)


@click.group()
def client() -> None:
    """List who is connected to a node."""


@client.command(name="list")
@click.option("--topic", help="Only those that subscribe to this topic.")
@click.option("--group", help="Only those that consume or produce in this group.")
@click.option("--user", help="Only those of this user.")
@json_option
@node_option
def list_(topic: str | None, group: str | None, user: str | None, as_json: bool, node: str) -> None:
    """List RocketMQ's clients, consumers and producers, and the members of groups that speak the node's own protocol.

    Producers of the node's own protocol are not known to the node. A client that came is listed a second later.

    \b
    Example: commitmq client list --group kitchen
    """
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        found = admin.clients(topic=topic, group=group, user=user)
    if as_json:
        print_json({"clients": found.clients, "complete": found.complete, "note": NOT_KNOWN})
        return
    if found.clients:
        print_table(
            ("CLIENT", "GATEWAY", "USER", "ADDRESS", "LANGUAGE", "VERSION", "CONSUMES", "PRODUCES", "HEARD MS AGO"),
            [_row(one) for one in found.clients],
            left=(0, 1, 2, 3, 4, 5, 6, 7),
        )
    else:
        click.echo("no clients")
    click.echo(NOT_KNOWN)
    if not found.complete:
        complain(_INCOMPLETE)


@client.command()
@click.argument("id_", metavar="ID")
@json_option
@node_option
def show(id_: str, as_json: bool, node: str) -> None:
    """Show what is known of the client ID: each of its connections and memberships.

    \b
    Example: commitmq client show 10.1.2.3@4711
    """
    from commitmq.client.admin import Admin

    with Admin(node) as admin:
        found = admin.clients(client_id=id_).clients
    if not found:
        fail(f"no client {id_!r} is connected; `commitmq client list` shows who is. {NOT_KNOWN}")
    if as_json:
        print_json({"id": id_, "connections": found})
        return
    for one in found:
        click.echo(f"client {one.id}  {one.gateway}  {one.address or '-'}  user {one.user or '-'}")
        if one.language:
            click.echo(f"  language   {one.language} {one.version}")
        for title, names in (("consumes", one.consumes), ("produces", one.produces), ("topics", one.topics)):
            if names:
                click.echo(f"  {title:9}  {', '.join(names)}")
        if one.left_out:
            click.echo(f"  left out   {one.left_out} names of groups and topics")
        if one.queues is not None:
            click.echo(f"  queues     {one.queues}")
        click.echo(f"  heard      {one.heard_ms_ago} ms ago")


def _row(one: ClientInfo) -> tuple[object, ...]:
    texts = one.id, one.gateway, one.user, one.address, one.language, one.version
    return (*(text or "-" for text in texts), _names(one.consumes), _names(one.produces), one.heard_ms_ago)


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "-"
