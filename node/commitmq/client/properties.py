"""The properties of a message: how a client makes them, checks them and copies them for another send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import (
    CRC_PROPERTY_BYTES,
    LMQ_PREFIX,
    MAX_PROPERTIES_BYTES,
    MULTI_DISPATCH_SEPARATOR,
    Property,
)
from commitmq.store.metadata.topic_config import validate_topic

Keys = str | Iterable[str]

# The part of the properties' 32,767 bytes that the node fills itself: the CRC, and cluster, region and trace.
_RESERVED_BYTES: Final = CRC_PROPERTY_BYTES
_UNIQUE_ID_BYTES: Final = len(Property.UNIQUE_KEY) + 32 + 2

# Properties that turn a message into a delayed message, a half message, a timer message or an inner batch. On a plain send
# the node refuses a whole run because of one of them, so the client refuses the message before it joins a run.
_MARKS: Final = dict.fromkeys(
    (
        Property.DELAY,
        Property.TRANSACTION_PREPARED,
        Property.INNER_NUM,
        Property.INNER_BASE,
        Property.TIMER_DELAY_SECONDS,
        Property.TIMER_DELAY_MS,
        Property.TIMER_DELIVER_MS,
        "TIMER_OUT_MS",
        "TIMER_DEL_UNIQKEY",
    ),
    "a plain send must not set it",
)
_BY_PARAMETER: Final = {
    Property.TAGS: "give it as tags=",
    Property.KEYS: "give it as keys=",
    Property.SHARDING_KEY: "give it as sharding_key=",
    Property.UNIQUE_KEY: "the client makes it",
    Property.CRC32: "the node makes it",
    Property.PRODUCER_SEQUENCE: "an idempotent producer makes it",
    Property.INNER_MULTI_DISPATCH: "give the names as multi_dispatch=",
    Property.INNER_MULTI_QUEUE_OFFSET: "the node makes it",
    **_MARKS,
}
# The properties that RocketMQ's nodes and clients add to a message (its MessageConst). None of them is the sender's own.
_SYSTEM_PROPERTIES: Final = frozenset(
    (
        *_BY_PARAMETER,
        Property.WAIT,
        Property.RETRY_TOPIC,
        Property.REAL_TOPIC,
        Property.REAL_QUEUE_ID,
        Property.PRODUCER_GROUP,
        Property.CLUSTER,
        Property.REGION,
        Property.TRACE_ON,
        "MIN_OFFSET",
        "MAX_OFFSET",
        "BUYER_ID",
        "ORIGIN_MESSAGE_ID",
        "TRANSFER_FLAG",
        "CORRECTION_FLAG",
        "MQ2_FLAG",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "CONSUME_START_TIME",
        "EXTEND_UNIQ_INFO",
        "INSTANCE_ID",
        "CORRELATION_ID",
        "REPLY_TO_CLIENT",
        "PUSH_REPLY_TIME",
        "ARRIVE_TIME",
        "MSG_TYPE",
        "TTL",
        "DUP_INFO",
        "POP_CK",
        "POP_CK_OFFSET",
        "1ST_POP_TIME",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "TRANSACTION_CHECK_TIMES",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
    )
)
# The node takes a sector full of zeros for a sector that never reached the disk.
_ZERO_SECTOR: Final = "\0" * 512
# The client and the node make these again for each send.
_MADE_BY_SEND: Final = frozenset(
    (
        Property.UNIQUE_KEY,
        Property.INNER_MULTI_DISPATCH,
        Property.INNER_MULTI_QUEUE_OFFSET,
        Property.PRODUCER_SEQUENCE,
        Property.CRC32,
    )
)


def user_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """The sender's own among ``properties``; see :attr:`Message.user_properties`."""
    return {name: value for name, value in properties.items() if name not in _SYSTEM_PROPERTIES}


def both_keys(key: str, keys: Keys | None, sharding_key: str | None) -> tuple[Keys | None, str | None]:
    """``keys`` and ``sharding_key`` of a message with ``key``. Raises InvalidMessageError if one of them is given as well."""
    if keys is not None or sharding_key is not None:
        raise InvalidMessageError("key is keys and sharding_key in one: give either it or them")
    return [key], key


