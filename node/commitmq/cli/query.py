"""``commitmq query``: messages by key, unique key, tag, offset message id, queue offset or store time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commitmq.cli.options import admin_options
from commitmq.cli.output import complain, print_json, print_table
from commitmq.cli.quantity import MAX_INT, MAX_LONG, optional_time, utc

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.message import Message
    from commitmq.client.receiving.query import QueryResult

_BODY_CHARACTERS = 60


@click.command()
@click.option("--topic", metavar="TOPIC", help="Where to look; needed for everything but --id.")
@click.option("--key", metavar="KEY", help="Messages with the key KEY.")
@click.option("--unique-key", metavar="ID", help="The message that its producer gave this unique id.")
@click.option("--tag", metavar="TAG", help="Messages with this tag.")
@click.option("--id", "message_id", metavar="ID", help="The message with this offset message id.")
@click.option("--offset", type=click.IntRange(0, MAX_LONG), help="The message at this offset of --queue.")
@click.option("--queue", type=click.IntRange(0, MAX_INT), default=0, show_default=True, help="The queue of --offset.")
@click.option(
    "--begin", metavar="TIME", help="Stored at this time or later; ISO 8601 (UTC unless it says otherwise), or ms."
)
@click.option("--end", metavar="TIME", help="Stored at this time or earlier.")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, MAX_INT),
    default=64,
    show_default=True,
    help="Messages to show; the newest by key.",
)
@click.option(
    "--continue", "continue_from", metavar="WHERE", help="Continue where a previous query of the same kind stopped."
)
@admin_options
def query(
    topic: str | None,
    key: str | None,
    unique_key: str | None,
    tag: str | None,
    message_id: str | None,
    offset: int | None,
    queue: int,
    begin: str | None,
    end: str | None,
    most: int,
    continue_from: str | None,
    as_json: bool,
    admin: Admin,
) -> None:
    """Find messages by key, unique key, tag, id, offset or time.

    With a key or tag the newest messages are shown, with times alone the oldest, both in the order of the log.
    """
    ways = [one for one in (key, unique_key, tag, message_id, offset) if one is not None]
    if len(ways) > 1 or (not ways and begin is None and end is None):
        raise click.UsageError("give one of --key, --unique-key, --tag, --id and --offset, or --begin and --end")
    if message_id is None and topic is None:
        raise click.UsageError("give the --topic")
    if message_id is not None:
        try:
            message = admin.message(message_id)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--id") from None
        _show([message], None, as_json)
        return
    assert topic is not None
    if offset is not None:
        _show([admin.message_at(topic, queue, offset)], None, as_json)
        return
    try:
        result = admin.query(
            topic,
            key=key,
            unique_key=unique_key,
            tag=tag,
            begin=optional_time(begin, "--begin"),
            end=optional_time(end, "--end"),
            max_messages=most,
            continue_from=continue_from,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _show(list(result), result, as_json)


def _show(messages: list[Message], result: QueryResult | None, as_json: bool) -> None:
    if as_json:
        document: dict[str, object] = {"messages": [message.to_json() for message in messages]}
        if result is not None:
            document |= {name: getattr(result, name) for name in ("complete", "next", "log_end", "indexed_to")}
        print_json(document)
        return
    rows = [
        (
            utc(one.store_timestamp),
            one.queue_id,
            one.queue_offset,
            one.msg_id,
            one.tags,
            " ".join(one.keys),
            _body(one),
        )
        for one in messages
    ]
    headers = ("STORED (UTC)", "QUEUE", "OFFSET", "MESSAGE ID", "TAG", "KEYS", "BODY")
    print_table(headers, rows, left=(0, 3, 4, 5, 6))
    if not messages:
        complain("no message was found")
    if result is None:
        return
    if not result.complete:
        complain(
            f"there may be more: the index is at {result.indexed_to} of {result.log_end} bytes of the log"
            if result.indexed_to < result.log_end
            else "there may be more: the query was cut short"
        )
    if result.next is not None:
        complain(f"older or further messages: --continue {result.next}")


def _body(message: Message) -> str:
    if message.damage is not None:
        return f"({message.damage})"
    text = message.body.decode("utf-8", "replace")
    text = "".join(character if character.isprintable() else "·" for character in text[: _BODY_CHARACTERS + 1])
    return text if len(text) <= _BODY_CHARACTERS else text[: _BODY_CHARACTERS - 1] + "…"
