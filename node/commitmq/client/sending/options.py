"""The arguments of a producer and of its sends by name and type, for the synchronous producer and its asyncio twin."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Protocol, TypedDict

from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.properties import Keys
from commitmq.client.results import SendResult
from commitmq.client.sending.asked import Asked
from commitmq.client.transactions.half_message import Listener

MAX_LINGER_MS: Final = 1_000
MAX_RETRIES: Final = 1_000
OnDelivery = Callable[[BaseException | None, SendResult | None], object]
"""Called with ``(error, result)`` once a message has its outcome; one of both is None."""


@dataclass(frozen=True)
class ExactlyOnce:
    """The delivery of an idempotent producer: ``Producer(delivery=ExactlyOnce())``; see :class:`Producer`.

    With ``ExactlyOnce("import-7", epoch=0)`` a program can repeat itself after its own death. The ``producer_id`` (1 to
    64 letters, digits and ``._-/@+=``) outlives its producer. The producer numbers the messages of each queue from 0, in
    the order of sending. The node does not store a message with the id, epoch, queue and number of a stored one; its
    result has ``duplicate`` set and the place of the stored one. So a new producer, anywhere, repeats a failed attempt:
    it sends the same messages in the same order to the same queues, and may cut them into other batches. Two attempts
    at the same time store each message once. Every send needs its queue then: ``queue``, or sharding keys while the
    number of queues stays. A higher epoch begins at 0 again, and the node refuses the sends of lower epochs
    (ProducerFencedError). After a send of unknown fate such a producer refuses all further sends; its successor repeats
    all messages. An id belongs to one sender: several senders at the same time must send the very same messages.

    Raises ValueError for an epoch without an id.
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
    delivery: ExactlyOnce | None
    trace: bool
    group: str | None
    transaction_listener: Listener | None
    retries: int
    retry_may_store_twice: bool
    fault_strategy: FaultStrategy | None


class HalfOptions(MessageOptions, total=False):
    """Those of a message of a transaction, as the producers hand them on."""

    half: Asked


def check_settings(
    max_pending: int,
    max_pending_bytes: int,
    max_requests: int,
    linger_ms: float,
    retries: int,
    fault_strategy: FaultStrategy | None,
) -> None:
    """Raise ValueError for a setting of a producer that is out of range."""
    if max_pending < 1 or max_pending_bytes < 1:
        raise ValueError("max_pending and max_pending_bytes must be at least 1")
    if max_requests < 1:
        raise ValueError("max_requests must be at least 1")
    if not 0 <= linger_ms <= MAX_LINGER_MS:
        raise ValueError(f"linger_ms must be between 0 and {MAX_LINGER_MS}, not {linger_ms}")
    check_retries(retries, fault_strategy)


def check_retries(retries: int, fault_strategy: FaultStrategy | None) -> None:
    """Raise ValueError for a setting of a producer with several nodes that is out of range."""
    if type(retries) is not int or not 0 <= retries <= MAX_RETRIES:
        raise ValueError(f"retries must be an integer from 0 to {MAX_RETRIES}, not {retries!r}")
    if not isinstance(fault_strategy, FaultStrategy | None):
        raise ValueError(f"fault_strategy must be a FaultStrategy, not {type(fault_strategy).__name__}")


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
