"""An administrator's view of open transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from commitmq.errors import ProtocolError

DECISIONS: Final = ("commit", "rollback")


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction without an end. ``topic`` and ``queue`` are those where a commit puts its message.

    ``group`` is that of the producers that the node asks, ``checks`` how often it has asked. ``born`` is in ms since 1970.
    ``queue_offset`` and ``physical_offset`` are those of the half message now; they change with each check.
    """

    topic: str
    queue: str
    group: str
    unique_id: str
    keys: str
    tags: str
    queue_offset: int
    physical_offset: int
    born: int
    age_ms: int
    checks: int
    body_bytes: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """From the node's answer, without fields that this version does not know."""
        return cls(**{one.name: answer[one.name] for one in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Asks the transaction process: operation and fields."""


def open_transactions(ask: Ask) -> Iterator[OpenTransaction]:
    """All open transactions, oldest first."""
    after: int | None = None
    seen: set[str] = set()  # one that a check puts back between two pages is on both
    while True:
        page = ask("transaction.list", {} if after is None else {"after": after})
        for one in map(OpenTransaction.of, page["transactions"]):
            if one.unique_id not in seen:
                seen.add(one.unique_id)
                yield one
        after = page["next"]
        if after is None:
            return


def resolve(ask: Ask, unique_id: str, decision: str) -> dict[str, Any]:
    """End the open transaction ``unique_id``. Raises ProtocolError when there is none."""
    if decision not in DECISIONS:
        raise ValueError(f"decision must be commit or rollback, not {decision!r}")
    found = next((one for one in open_transactions(ask) if one.unique_id == unique_id), None)
    if found is None:
        raise ProtocolError("TRANSACTION_ENDED", f"no open transaction has the id {unique_id!r}")
    place = {"queue_offset": found.queue_offset, "physical_offset": found.physical_offset}
    return ask("transaction.end", {**place, "decision": decision, "by_person": True})
