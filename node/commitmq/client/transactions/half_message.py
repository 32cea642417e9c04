"""What a program says of a transaction, and what it is told about one: states, half messages, listeners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from commitmq.client.results import SendResult
from commitmq.format.compression import decompress
from commitmq.format.constants import Property
from commitmq.format.record import Record


class TransactionState(StrEnum):
    """How a transaction ends. UNKNOWN: not yet, the node asks later."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


def state_of(method: str, value: object) -> TransactionState:
    """The state that a listener's ``method`` returned. Raises ValueError for what is none, for example a missing return."""
    try:
        return TransactionState(str(value))
    except ValueError:
        choices = "TransactionState.COMMIT, ROLLBACK or UNKNOWN"
        raise ValueError(f"{method} of the transaction listener must return {choices}, not {value!r:.200}") from None


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A message of a transaction that has no end yet.

    ``unique_id`` names the transaction in every producer and process. ``checks`` counts how often the node has asked.
    ``properties`` has all properties of the message, those of the node too. ``born`` is in ms since 1970.
    """

    topic: str
    queue: int
    body: bytes
    unique_id: str
    properties: Mapping[str, str] = field(default_factory=dict)
    checks: int = 0
    born: int = 0

    @property
    def tags(self) -> str | None:
        """The tag, if there is one."""
        return self.properties.get(Property.TAGS)

    @property
    def keys(self) -> list[str]:
        """The keys."""
        return self.properties.get(Property.KEYS, "").split()

    @classmethod
    def of(cls, record: Record) -> HalfMessage:
        """The message of a ``record`` that the node sent. Raises InvalidMessageError for a damaged body."""
        times = record.properties.get(Property.TRANSACTION_CHECK_TIMES, "0")
        return cls(
            record.topic,
            record.queue_id,
            decompress(record.body, record.sys_flag),
            record.properties.get(Property.UNIQUE_KEY, ""),
            dict(record.properties),
            int(times) if times.isdecimal() else 0,
            record.born_timestamp,
        )


class TransactionListener(Protocol):
    """The program's part of a transaction, as RocketMQ's TransactionListener.

    ``check`` is called in a thread of the producer, for transactions of any producer of the group, also of one that has died.
    A producer can be given a function instead; the function is its ``check``.
    """

    def execute(self, message: HalfMessage, argument: Any) -> TransactionState:
        """The local transaction, for :meth:`Producer.send_in_transaction`."""

    def check(self, message: HalfMessage) -> TransactionState:
        """What became of the local transaction of ``message``."""


Listener = TransactionListener | Callable[[HalfMessage], TransactionState]
"""What a producer takes: the object, or only its ``check``."""


class TransactionResult(NamedTuple):
    """Of :meth:`Producer.send_in_transaction`: the half message's result, and how the transaction ended.

    ``committed`` is where the message lies; None unless the state is COMMIT.
    """

    half: SendResult
    state: TransactionState
    committed: SendResult | None
