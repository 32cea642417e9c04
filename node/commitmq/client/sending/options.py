"""The arguments of a producer and of its sends by name and type, for the synchronous producer and its asyncio twin.

The arguments of a send, single or batch: their checks, and their form for the lane.

The request that cancels a message which waits for its time (the operation ``recall``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Protocol, TypedDict

import orjson

from commitmq.client.message import Message, check_alone, check_body, content_of
from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.properties import Keys, build_properties
from commitmq.client.results import BatchSendError, SendResult
from commitmq.client.sending.asked import SystemProperties
from commitmq.client.transactions.half_message import Listener
from commitmq.errors import InvalidMessageError, SendError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.protocol import wire

_ACKS: Final = ("flushed", "memory")
_MAX_QUEUE: Final = (1 << 31) - 1


def json_content(
    body: bytes | Message,
    tags: str | None,
    keys: Keys | None,
    properties: Mapping[str, str] | None,
    sharding_key: str | None,
    flag: int,
) -> tuple[bytes, str, int]:
    """Body, properties and flag of one message. The properties are members of a JSON object, each followed by a comma.

    Raises InvalidMessageError.
    """
    if isinstance(body, Message):
        check_alone(tags, keys, properties, sharding_key, None, flag)
        body, own, flag = content_of(body)
    else:
        own = build_properties(tags, keys, properties, sharding_key)
        if type(body) is not bytes or not body:
            body = check_body(body)
    return body, orjson.dumps(own).decode()[1:-1] + "," if own else "", flag


def check_queue(queue: int) -> int:
    """``queue`` as a plain integer that a record can hold. The node checks whether the topic has such a queue.

    Raises InvalidMessageError.
    """
    if type(queue) is not int:
        try:
            queue = -1 if isinstance(queue, bool) else operator.index(queue)
        except TypeError:
            raise InvalidMessageError(f"queue {queue!r} is not a queue id") from None
    if not 0 <= queue <= _MAX_QUEUE:
        raise InvalidMessageError(f"queue {queue!r} is not a queue id")
    return queue


def keys_of_batch(
    key: str | Sequence[str | None] | None,
    keys: Sequence[Keys | None] | None,
    sharding_keys: Sequence[str | None] | None,
    messages: Sequence[bytes | Message],
) -> tuple[Sequence[Keys | None] | None, Sequence[str | None] | None]:
    """``keys`` and ``sharding_keys`` of ``messages`` with ``key``. Raises InvalidMessageError."""
    if key is None:
        return keys, sharding_keys
    count = len(messages)
    if keys is not None or sharding_keys is not None:
        raise InvalidMessageError("key sets both keys and sharding_keys: give either key or these")
    each = [key] * count if isinstance(key, str) else list(key)
    if len(each) != count:
        raise InvalidMessageError(f"key has {len(each)} entries for {count} messages")
    for index, one in enumerate(each):
        if one is not None and (not isinstance(one, str) or not one or " " in one):
            raise InvalidMessageError(
                f"message {index}: key {one!r} must be a string that is not empty and has no space"
            )
    return each, each


def has_sharding_keys(messages: Sequence[bytes | Message]) -> bool:
    """Whether any of ``messages`` brings a sharding key."""
    return any(isinstance(one, Message) and one.sharding_key for one in messages)


def check_ack(ack: str) -> str:
    """``ack`` itself. Raises ValueError for any other word than an ack."""
    if ack not in _ACKS:
        raise ValueError(f"ack must be one of {', '.join(_ACKS)}, not {ack!r}")
    return ack


def needs_queue() -> InvalidMessageError:
    """The error of a numbered message without a queue."""
    return InvalidMessageError(
        "a producer with a given producer_id needs queue or sharding keys: a repetition must send to the same queues"
    )


def nothing_stored(error: SendError, total: int) -> BatchSendError:
    """The error of a batch that failed before its first run."""
    return BatchSendError(error, acks=[], stored=0, unknown=0, total=total, stored_prefix=0)


def shard(sharding_key: str, queues: int) -> int:
    """The queue for a sharding key: as RocketMQ's hash selector, so that programs of both kinds agree."""
    return abs(java_string_hash(sharding_key)) % queues


MAX_LINGER_MS: Final = 1_000
MAX_RETRIES: Final = 1_000
OnDelivery = Callable[[BaseException | None, SendResult | None], object]
"""Called with ``(error, result)`` once a message has its outcome; one of both is None."""


@dataclass(frozen=True)
class ExactlyOnce:
    """The delivery of an idempotent producer: ``Producer(delivery=ExactlyOnce())``; see :class:`Producer`.

    With ``ExactlyOnce("import-7", epoch=0)`` a program can repeat itself after its own death. The ``producer_id`` (1 to
    64 letters, digits and ``._-/@+=``) outlives its producer. The producer numbers the messages of each queue from 0,
    in the order of sending. The node does not store a message with the id, epoch, queue and number of a stored one; its
    result has ``duplicate`` set and the place of the stored one. So a new producer, anywhere, repeats a failed attempt:
    it sends the same messages in the same order to the same queues, and may cut them into other batches. Two attempts
    at the same time store each message once. Every send needs its queue then: ``queue``, or sharding keys while the
    number of queues stays. A higher epoch begins at 0 again, and the node refuses the sends of lower epochs
    (ProducerFencedError). After a send of unknown outcome such a producer refuses all further sends; its successor
    repeats all messages. An id belongs to one sender: several senders at the same time must send the very same
    messages.

    Raises ValueError for an epoch without an id.
    """

    producer_id: str | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.producer_id is None and self.epoch:
            raise ValueError("an epoch needs a producer_id: without one the producer counts epochs by itself")


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


class MessageOptions(RequestOptions, total=False):
    """The arguments beside the body of one message; see :meth:`Producer.send`."""

    delay: float | timedelta | None
    delay_level: int | None
    deliver_at: datetime | int | None


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

    half: SystemProperties


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


class AnyFuture(Protocol):
    """A future, of a thread or of a loop."""

    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> SendResult: ...


def tell_delivery(on_delivery: OnDelivery, sent: AnyFuture) -> None:
    """Call ``on_delivery`` with the outcome of ``sent``, which is done."""
    if not sent.cancelled():
        error = sent.exception()
        if error is None:
            on_delivery(None, sent.result())
        else:
            on_delivery(error, None)


def cancel_fields(receipt: SendResult | str) -> dict[str, Any]:
    """The header without its id. Raises InvalidMessageError for what is no receipt of such a message."""
    from commitmq.semantics.timer import TIMER_TOPIC, RecallHandle

    which: dict[str, Any]
    if isinstance(receipt, SendResult):
        if receipt.stored_topic != TIMER_TOPIC:
            raise InvalidMessageError(
                "only a message that was sent with delay or deliver_at, and waits, can be cancelled"
            )
        topic, unique_id = receipt.topic, receipt.unique_id
        which = {"physical_offset": receipt.physical_offset, "unique_id": unique_id}
    elif isinstance(receipt, str):
        handle = RecallHandle.decode(receipt)
        topic, unique_id = handle.topic, handle.unique_key
        which = {"handle": receipt}
    else:
        raise InvalidMessageError(f"a receipt is a SendResult or a recall handle, not {type(receipt).__name__}")
    return {
        "v": wire.PROTOCOL_VERSION,
        "op": "recall",
        "topic": topic,
        "queue": 0,
        "ack": "flushed",
        "properties": {Property.UNIQUE_KEY: unique_id},
        **which,
    }