def join_keys(keys: Keys) -> str:
    """The value of the property ``KEYS``: the keys with a space between two. A string may hold several keys already.

    Raises InvalidMessageError for a list with a key that is empty or has a space in it.
    """
    if isinstance(keys, str):
        return keys
    try:
        several = list(keys)
    except TypeError:
        raise InvalidMessageError(f"keys must be a string or a list of strings, not {type(keys).__name__}") from None
    for key in several:
        if not isinstance(key, str) or not key or " " in key:
            raise InvalidMessageError(f"key {key!r} must be a string that is not empty and has no space")
    return " ".join(several)


def join_queue_names(names: Iterable[str]) -> str:
    """The value of the property ``INNER_MULTI_DISPATCH``: names of light message queues with a comma between two.

    Raises InvalidMessageError without a name, for a name of another kind, and for a name that comes twice.
    """
    several = [names] if isinstance(names, str) else list(names)
    for name in several:
        if not isinstance(name, str) or not name.startswith(LMQ_PREFIX) or name == LMQ_PREFIX:
            raise InvalidMessageError(f"{name!r} is no light message queue: its name must begin with {LMQ_PREFIX}")
        validate_topic(name)
    if not several or len(set(several)) != len(several):
        raise InvalidMessageError("multi_dispatch needs at least one name, and none of them twice")
    return MULTI_DISPATCH_SEPARATOR.join(several)


def build_properties(
    tags: str | None, keys: Keys | None, properties: Mapping[str, str] | None, sharding_key: str | None
) -> dict[str, str]:
    """The properties of a message to be sent, without its unique id. Raises InvalidMessageError."""
    result: dict[str, str] = {}
    if properties:
        for name, value in properties.items():
            if name in _BY_PARAMETER:
                raise InvalidMessageError(f"property {name!r} has a meaning of its own: {_BY_PARAMETER[name]}")
            _check_text("a property's name", name)
            _check_text(f"property {name!r}", value)
            result[name] = value
    if tags:
        result[Property.TAGS] = _check_text("tags", tags)
    if keys:
        joined = join_keys(keys)
        if joined:
            result[Property.KEYS] = _check_text("keys", joined)
    if sharding_key:
        result[Property.SHARDING_KEY] = _check_text("sharding_key", sharding_key)
    if result:
        check_properties_size(sum(len(name.encode()) + len(value.encode()) + 2 for name, value in result.items()))
    return result


def check_properties_size(size_bytes: int) -> None:
    """Raise InvalidMessageError if properties of ``size_bytes``, which is without the unique id, are too large to store."""
    limit = MAX_PROPERTIES_BYTES - _RESERVED_BYTES - _UNIQUE_ID_BYTES
    if size_bytes > limit:
        raise InvalidMessageError(
            f"the properties take {size_bytes} bytes, at most {limit} of {MAX_PROPERTIES_BYTES} are the sender's"
        )


def _check_text(what: str, text: str) -> str:
    if not isinstance(text, str):
        raise InvalidMessageError(f"{what} must be a string, not {type(text).__name__}")
    if not text:
        raise InvalidMessageError(f"{what} is empty; properties without a value cannot be stored")
    if "\x01" in text or "\x02" in text or "\x00" in text:
        raise InvalidMessageError(f"{what} contains the character 0x00, 0x01 or 0x02, which separate properties")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessageError(f"{what} is no valid Unicode: {error}") from error
    return text


def sendable(properties: dict[str, str]) -> dict[str, str]:
    """A copy of a message's properties without those that are recreated for each send.

    So a received message that is sent again gets a new unique id, and does not go to its light message queues again.
    Raises InvalidMessageError for a property because of which the node would refuse the whole run.
    """
    result = {}
    size_bytes = 0
    for name, value in properties.items():
        if name in _MADE_BY_SEND:
            continue
        if name in _MARKS:
            raise InvalidMessageError(
                f"property {name!r} has a meaning of its own: {_MARKS[name]}; user_properties leaves it out"
            )
        # RocketMQ stores zero bytes in a value, so a received message may have them. A whole sector of them is damage.
        if type(value) is str and "\0" in value and _ZERO_SECTOR not in value:
            _check_text(f"property {name!r}", value.replace("\0", " "))
        else:
            _check_text(f"property {name!r}", value)
        _check_text("a property's name", name)
        size_bytes += len(name.encode()) + len(value.encode()) + 2
        result[name] = value
    if result:
        check_properties_size(size_bytes)
    return result
