"""The receipt of a shared message: which delivery it is, and who speaks to the node about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from commitmq.errors import CommitMQError


class Settler(Protocol):
    """The consumer that received a message. Its methods take messages, and return those that came too late."""

    def ack(self, messages: Any) -> list[Any]: ...
    def nack(self, messages: Any, delay: Any = None) -> list[Any]: ...
    def extend(self, messages: Any, invisible_s: float | None = None) -> list[Any]: ...


@dataclass(slots=True)
class Receipt:
    """``handle`` is RocketMQ's receipt handle. ``expires_at``: when the message comes back (``time.monotonic()``)."""

    consumer: Settler | None
    topic: str
    handle: str
    expires_at: float


def receipt_of(message: object) -> Receipt:
    """The receipt of a message. Raises CommitMQError for one that was not received by a ShareConsumer."""
    receipt = getattr(message, "_receipt", None)
    if not isinstance(receipt, Receipt):
        raise CommitMQError("the message was not received by a ShareConsumer, so there is nothing to acknowledge")
    return receipt


def settler_of(message: object) -> Settler:
    """The consumer that received a message. Raises CommitMQError without one that can be called here."""
    consumer = receipt_of(message).consumer
    if consumer is None:
        raise CommitMQError("this would block the event loop: await consumer.ack(message), nack or extend instead")
    return consumer
