"""``commitmq client list|show|verify``: who is connected to a running node, and what a client makes of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import click

from commitmq.cli.client_questions import GATEWAY, NO_QUESTIONS, Questions, question_options
from commitmq.cli.options import admin_options, json_option, node_option
from commitmq.cli.output import complain, fail, print_json, print_table, usage
from commitmq.supervision.exit_codes import CliExit

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.admin_results import ClientInfo

NOT_KNOWN = "Producers of the node's own protocol are not known to the node."
_HANDLED = ("CR_SUCCESS", "CR_COMMIT")
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
@admin_options
def list_(topic: str | None, group: str | None, user: str | None, as_json: bool, admin: Admin) -> None:
    """List RocketMQ's clients, consumers and producers, and the members of groups that speak the node's own protocol.

    Producers of the node's own protocol are not known to the node. A new client is listed after a second.

    \b
    Example: commitmq client list --group kitchen
    """
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
@admin_options
def show(id_: str, as_json: bool, admin: Admin) -> None:
    """Show what is known of the client ID: each of its connections and memberships.

    \b
    Example: commitmq client show 10.1.2.3@4711
    """
    found = admin.clients(client_id=id_).clients
    if not found:
        _fail_unknown(id_)
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
            click.echo(f"  omitted   {one.left_out} names of groups and topics")
        if one.queues is not None:
            click.echo(f"  queues     {one.queues}")
        click.echo(f"  heard      {one.heard_ms_ago} ms ago")


@client.command()
@click.argument("id_", metavar="ID")
@click.argument("message", metavar="MESSAGE")
@click.option("--group", help="As a consumer of this group; needed where ID consumes in several.")
@question_options
@json_option
@node_option
def verify(
    id_: str,
    message: str,
    group: str | None,
    access_key: str | None,
    tls: bool,
    timeout_s: float,
    as_json: bool,
    node: str,
) -> None:
    """Let the RocketMQ consumer ID handle the message with the id MESSAGE now, and say what came of it.

    The consumer's listener gets the message once more; no offset moves. The exit code is 1 when it fails, or when the client
    does not answer.

    \b
    Example: commitmq client verify 10.1.2.3@4711 7F00000100002A9F0000000000000000
    """
    from commitmq.client.admin import Admin
    from commitmq.format.message_id import parse_offset_message_id

    usage(lambda: parse_offset_message_id(message))
    with Admin(node) as admin:
        found = admin.clients(client_id=id_).clients
        if not found:
            _fail_unknown(id_)
        groups = sorted({one for row in found if row.gateway == GATEWAY for one in row.consumes})
        if all(one.gateway != GATEWAY for one in found):
            fail(f"client {id_}: {NO_QUESTIONS}")
        if group is None and len(groups) != 1:
            raise click.UsageError(f"client {id_} consumes in {', '.join(groups) or 'no group'}: name one with --group")
        chosen = groups[0] if group is None else group
        questions = Questions(admin, node, access_key=access_key, tls=tls, timeout_s=timeout_s)
    result, remark, spent_ms = questions.handled(chosen, id_, message)
    if as_json:
        shown = {"client": id_, "group": chosen, "message": message}
        print_json({**shown, "result": result, "remark": remark, "spent_ms": spent_ms})
    else:
        took = "" if spent_ms is None else f" in {spent_ms} ms"
        click.echo(f"client {id_} of group {chosen}: {result}{took}{f': {remark}' if remark else ''}")
    if result not in _HANDLED:
        raise SystemExit(int(CliExit.FAILURE))


def _fail_unknown(id_: str) -> NoReturn:
    fail(f"no client {id_!r} is connected; `commitmq client list` shows who is. {NOT_KNOWN}")


def _row(one: ClientInfo) -> tuple[object, ...]:
    texts = one.id, one.gateway, one.user, one.address, one.language, one.version
    return (*(text or "-" for text in texts), _names(one.consumes), _names(one.produces), one.heard_ms_ago)


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "-"
