"""The story of one message, from the records that clients wrote into the trace topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commitmq.errors import InvalidMessageError, ProtocolError, TopicNotFoundError
from commitmq.semantics.trace import TRACE_TOPIC, decode_trace
from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.rights import NotAllowedError
from commitmq_plugins.dashboard.api.shell import command
from commitmq_plugins.dashboard.api.values import value

if TYPE_CHECKING:
    from commitmq.semantics.trace import TraceRecord

_MOST_MESSAGES: Final = 200
_MOST_ROWS: Final = 500
_OFFSET_ID_DIGITS: Final = (32, 56)
_DETAILS: Final = {
    "Pub": ("topic", "tags", "keys", "offset_message_id", "store_host"),
    "SubBefore": ("retry_times",),
    "EndTransaction": ("state", "topic", "from_check"),
    "Recall": ("topic",),
}


@dataclass(frozen=True, slots=True)
class TraceAsked:
    """One message: by the unique id that its producer gave, or by its offset message id."""

    id: str = value(doc="Its unique id, or its offset message id.", longest=255)
    topic: str | None = value(None, "Its topic, which the visitor must be allowed to read.", longest=255)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A record. ``outcome``: done, failed, or what a handler said; null where the kind has none."""

    time_ms: int | None
    record: str
    group: str | None
    cost_ms: int | None
    outcome: str | None
    details: dict[str, str]


@dataclass(frozen=True, slots=True)
class Trace:
    """The records by their times; none when clients write no traces. ``complete``: nothing is missing."""

    id: str
    records: list[TraceRow]
    complete: bool
    unreadable: int
    command: str


def trace(node: Node, asked: TraceAsked) -> Trace:
    """A query of the index, and a look-up where the id is a place."""
    if asked.topic is not None:
        node.rights.check("reader", "pull", {"topic": asked.topic})
    unique, records, unreadable, complete = _unique_id(node, asked.id), [], 0, True
    try:
        found = node.admin.query(TRACE_TOPIC, key=unique, max_messages=_MOST_MESSAGES, wait_s=0.2)
    except TopicNotFoundError:
        found = None
    for message in found or ():
        try:
            records += [one for one in decode_trace(message.body) if one.message_id == unique]
        except InvalidMessageError:
            unreadable += 1
    if found is not None:
        complete = found.complete and found.next is None and len(records) <= _MOST_ROWS
    rows = sorted(map(_row, records), key=lambda row: row.time_ms or 0)[:_MOST_ROWS]
    return Trace(unique, rows, complete, unreadable, command("trace", unique))


def _unique_id(node: Node, text: str) -> str:
    """The unique id of the message with this offset message id; another id as it is. Both may have 32 digits."""
    if len(text) not in _OFFSET_ID_DIGITS:
        return text
    try:
        return node.admin.message(text).unique_id or text
    except NotAllowedError:
        raise
    except (ProtocolError, ValueError):
        return text


def _row(one: TraceRecord) -> TraceRow:
    success = getattr(one, "success", None)
    outcome = None if success is None else "done" if success else "failed"
    if one.kind == "SubAfter" and not success:
        outcome = str(getattr(one, "result").name).lower()  # noqa: B009
    names = _DETAILS.get(one.kind, ())
    details = {name: str(found) for name in names if (found := getattr(one, name, None)) not in (None, "")}
    when = int(getattr(one, "timestamp", 0)) or None
    return TraceRow(when, one.kind, one.group or None, getattr(one, "cost_ms", None), outcome, details)
