"""A message: what a producer sends and a consumer gets; and the checks a client can make before it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NoReturn

from commitmq.client.handling.consume_result import RetryLater
from commitmq.errors import CommitMQError, InvalidMessageError, UndecodableBodyError
from commitmq.format.compression import decompress
from commitmq.format.constants import (
    CRC_PROPERTY_BYTES,
    LMQ_PREFIX,
    MAX_PROPERTIES_BYTES,
    MULTI_DISPATCH_SEPARATOR,
    Property,
    SysFlag,
)
from commitmq.format.properties import decode_properties
from commitmq.store.metadata.topic_name import is_send_forbidden, validate_topic

if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

Keys = str | Iterable[str]

# What the node needs of the properties' 32,767 bytes: the CRC slot and the names it puts itself (cluster, region,
# trace).
RESERVED_PROPERTIES_BYTES: Final = CRC_PROPERTY_BYTES

# Marks that turn a message into a delayed one, a half message, a timer or an inner batch. The node refuses them on a plain
# send, and with them the whole run, so a message must not get that far.
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
# What nodes and clients of RocketMQ put beside the sender's own properties (its MessageConst), with no meaning for whoever
# sends the message again.
_OF_THE_SYSTEM: Final = frozenset(
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
# The node takes a whole sector of zeros for one that never reached the disk.
_ZEROS: Final = "\0" * 512


class Message:
    """One message.

    To be sent: ``body`` and optionally ``tags``, ``keys``, ``properties``, ``sharding_key``, ``flag`` (the
    application's 32-bit number); ``key`` is message key and sharding key in one. Received ones also know their place:
    ``topic``, ``queue_id``, ``queue_offset``, ``physical_offset``, the two time stamps in milliseconds, ``sys_flag`` and
    ``reconsume_times``; a message made for sending has -1 and "" there.

    The body of a received message is decompressed. Where that is not possible (the node does not look into bodies, so a
    sender may say "compressed" of anything) ``damage`` says why, ``raw_body`` has the bytes as stored, and ``body`` raises
    UndecodableBodyError; of every other message ``damage`` is None and ``raw_body`` is the body.
    """

    __slots__ = (
        "_origin_topic",
        "_properties",
        "_raw_properties",
        "_store_host",
        "_stored_topic",
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
    _stored_topic: str

    def __init__(
        self,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Keys | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        key: str | None = None,
        flag: int = 0,
    ) -> None:
        """Raises InvalidMessageError for what no message can hold."""
        if key is not None:
            keys, sharding_key = both_keys(key, keys, sharding_key)
        self.body = self._check_body(body)
        self.topic = ""
        self.flag = check_flag(flag)
        self.queue_id = self.queue_offset = self.physical_offset = -1
        self.store_timestamp = self.born_timestamp = -1
        self.sys_flag = self.reconsume_times = 0
        self._store_host = b""
        self._raw_properties: bytes | None = None
        self._properties: dict[str, str] | None = build_properties(tags, keys, properties, sharding_key)

    @staticmethod
    def _check_body(body: bytes) -> bytes:
        return check_body(body)

    @property
    def damage(self) -> str | None:
        """Why the body of a received message cannot be decoded; None for all others."""
        return None

    @property
    def is_tombstone(self) -> bool:
        """Whether its body is empty: where only the newest message of a key counts, there is none of this key any more."""
        return not self.raw_body

    @property
    def raw_body(self) -> bytes:
        """The body, as stored where it cannot be decoded."""
        return self.body

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
    def user_properties(self) -> dict[str, str]:
        """The sender's own properties: all but those with a meaning to RocketMQ's or our nodes and clients (tags, keys,
        sharding key and ids among them), so that ``send(…, properties=message.user_properties)`` is possible.
        """
        return user_properties(self.properties)

    @property
    def origin_topic(self) -> str:
        """The topic it was sent to: another than ``topic`` when it was read through a light message queue (LMQ)."""
        # Unset in all other messages: storing it in each would cost every consumer.
        return getattr(self, "_origin_topic", self.topic)

    @property
    def stored_topic(self) -> str:
        """The topic it was read from: ``%RETRY%group`` when a handler gets a message again, whose ``topic`` is the first
        one.
        """
        return getattr(self, "_stored_topic", self.topic)  # unset as _origin_topic

    def retry_later(self, delay: float | timedelta) -> NoReturn:
        """End this handler of :meth:`commitmq.Consumer.run`: the message comes again after ``delay``, seconds or a timedelta.

        Raises :class:`commitmq.RetryLater`, so nothing behind it is done; an ``except Exception`` around it would stop it.
        """
        raise RetryLater(delay)

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
        """Plain values for JSON; the body is ``body`` where it is UTF-8 text, else ``body_base64``. One without a body also
        has ``tombstone``: true.
        """
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
        if self.damage is not None:
            result["damage"] = self.damage
            result["raw_body_base64"] = base64.b64encode(self.raw_body).decode("ascii")
            return result
        if self.is_tombstone:
            result["tombstone"] = True
        try:
            result["body"] = self.body.decode()
        except UnicodeDecodeError:
            result["body_base64"] = base64.b64encode(self.body).decode("ascii")
        return result

    def __repr__(self) -> str:
        place = f"{self.topic}/{self.queue_id}@{self.queue_offset}, " if self.topic else ""
        damage = "" if self.damage is None else ", cannot be decoded"
        return f"Message({place}{len(self.raw_body)} bytes, tags={self.tags!r}, keys={self.keys!r}{damage})"


class Tombstone(Message):
    """A message without a body: where only the newest message of a key counts, it says that ``key`` has none any more.

    ``key`` is its message key and its sharding key, so it goes to the queue of the messages that were sent with that key and
    comes behind them. ``commitmq pipeline compact`` leaves the key out. Everything else refuses an empty body, as
    RocketMQ's clients do: it is mostly a mistake.
    """

    __slots__ = ()

    def __init__(
        self,
        key: str | None = None,
        *,
        tags: str | None = None,
        keys: Keys | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        flag: int = 0,
    ) -> None:
        """``keys`` and ``sharding_key`` are for those that differ, instead of ``key``.

        Raises InvalidMessageError for what no message can hold, and without any key.
        """
        if key is None and not keys:
            raise InvalidMessageError("a tombstone needs the key that it is about")
        super().__init__(
            b"", tags=tags, keys=keys, properties=properties, sharding_key=sharding_key, key=key, flag=flag
        )

    @staticmethod
    def _check_body(body: bytes) -> bytes:
        return body


class _UndecodableMessage(Message):
    """A received message whose body is not what its sysFlag says."""

    __slots__ = ("_damage", "_raw_body")

    _damage: str
    _raw_body: bytes

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For pickle and copy, which would ask for the body."""
        names = [*Message.__slots__, *_UndecodableMessage.__slots__]
        return None, {name: getattr(self, name) for name in names if name != "body" and hasattr(self, name)}

    @property
    def body(self) -> bytes:  # type: ignore[override]
        place = f"{self.topic}/{self.queue_id}@{self.queue_offset}"
        raise UndecodableBodyError(f"message {place} has a body that cannot be decoded: {self._damage}; see raw_body")

    @property
    def damage(self) -> str:
        return self._damage

    @property
    def raw_body(self) -> bytes:
        return self._raw_body


def user_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Those of ``properties`` that are the sender's own; see :attr:`Message.user_properties`."""
    return {name: value for name, value in properties.items() if name not in _OF_THE_SYSTEM}


def decode_body(body: bytes, sys_flag: int) -> bytes | UndecodableBodyError:
    """The original of a stored ``body``, or why there is none."""
    try:
        return decompress(body, sys_flag)
    except CommitMQError as error:
        return UndecodableBodyError(str(error))


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
    decoded: bytes | UndecodableBodyError | None = None,
) -> Message:
    """A message as it came from a node. ``body`` is as stored, ``decoded`` what :func:`decode_body` made of it if that is
    known; ``store_host`` is 8 or 20 bytes.
    """
    if not sys_flag & SysFlag.COMPRESSED:
        message = _new(Message)
        message.body = body
    else:
        message = _compressed(body, decode_body(body, sys_flag) if decoded is None else decoded)
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
    return message


