"""Messages that wait for their time: those that are due first, and the cancelling of one after a preview."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commitmq.errors import InvalidMessageError
from commitmq.semantics.recall import RecallHandle
from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.shell import command
from commitmq_plugins.dashboard.api.values import BadValueError, value

if TYPE_CHECKING:
    from commitmq.client.delayed import DelayedMessage

MOST_ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class DelayedAsked:
    """Which messages."""

    topic: str | None = value(None, "Only messages that will be delivered to this topic.", longest=255)
    limit: int = value(50, "Rows.", low=1, high=MOST_ROWS)


@dataclass(frozen=True, slots=True)
class DelayedRow:
    """A message that waits for ``topic``. ``level``: its delay level, null for a time of its own. ``handle`` cancels it; null
    at a delay level. ``message_id``: of the place where it waits.
    """

    topic: str
    queue: int
    unique_id: str
    keys: str
    tag: str
    due_ms: int
    in_s: float
    stored_ms: int
    level: int | None
    body_bytes: int
    handle: str | None
    message_id: str | None


@dataclass(frozen=True, slots=True)
class Delayed:
    """Those that are due first come first. ``complete``: everything that waits was read, and is here. ``late_s``: how long
    the first of them has been due; 0 when its time is to come.
    """

    messages: list[DelayedRow]
    complete: bool
    looked_at: int
    late_s: float


@dataclass(frozen=True, slots=True)
class RecallAsked:
    """A message to cancel."""

    handle: str = value(doc="handle of the list, or the receipt that its sender got.", longest=1_024)


@dataclass(frozen=True, slots=True)
class RecallWanted:
    """A cancellation: as its preview, with ``confirm``."""

    handle: str = value(doc="As in the preview.", longest=1_024)
    confirm: str = value(doc="The name of its topic, typed.", longest=255)


@dataclass(frozen=True, slots=True)
class Recall:
    """What a cancellation does, or with ``done`` did: no consumer of ``topic`` gets the message."""

    topic: str
    unique_id: str
    due_ms: int
    in_s: float
    handle: str
    done: bool
    command: str


def delayed(node: Node, asked: DelayedAsked) -> Delayed:
    """Reads the topics in which messages wait: ``scan_messages``, ``scan_bytes`` and ``scan_ms`` at most."""
    node.status()  # refused to whoever may not know of the node
    bounds = node.settings
    found = node.admin.delayed(
        asked.topic,
        max_messages=asked.limit,
        most_read=bounds.scan_messages,
        most_bytes=bounds.scan_bytes,
        most_s=bounds.scan_ms / 1000,
    )
    now_ms = time.time_ns() // 1_000_000
    rows = [_row(one, now_ms) for one in found]
    return Delayed(rows, found.complete, found.read, max(0.0, -rows[0].in_s) if rows else 0.0)


def preview_recall(node: Node, asked: RecallAsked) -> Recall:
    """What a cancellation would do; nothing is asked of the node."""
    found = _handle(asked.handle)
    node.rights.check("writer", "recall", {"topic": found.topic})
    return _recall(found, asked.handle, done=False)


def recall(node: Node, asked: RecallWanted) -> Recall:
    """Cancel it. A second time does no harm. Raises ProtocolError when it is due in a moment, or was delivered."""
    found = _handle(asked.handle)
    if asked.confirm != found.topic:
        raise BadValueError("confirm is the name of the message's topic: type it to say that you mean this one")
    node.admin.delayed_recall(asked.handle)
    return _recall(found, asked.handle, done=True)


def _handle(text: str) -> RecallHandle:
    try:
        return RecallHandle.decode(text)
    except InvalidMessageError as error:
        raise BadValueError(str(error)[:200]) from None


def _recall(found: RecallHandle, handle: str, *, done: bool) -> Recall:
    in_s = round(found.deliver_ms / 1000 - time.time(), 1)
    line = command("delayed", "recall", handle)
    return Recall(found.topic, found.unique_key, found.deliver_ms, in_s, handle, done, line)


def _row(one: DelayedMessage, now_ms: int) -> DelayedRow:
    return DelayedRow(
        one.topic,
        one.queue,
        one.unique_id,
        one.keys,
        one.tags,
        one.due,
        round((one.due - now_ms) / 1000, 1),
        one.stored,
        one.level or None,
        one.body_bytes,
        one.recall_handle,
        one.msg_id or None,
    )
