"""The arguments of a producer and of its sends by name and type, for the synchronous producer and its asyncio twin."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, TypedDict

from commitmq.client.properties import Keys
from commitmq.client.results import SendResult
from commitmq.client.sending.asked import Asked
from commitmq.client.transactions.half_message import Listener

OnDelivery = Callable[[BaseException | None, SendResult | None], object]
"""Called with ``(error, result)`` once a message has its outcome; one of both is None."""


@dataclass(frozen=True)
class ExactlyOnce:
    """The delivery of an idempotent producer: ``Producer(delivery=ExactlyOnce())``; see :class:`Producer`.

    A ``producer_id`` outlives its producer, so a program can repeat itself. ``epoch`` belongs to the ``producer_id``: the node
    refuses the sends of lower epochs. Raises ValueError for an epoch without an id.
    """

    producer_id: str | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.producer_id is None and self.epoch:
            raise ValueError("an epoch needs a producer_id: without one the producer counts epochs by itself")


class MessageOptions(TypedDict, total=False):
    """The arguments beside the body of one message; see :meth:`Producer.send`."""

    tags: str | None
    keys: Keys | None
    properties: Mapping[str, str] | None
    sharding_key: str | None
    key: str | None
    queue: int | None
    flag: int
    delay: float | timedelta | None
    delay_level: int | None
    deliver_at: datetime | int | None
    timeout_s: float | None
    ack: str | None


class RequestOptions(TypedDict, total=False):
    """The arguments beside the body of a request; see :meth:`Producer.request`."""

    tags: str | None
    keys: Keys | None
    properties: Mapping[str, str] | None
    sharding_key: str | None
    key: str | None
    queue: int | None
    flag: int
    timeout_s: float | None
    ack: str | None


class BatchOptions(TypedDict, total=False):
    """The arguments beside the messages of a batch; see :meth:`Producer.send_batch`."""

    tags: str | Sequence[str | None] | None
    keys: Sequence[Keys | None] | None
    properties: Mapping[str, str] | None
    sharding_keys: Sequence[str | None] | None
    key: str | Sequence[str | None] | None
    queue: int | None
    delay: float | timedelta | None
    delay_level: int | None
    deliver_at: datetime | int | None
    timeout_s: float | None
    ack: str | None


class ProducerOptions(TypedDict, total=False):
    """The settings of a :class:`Producer`, without the node."""

    ack: str
    timeout_s: float
    compress: str | None
    compress_over_bytes: int
    max_pending: int
    max_pending_bytes: int
    max_requests: int
    linger_ms: float
    keep_freed_memory: bool
    delivery: ExactlyOnce | None
    trace: bool
    group: str | None
    transaction_listener: Listener | None


class HalfOptions(MessageOptions, total=False):
    """Those of a message of a transaction, as the producers hand them on."""

    half: Asked


class Outcome(Protocol):
    """A future, of a thread or of a loop."""

    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> SendResult: ...


def tell_delivery(on_delivery: OnDelivery, sent: Outcome) -> None:
    """Call ``on_delivery`` with the outcome of ``sent``, which is done."""
    if not sent.cancelled():
        error = sent.exception()
        if error is None:
            on_delivery(None, sent.result())
        else:
            on_delivery(error, None)


def former_delivery(
    delivery: ExactlyOnce | None, idempotent: bool, producer_id: str | None, producer_epoch: int
) -> ExactlyOnce:
    """The delivery that the arguments of former versions mean. Raises ValueError for arguments that do not fit together."""
    if delivery is not None:
        raise ValueError("delivery is given: leave out idempotent, producer_id and producer_epoch")
    if not idempotent:
        raise ValueError(
            "producer_id and producer_epoch need idempotent=True; delivery=ExactlyOnce(producer_id, epoch) replaces all three"
        )
    warnings.warn(
        "idempotent, producer_id and producer_epoch are deprecated: say delivery=ExactlyOnce(producer_id, epoch)",
        DeprecationWarning,
        stacklevel=3,
    )
    return ExactlyOnce(producer_id, producer_epoch)