def _compressed(body: bytes, decoded: bytes | UndecodableBodyError) -> Message:
    if isinstance(decoded, bytes):
        message = _new(Message)
        message.body = decoded
        return message
    damaged = _UndecodableMessage.__new__(_UndecodableMessage)
    damaged._damage, damaged._raw_body = str(decoded), body
    return damaged


_new = Message.__new__


def check_body(body: bytes) -> bytes:
    """``body`` as bytes. Raises InvalidMessageError for another type or an empty one (spec 2.7: client body check)."""
    if type(body) is not bytes:
        if not isinstance(body, bytes | bytearray | memoryview):
            raise InvalidMessageError(f"a body must be bytes, not {type(body).__name__}; encode text with .encode()")
        body = bytes(body)
    if not body:
        raise InvalidMessageError(
            "the body is empty; a message needs at least one byte (for one that deletes its key send a Tombstone)"
        )
    return body


def content_of(message: Message) -> tuple[bytes, dict[str, str], int]:
    """Body, properties and flag of a message to be sent, checked again: an object can be changed once it is made.

    The body may be empty in a Tombstone and in a message that was received so. Raises InvalidMessageError.
    """
    body = message.body
    if type(body) is not bytes or (not body and message.queue_offset < 0 and not isinstance(message, Tombstone)):
        body = check_body(body)
    return body, sendable(message.properties), check_flag(message.flag)


