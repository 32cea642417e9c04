"""The arguments of a send, single or batch: their checks, and their form for the lane."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Final

import orjson

from commitmq.client.message import Message, check_alone, check_body, content_of
from commitmq.client.properties import Keys, build_properties
from commitmq.client.results import BatchSendError
from commitmq.errors import InvalidMessageError, SendError
from commitmq.format.java import java_string_hash

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
