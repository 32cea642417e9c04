"""Dead letters: which groups have some, those of one group, and a resend of a selection with an outcome for each.

Messages that wait for their time: those that are due first, and the cancelling of one after a preview.

Open transactions: those without an end, and an end manually after a preview.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from commitmq.client.dead_letters import DeadLetterFilter
from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import DEAD_LETTER_GROUP, DLQ_PREFIX
from commitmq.semantics.timer import RecallHandle
from commitmq_plugins.dashboard.api.messages import MessageRow, NotThereError, row_of
from commitmq_plugins.dashboard.api.node import BadValueError, VisitorNode, command, value

if TYPE_CHECKING:
    from commitmq.client.admin import Admin
    from commitmq.client.dead_letters import DeadLetter
    from commitmq.client.delayed import DelayedMessage
    from commitmq.client.transactions.transaction import OpenTransaction


MOST_ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class DelayedQuery:
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
class RecallQuery:
    """A message to cancel."""

    handle: str = value(doc="handle of the list, or the receipt that its sender got.", longest=1_024)


@dataclass(frozen=True, slots=True)
class RecallRequest:
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


def delayed(node: VisitorNode, asked: DelayedQuery) -> Delayed:
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
    rows = [_delayed_row(one, now_ms) for one in found]
    return Delayed(rows, found.complete, found.read, max(0.0, -rows[0].in_s) if rows else 0.0)


def preview_recall(node: VisitorNode, asked: RecallQuery) -> Recall:
    """What a cancellation would do; nothing is asked of the node."""
    found = _handle(asked.handle)
    node.rights.check("writer", "recall", {"topic": found.topic})
    return _recall(found, asked.handle, done=False)


def recall(node: VisitorNode, asked: RecallRequest) -> Recall:
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


def _delayed_row(one: DelayedMessage, now_ms: int) -> DelayedRow:
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


_ROLE: Final = "transaction"
_MOST_PAGES: Final = 8
_DECISIONS: Final = ("commit", "rollback")
_IDLE: Final = "idle"


@dataclass(frozen=True, slots=True)
class TransactionsQuery:
    """Which transactions."""

    after: int | None = value(None, "next of the page before.")
    limit: int = value(50, "Rows.", low=1, high=MOST_ROWS)


@dataclass(frozen=True, slots=True)
class TransactionRow:
    """A transaction without an end. A commit puts its message into ``topic`` and ``queue``; ``group``: of its producers."""

    id: str
    topic: str
    queue: str
    group: str
    keys: str
    tag: str
    place: int
    born_ms: int
    age_s: float
    checks: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Transactions:
    """A page, the oldest first. ``running``: false where no transaction ever began since the start, so none is open."""

    transactions: list[TransactionRow]
    running: bool
    next: int | None


@dataclass(frozen=True, slots=True)
class EndQuery:
    """An open transaction, and how to end it."""

    id: str = value(doc="Its id, the unique id of its message.", longest=255)
    decision: str = value(doc="What becomes of its message.", choices=_DECISIONS)
    place: int | None = value(None, "place of the list, where it is looked for.")


@dataclass(frozen=True, slots=True)
class EndRequest:
    """An end: as its preview, with ``confirm``."""

    id: str = value(doc="As in the preview.", longest=255)
    decision: str = value(doc="As in the preview.", choices=_DECISIONS)
    confirm: str = value(doc="The name of its topic, typed.", longest=255)
    place: int | None = value(None, "As in the preview.")


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """What an end does, or with ``done`` did. ``offset``: of the message of a commit that was done."""

    transaction: TransactionRow
    decision: str
    done: bool
    offset: int | None
    command: str


def transactions(node: VisitorNode, asked: TransactionsQuery) -> Transactions:
    """One request. The process of transactions is not started for it."""
    if not _is_running(node):
        return Transactions([], False, None)
    found, following = node.admin.open_transactions(asked.after, asked.limit)
    return Transactions([_transaction_row(one) for one in found], True, following)


def preview_end(node: VisitorNode, asked: EndQuery) -> TransactionEnd:
    """What an end would do; nothing changes."""
    row = _transaction_row(_find(node, asked.id, asked.place))
    return TransactionEnd(row, asked.decision, False, None, _command(asked.id, asked.decision))


def end_transaction(node: VisitorNode, asked: EndRequest) -> TransactionEnd:
    """Commit or roll back, whatever its producers would say. Raises ProtocolError when it has another end already."""
    found = _find(node, asked.id, asked.place)
    if asked.confirm != found.topic:
        raise BadValueError("confirm is the name of the transaction's topic: type it to say that you mean this one")
    answer = node.admin.end_transaction(found, asked.decision)
    offset = answer.get("queue_offset")
    shown = int(offset) if asked.decision == "commit" and offset is not None else None
    return TransactionEnd(_transaction_row(found), asked.decision, True, shown, _command(asked.id, asked.decision))


def _is_running(node: VisitorNode) -> bool:
    return any(row["role"] == _ROLE and row["state"] != _IDLE for row in node.status()["processes"])


def _find(node: VisitorNode, unique_id: str, place: int | None) -> OpenTransaction:
    """Looks from ``place`` on, where it was: a check may have moved it behind that."""
    after = place
    for _ in range(_MOST_PAGES if _is_running(node) else 0):
        found, after = node.admin.open_transactions(after, MOST_ROWS)
        for one in found:
            if one.unique_id == unique_id:
                return one
        if after is None:
            break
    raise NotThereError(f"no open transaction has the id {unique_id!r:.100}: it may have ended in the meantime")


def _transaction_row(one: OpenTransaction) -> TransactionRow:
    return TransactionRow(
        one.unique_id,
        one.topic,
        one.queue,
        one.group,
        one.keys,
        one.tags,
        one.queue_offset,
        one.born,
        round(one.age_ms / 1000, 1),
        one.checks,
        one.body_bytes,
    )


def _command(unique_id: str, decision: str) -> str:
    return command("transaction", "resolve", unique_id, decision)


MOST_SELECTED: Final = 100
_MOST_GROUPS: Final = 200
_MOST: Final = 100


@dataclass(frozen=True, slots=True)
class DeadGroupsQuery:
    """Which groups."""

    q: str = value("", "Only groups with this text in their name.", longest=255)
    after: str = value("", "The last group of the page before.", longest=255)


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """A group with a dead-letter topic. ``waiting``: letters behind those that are dealt with; null when not known."""

    group: str
    messages: int | None
    waiting: int | None
    oldest_s: float | None


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """A page of groups by name."""

    groups: list[DeadGroup]
    next: str | None


@dataclass(frozen=True, slots=True)
class DeadLettersQuery:
    """Dead letters of a group, the oldest first."""

    group: str = value(doc="The group's name.", longest=255)
    all: bool = value(False, "Also those that were resent or purged.")
    topic: str | None = value(None, "Only those that came from this topic.", longest=255)
    key: str | None = value(None, "Only messages with this key.", longest=255)
    limit: int = value(50, "Rows.", low=1, high=_MOST)


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter. ``state``: dead, resent, or purged."""

    offset: int
    state: str
    origin_topic: str | None
    message: MessageRow


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of a group. ``more``: there may be others behind these."""

    group: str
    letters: list[DeadLetterRow]
    more: bool


@dataclass(frozen=True, slots=True)
class ResendRequest:
    """A selection to send to their original topics again, each once."""

    group: str = value(doc="The group's name.", longest=255)
    offsets: tuple[int, ...] = value(doc="Queue offsets of the dead letters, 100 at most.", longest=MOST_SELECTED)
    confirm: str = value(doc="The group's name, typed.", longest=255)


@dataclass(frozen=True, slots=True)
class ResendOutcome:
    """One dead letter: resent (now), resent before, purged, not there, or failed with the reason."""

    offset: int
    outcome: str
    topic: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Resend:
    """One outcome for each letter that was selected."""

    group: str
    sent: int
    outcomes: list[ResendOutcome]
    command: str


def dead_groups(node: VisitorNode, asked: DeadGroupsQuery) -> DeadGroups:
    """No request of its own: the shared figures have the topics and what is dealt with."""
    figures, topics = node.figures(), node.topics()
    text = asked.q.lower()
    names = sorted(name.removeprefix(DLQ_PREFIX) for name in topics if name.startswith(DLQ_PREFIX))
    names = [name for name in names if text in name.lower() and name > asked.after]
    rows = []
    for name in names[:_MOST_GROUPS]:
        topic = DLQ_PREFIX + name
        bounds = node.bounds([(topic, queue) for queue in range(int(topics[topic]["read_queues"]))][:16])
        messages = None if None in bounds else sum(end - begin for begin, end in filter(None, bounds))
        lag = figures.group_lags.get((DEAD_LETTER_GROUP, topic))
        waiting = messages if lag is None else lag.messages
        since = None if lag is None else lag.since_ms
        age = None if since is None else round(max(0, figures.at_ms - since) / 1000, 1)
        rows.append(DeadGroup(name, messages, waiting, age))
    return DeadGroups(rows, names[_MOST_GROUPS - 1] if len(names) > _MOST_GROUPS else None)


def dead_letters(node: VisitorNode, asked: DeadLettersQuery) -> DeadLetters:
    """A request of the index for each letter: that tells which were resent."""
    selected = DeadLetterFilter(topic=asked.topic, key=asked.key)
    found = node.admin.dlq_list(asked.group, selected, max_messages=asked.limit, all_states=asked.all)
    return DeadLetters(asked.group, [_row(one) for one in found], len(found) == asked.limit)


def _row(letter: DeadLetter) -> DeadLetterRow:
    message = letter.message
    # Where it lies, not where it came from: the page of the message finds it by its id.
    return DeadLetterRow(message.queue_offset, letter.state, letter.topic, replace(row_of(message)))


def resend(node: VisitorNode, asked: ResendRequest) -> Resend:
    """Send the selected letters again. A repeated request stores nothing twice, whatever became of the first."""
    if asked.confirm != asked.group:
        raise BadValueError("confirm is the group's name: type it to say that you mean this group")
    offsets = list(dict.fromkeys(asked.offsets))
    if not offsets:
        raise BadValueError("no dead letter is selected")
    outcomes = {}
    with node.new_admin(node.settings.resend_ms / 1000) as admin:
        before = {offset: _look(admin, asked.group, offset) for offset in offsets}
        dead = [offset for offset, letter in before.items() if letter is not None and letter.state == "dead"]
        failures: dict[int, str] = {}
        if dead:
            result = admin.dlq_resend(
                asked.group,
                DeadLetterFilter(offsets=dead),
                max_messages=len(dead),
                timeout_s=node.settings.resend_ms / 1000,
            )
            failures = {one.offset: one.reason for one in result.failures}
        for offset, letter in before.items():
            after = _look(admin, asked.group, offset) if offset in dead else letter
            outcomes[offset] = _outcome(offset, letter, after, failures.get(offset))
    words = [word for offset in offsets for word in ("--offset", str(offset))]
    sent = sum(one.outcome == "resent" for one in outcomes.values())
    return Resend(asked.group, sent, list(outcomes.values()), command("dlq", "resend", asked.group, *words))


def _look(admin: Admin, group: str, offset: int) -> DeadLetter | None:
    try:
        return admin.dlq_show(group, offset)
    except ProtocolError as error:
        if error.code != "INVALID_PARAMETER":
            raise
        return None


def _outcome(offset: int, before: DeadLetter | None, after: DeadLetter | None, failure: str | None) -> ResendOutcome:
    if before is None:
        return ResendOutcome(offset, "not there", None, "it expired, or never was")
    if before.state != "dead":
        return ResendOutcome(offset, "resent before" if before.state == "resent" else before.state, before.topic, None)
    if after is not None and after.state == "resent":
        return ResendOutcome(offset, "resent", before.topic, None)
    return ResendOutcome(offset, "failed", before.topic, failure or "it was not reached; try again")