def both_keys(key: str, keys: Keys | None, sharding_key: str | None) -> tuple[Keys | None, str | None]:
    """``keys`` and ``sharding_key`` of a message with ``key``. Raises InvalidMessageError when they are given beside it."""
    if keys is not None or sharding_key is not None:
        raise InvalidMessageError("key is keys and sharding_key in one: give either it or them")
    return [key], key


def check_alone(
    tags: object, keys: object, properties: object, sharding_key: object, key: object = None, flag: object = 0
) -> None:
    """Raise InvalidMessageError when something is given beside a Message that it has itself."""
    given = {"tags": tags, "keys": keys, "properties": properties, "sharding_key": sharding_key, "key": key}
    beside = [name for name, value in given.items() if value is not None] + (["flag"] if flag else [])
    if beside:
        raise InvalidMessageError(
            f"a Message carries its own tags, keys, properties, sharding key and flag: do not give {', '.join(beside)} beside"
        )


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
    try:
        several = list(keys)
    except TypeError:
        raise InvalidMessageError(f"keys must be a string or a list of strings, not {type(keys).__name__}") from None
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
        Property.CRC32,
    )
)


def sendable(properties: dict[str, str]) -> dict[str, str]:
    """A copy of a message's properties without what the client makes for each send.

    A message that was received and is sent again is a new one, with a unique id of its own, and goes to no further
    queues by itself. Raises InvalidMessageError for what the node would refuse, and with it the messages of the same run.
    """
    result = {}
    size_bytes = 0
    for name, value in properties.items():
        if name in _NOT_SENT_AGAIN:
            continue
        if name in _MARKS:
            raise InvalidMessageError(
                f"property {name!r} has a meaning of its own: {_MARKS[name]}; user_properties leaves such ones out"
            )
        # (A received message may have a zero byte in a value, which is no mistake there.)
        if type(value) is str and "\0" in value and _ZEROS not in value:
            _check_text(f"property {name!r}", value.replace("\0", " "))
        else:
            _check_text(f"property {name!r}", value)
        _check_text("a property's name", name)
        size_bytes += len(name.encode()) + len(value.encode()) + 2
        result[name] = value
    if result:
        check_properties_size(size_bytes)
    return result
