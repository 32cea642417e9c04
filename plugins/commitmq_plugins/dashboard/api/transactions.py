"""Open transactions: those without an end, and an end by hand after a preview."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commitmq_plugins.dashboard.api.node import Node
from commitmq_plugins.dashboard.api.search import NotThereError
from commitmq_plugins.dashboard.api.shell import command
from commitmq_plugins.dashboard.api.values import BadValueError, value

if TYPE_CHECKING:
    from commitmq.client.transactions.administration import OpenTransaction

MOST_ROWS: Final = 200
_ROLE: Final = "transaction"
_MOST_PAGES: Final = 8
_DECISIONS: Final = ("commit", "rollback")
_IDLE: Final = "idle"


@dataclass(frozen=True, slots=True)
class TransactionsAsked:
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
class EndAsked:
    """An open transaction, and how to end it."""

    id: str = value(doc="Its id, the unique id of its message.", longest=255)
    decision: str = value(doc="What becomes of its message.", choices=_DECISIONS)
    place: int | None = value(None, "place of the list, where it is looked for.")


@dataclass(frozen=True, slots=True)
class EndWanted:
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


def transactions(node: Node, asked: TransactionsAsked) -> Transactions:
    """One request. The process of transactions is not started for it."""
    if not _is_running(node):
        return Transactions([], False, None)
    found, following = node.admin.open_transactions(asked.after, asked.limit)
    return Transactions([_row(one) for one in found], True, following)


def preview_end(node: Node, asked: EndAsked) -> TransactionEnd:
    """What an end would do; nothing changes."""
    row = _row(_find(node, asked.id, asked.place))
    return TransactionEnd(row, asked.decision, False, None, _command(asked.id, asked.decision))


def end_transaction(node: Node, asked: EndWanted) -> TransactionEnd:
    """Commit or roll back, whatever its producers would say. Raises ProtocolError when it has another end already."""
    found = _find(node, asked.id, asked.place)
    if asked.confirm != found.topic:
        raise BadValueError("confirm is the name of the transaction's topic: type it to say that you mean this one")
    answer = node.admin.end_transaction(found, asked.decision)
    offset = answer.get("queue_offset")
    shown = int(offset) if asked.decision == "commit" and offset is not None else None
    return TransactionEnd(_row(found), asked.decision, True, shown, _command(asked.id, asked.decision))


def _is_running(node: Node) -> bool:
    return any(row["role"] == _ROLE and row["state"] != _IDLE for row in node.status()["processes"])


def _find(node: Node, unique_id: str, place: int | None) -> OpenTransaction:
    """Looks from ``place`` on, where it was: a check may have moved it behind that."""
    after = place
    for _ in range(_MOST_PAGES if _is_running(node) else 0):
        found, after = node.admin.open_transactions(after, MOST_ROWS)
        for one in found:
            if one.unique_id == unique_id:
                return one
        if after is None:
            break
    raise NotThereError(f"no open transaction has the id {unique_id!r:.100}: it may have ended meanwhile")


def _row(one: OpenTransaction) -> TransactionRow:
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
