"""A message: what a producer sends and a consumer gets; and the checks a client can make before it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from commitmq.errors import InvalidMessageError
from commitmq.store.compression import decompress
from commitmq.store.format import (
    CRC_PROPERTY_BYTES,
    LMQ_PREFIX,
    MAX_PROPERTIES_BYTES,
    MULTI_DISPATCH_SEPARATOR,
    Property,
    SysFlag,
)
from commitmq.store.properties import decode_properties
from commitmq.store.topic_name import is_send_forbidden, validate_topic

if TYPE_CHECKING:
    from typing import Any

Keys = str | Iterable[str]

# What the node needs of the properties' 32,767 bytes: the CRC slot and the names it puts itself (cluster, region,
# trace).
RESERVED_PROPERTIES_BYTES: Final = CRC_PROPERTY_BYTES

_BY_PARAMETER: Final = {
    Property.TAGS: "give it as tags=",
    Property.KEYS: "give it as keys=",
    Property.SHARDING_KEY: "give it as sharding_key=",
    Property.UNIQUE_KEY: "the client makes it",
    Property.CRC32: "the node makes it",
    Property.PRODUCER_SEQUENCE: "an idempotent producer makes it",
    Property.INNER_MULTI_DISPATCH: "give the names as multi_dispatch=",
    # Marks that turn a message into a delayed one, a half message, a timer or an inner batch. The node refuses them on
    # a plain send, and with them the whole run, so a message must not get that far.
    **dict.fromkeys(
        (
            Property.DELAY,
            Property.TRANSACTION_PREPARED,
            Property.INNER_NUM,
            Property.INNER_BASE,
            Property.INNER_MULTI_QUEUE_OFFSET,
            Property.TIMER_DELAY_SECONDS,
            Property.TIMER_DELAY_MS,
            Property.TIMER_DELIVER_MS,
            "TIMER_OUT_MS",
            "TIMER_DEL_UNIQKEY",
        ),
        "a plain send must not set it",
    ),
}


class Message:
    """One message.

    To be sent: ``body`` and optionally ``tags``, ``keys``, ``properties``, ``sharding_key``, ``flag`` (the
    application's 32-bit number). Received ones also know their place: ``topic``, ``queue_id``, ``queue_offset``,
    ``physical_offset``, the two time stamps in milliseconds, ``sys_flag`` and ``reconsume_times``; a message made for
    sending has -1 and "" there. The body of a received message is decompressed.
    """

    __slots__ = (
        "_origin_topic",
        "_properties",
        "_raw_properties",
        "_store_host",
        "body",
        "born_timestamp",
        "flag",
        "physical_offset",
        "queue_id",
        "queue_offset",
        "reconsume_times",
        "store_timestamp",
        "sys_flag",
        "topic",
    )

    _origin_topic: str

    def __init__(
        self,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Keys | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        flag: int = 0,
    ) -> None:
        """Raises InvalidMessageError for what no message can hold."""
        self.body = check_body(body)
        self.topic = ""
        self.flag = check_flag(flag)
        self.queue_id = self.queue_offset = self.physical_offset = -1
        self.store_timestamp = self.born_timestamp = -1
        self.sys_flag = self.reconsume_times = 0
        self._store_host = b""
        self._raw_properties: bytes | None = None
        self._properties: dict[str, str] | None = build_properties(tags, keys, properties, sharding_key)

    @property
    def properties(self) -> dict[str, str]:
        """All properties by name, decoded at first use."""
        properties = self._properties
        if properties is None:
            properties = self._properties = decode_properties(self._raw_properties or b"")
            properties.pop(Property.CRC32, None)
            self._raw_properties = None
        return properties

    @property
    def origin_topic(self) -> str:
        """The topic it was sent to: another than ``topic`` when it was read through a light message queue (LMQ)."""
        # Unset in all other messages: storing it in each would cost every consumer.
        return getattr(self, "_origin_topic", self.topic)

    @property
    def tags(self) -> str | None:
        return self.properties.get(Property.TAGS)

    @property
    def keys(self) -> list[str]:
        """The business keys; none is an empty list."""
        return self.properties.get(Property.KEYS, "").split()

    @property
    def sharding_key(self) -> str | None:
        return self.properties.get(Property.SHARDING_KEY)

    @property
    def unique_id(self) -> str | None:
        """The id its producer made."""
        return self.properties.get(Property.UNIQUE_KEY)

    @property
    def msg_id(self) -> str | None:
        """The offset message id, which names the place in the node's log (spec 2.10); None before it was stored."""
        if not self._store_host:
            return None
        return f"{self._store_host.hex().upper()}{self.physical_offset:016X}"

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; the body is ``body`` where it is UTF-8 text, else ``body_base64``."""
        import base64

        result: dict[str, Any] = {
            "topic": self.topic,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "physical_offset": self.physical_offset,
            "msg_id": self.msg_id,
            "born_timestamp": self.born_timestamp,
            "store_timestamp": self.store_timestamp,
            "sys_flag": self.sys_flag,
            "flag": self.flag,
            "reconsume_times": self.reconsume_times,
            "tags": self.tags,
            "keys": self.keys,
            "properties": self.properties,
        }
        try:
            result["body"] = self.body.decode()
        except UnicodeDecodeError:
            result["body_base64"] = base64.b64encode(self.body).decode("ascii")
        return result

    def __repr__(self) -> str:
        place = f"{self.topic}/{self.queue_id}@{self.queue_offset}, " if self.topic else ""
        return f"Message({place}{len(self.body)} bytes, tags={self.tags!r}, keys={self.keys!r})"


def received(
    topic: str,
    queue_id: int,
    queue_offset: int,
    physical_offset: int,
    store_timestamp: int,
    born_timestamp: int,
    sys_flag: int,
    flag: int,
    reconsume_times: int,
    store_host: bytes,
    raw_properties: bytes,
    body: bytes,
) -> Message:
    """A message as it came from a node. ``body`` is as stored; ``store_host`` is 8 or 20 bytes."""
    message = _new(Message)
    message.topic = topic
    message.queue_id = queue_id
    message.queue_offset = queue_offset
    message.physical_offset = physical_offset
    message.store_timestamp = store_timestamp
    message.born_timestamp = born_timestamp
    message.sys_flag = sys_flag
    message.flag = flag
    message.reconsume_times = reconsume_times
    message._store_host = store_host
    message._raw_properties = raw_properties
    message._properties = None
    message.body = body if not sys_flag & SysFlag.COMPRESSED else decompress(body, sys_flag)
    return message


_new = Message.__new__


def check_body(body: bytes) -> bytes:
    """``body`` as bytes. Raises InvalidMessageError for another type or an empty one (spec 2.7: client body check)."""
    if type(body) is not bytes:
        if not isinstance(body, bytes | bytearray | memoryview):
            raise InvalidMessageError(f"a body must be bytes, not {type(body).__name__}; encode text with .encode()")
        body = bytes(body)
    if not body:
        raise InvalidMessageError("the body is empty; a message needs at least one byte")
    return body


@lru_cache(maxsize=1024)
def check_topic(topic: str) -> str:
    """``topic`` itself if messages can be sent to it; raises InvalidMessageError."""
    if not isinstance(topic, str):
        raise InvalidMessageError(f"a topic must be a string, not {type(topic).__name__}")
    validate_topic(topic)
    if is_send_forbidden(topic):
        raise InvalidMessageError(f"topic {topic!r} is the node's own; nothing can be sent to it")
    return topic


def check_flag(flag: int) -> int:
    """``flag`` itself if it fits the record's signed 32 bits; raises InvalidMessageError."""
    if type(flag) is not int or not -(1 << 31) <= flag < 1 << 31:
        raise InvalidMessageError(f"flag {flag!r} is no signed 32-bit integer")
    return flag


def join_keys(keys: Keys) -> str:
    """``KEYS`` as stored: separated by one space. A string is taken as one key or several with spaces between.

    Raises InvalidMessageError for an empty key or one with a space in it when several are given.
    """
    if isinstance(keys, str):
        return keys
    several = list(keys)
    for key in several:
        if not isinstance(key, str) or not key or " " in key:
            raise InvalidMessageError(f"key {key!r} must be a string that is not empty and has no space")
    return " ".join(several)


def join_queue_names(names: Iterable[str]) -> str:
    """``INNER_MULTI_DISPATCH`` as stored: names of light message queues, separated by a comma.

    Raises InvalidMessageError for none, for one that is no LMQ's name, and for one that comes twice.
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
    """Raise InvalidMessageError when properties of ``size_bytes`` (without the unique id) cannot be stored."""
    limit = MAX_PROPERTIES_BYTES - RESERVED_PROPERTIES_BYTES - _UNIQUE_PROPERTY_BYTES
    if size_bytes > limit:
        raise InvalidMessageError(
            f"the properties take {size_bytes} bytes, at most {limit} of {MAX_PROPERTIES_BYTES} are the sender's"
        )


_UNIQUE_PROPERTY_BYTES: Final = len(Property.UNIQUE_KEY) + 32 + 2


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


_NOT_SENT_AGAIN: Final = frozenset(
    (
        Property.UNIQUE_KEY,
        Property.INNER_MULTI_DISPATCH,
        Property.INNER_MULTI_QUEUE_OFFSET,
        Property.PRODUCER_SEQUENCE,
    )
)


def sendable(properties: dict[str, str]) -> dict[str, str]:
    """A copy of a message's properties without what the client makes for each send.

    A message that was received and is sent again is a new one, with a unique id of its own, and goes to no further
    queues by itself.
    """
    return {name: value for name, value in properties.items() if name not in _NOT_SENT_AGAIN}
