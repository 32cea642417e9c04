"""``commitmq trace``: the story of one message, from the records that clients wrote into the trace topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from commitmq.cli.options import admin_options
from commitmq.cli.output import complain, fail, print_json, print_table

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.semantics.trace import TraceRecord

_MOST_MESSAGES = 1_000
_OFFSET_ID_DIGITS = (32, 56)


@click.command()
@click.argument("message_id", metavar="ID")
@admin_options
def trace(message_id: str, as_json: bool, admin: Admin) -> None:
    """Show the trace of one message.

    ID is its unique id, or its offset message id. Clients write the trace, if they are told to: Producer(trace=True),
    consumer.run(…, trace=True). Where there is none, the exit code is 1.
    """
    from commitmq.errors import TopicNotFoundError
    from commitmq.semantics.trace import TRACE_TOPIC

    unique = _unique_id(admin, message_id)
    try:
        found = admin.query(TRACE_TOPIC, key=unique, max_messages=_MOST_MESSAGES)
    except TopicNotFoundError:
        found = None
    records = sorted(story(found or (), unique), key=lambda one: int(getattr(one, "timestamp", 0)))
    is_complete = found is None or found.complete
    if as_json:
        document = [{"record": one.kind, **asdict(one)} for one in records]
        print_json({"message_id": unique, "records": document, "complete": is_complete})
    elif records:
        print_table(
            ("TIME (UTC)", "RECORD", "GROUP", "MS", "OUTCOME", "DETAILS"),
            [_row(one) for one in records],
            left=(0, 1, 2, 4, 5),
        )
    if not is_complete and not as_json:
        complain("there may be more: the index is behind, or the query was cut short")
    if found is None:
        fail(
            f"no trace for {message_id}: no client has written traces to this node yet. A producer made with trace=True does,"
            " and a consumer run with it"
        )
    if not records:
        fail(f"no trace for {message_id}; was its producer made with trace=True, or its consumer run with it?")


def story(messages: Iterable[Any], message_id: str) -> Iterator[TraceRecord]:
    """The records of one message among the trace messages; one that cannot be read is skipped."""
    from commitmq.errors import InvalidMessageError
    from commitmq.semantics.trace import decode_trace

    for message in messages:
        try:
            records = decode_trace(message.body)
        except InvalidMessageError as error:
            complain(f"{message.msg_id}: {error}")
            continue
        yield from (one for one in records if one.message_id == message_id)


def _unique_id(admin: Admin, message_id: str) -> str:
    """The unique id of the message with this offset message id; another id as it is. Both may have 32 digits."""
    from commitmq.errors import RequestError

    if len(message_id) in _OFFSET_ID_DIGITS:
        try:
            return admin.message(message_id).unique_id or message_id
        except (RequestError, ValueError):
            return message_id
    return message_id


def _row(one: TraceRecord) -> tuple[Any, ...]:
    timestamp = int(getattr(one, "timestamp", 0))
    shown = datetime.fromtimestamp(timestamp / 1000, UTC).isoformat(" ", "milliseconds")[:23] if timestamp else ""
    success = getattr(one, "success", None)
    outcome = "" if success is None else "done" if success else "failed"
    if one.kind == "SubAfter" and not success:
        outcome = getattr(one, "result").name.lower()  # noqa: B009
    names = {
        "Pub": ("topic", "tags", "keys", "offset_message_id"),
        "SubBefore": ("retry_times",),
        "EndTransaction": ("state", "topic", "from_check"),
    }
    details = [f"{name}={value}" for name in names.get(one.kind, ()) if (value := getattr(one, name)) not in (None, "")]
    return shown, one.kind, one.group or "", getattr(one, "cost_ms", ""), outcome, " ".join(details)
