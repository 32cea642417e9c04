"""A message, which a producer sends and a consumer gets, and the checks that a client makes before it sends one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

from commitmq.client.handling.consume_result import RetryLater
from commitmq.client.properties import Keys, both_keys, build_properties, sendable, user_properties
from commitmq.client.requesting import replier
from commitmq.client.sharing.receipt import Receipt, settler_of
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.properties import decode_properties
from commitmq.store.metadata.topic_config import is_send_forbidden, validate_topic

if TYPE_CHECKING:
    from datetime import timedelta

    from commitmq.client.results import SendResult


_ARGUMENTS: Final = ("tags", "keys", "properties", "sharding_key", "key", "flag")
"""Those of a send that a message carries itself."""


class Message:
    """One message.

    A program that sends gives ``body`` and optionally ``tags``, ``keys``, ``properties``, ``sharding_key`` and ``flag`` (the
    application's 32-bit number). ``key`` is message key and sharding key in one.

    A received message also has its place and its history: ``topic``, ``queue_id``, ``queue_offset``, ``physical_offset``,
    ``born_timestamp`` and ``store_timestamp`` (both in milliseconds), ``sys_flag`` and ``reconsume_times``. A message that was
    made for sending has "" as its topic, 0 as its last two, and -1 in the others.

    The client decompresses the body of a received message. The node does not look into bodies, so a message may be marked as
    compressed although it is not. Then ``damage`` says why the body cannot be decoded, ``raw_body`` has the stored bytes, and
    ``body`` raises UndecodableBodyError. In every other message ``damage`` is None and ``raw_body`` is the body.
    """

    __slots__ = (
        "_origin_topic",
        "_properties",
        "_raw_properties",
        "_receipt",
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
    _receipt: Receipt
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
        """Raises InvalidMessageError for a value that a message cannot hold."""
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

    @classmethod
    def of(cls, body: bytes | Message, fields: Mapping[str, Any]) -> Message:
        """The message that a send of ``body`` with the arguments ``fields`` stores; ``body`` itself, if it is a message.

        Raises InvalidMessageError, also for a message with arguments that it carries itself.
        """
        own = {name: fields[name] for name in _ARGUMENTS if fields.get(name) is not None}
        if isinstance(body, Message):
            check_alone(**own)
            return body
        return Message(body, **own)

    @staticmethod
    def _check_body(body: bytes) -> bytes:
        return check_body(body)

    @property
    def damage(self) -> str | None:
        """Why the body of a received message cannot be decoded; None for all others."""
        return None

    @property
    def is_tombstone(self) -> bool:
        """Whether the body is empty. In a compacted topic such a message deletes its key."""
        return not self.raw_body

    @property
    def raw_body(self) -> bytes:
        """The body; the stored bytes if they cannot be decoded."""
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
        """The sender's own properties, which ``send(…, properties=message.user_properties)`` accepts.

        Properties with a meaning to RocketMQ's or CommitMQ's nodes and clients are omitted: tags, keys, sharding key,
        ids and others.
        """
        return user_properties(self.properties)

    @property
    def origin_topic(self) -> str:
        """The topic that the message was sent to. It differs from ``topic`` in a message of a light message queue (LMQ)."""
        # Only messages of an LMQ have the attribute: to set it in all messages would cost every consumer time.
        return getattr(self, "_origin_topic", self.topic)

    @property
    def stored_topic(self) -> str:
        """The topic it was read from: ``%RETRY%group`` when a handler gets a message again, whose ``topic`` is the first
        one.
        """
        return getattr(self, "_stored_topic", self.topic)  # unset as _origin_topic

    def retry_later(self, delay: float | timedelta) -> NoReturn:
        """End this handler of :meth:`commitmq.Consumer.run`: the message comes again after ``delay``, seconds or a timedelta.

        Raises :class:`commitmq.RetryLater`, which tells more, so nothing behind it is done; an ``except Exception`` around it
        would stop it.
        """
        raise RetryLater(delay)

    def reply(self, body: bytes | Message, *, properties: Mapping[str, str] | None = None) -> SendResult:
        """In a handler of ``run``: reply to a request. See :meth:`commitmq.Producer.reply`, which works everywhere."""
        result: SendResult = replier.current().reply(self, body, properties)
        return result

    async def reply_async(self, body: bytes | Message, *, properties: Mapping[str, str] | None = None) -> SendResult:
        """:meth:`reply` in a handler that is a coroutine function."""
        result: SendResult = await replier.current().reply_async(self, body, properties)
        return result

    def ack(self) -> bool:
        """Acknowledge a message of a :class:`commitmq.ShareConsumer`. False when it came too late: see its ``ack``."""
        return not settler_of(self).ack(self)

    def nack(self, delay: float | timedelta | None = None) -> bool:
        """Give a message of a :class:`commitmq.ShareConsumer` back to its group. False when it came too late.

        None or 0: it comes at once. Another ``delay`` is rounded up to the node's shortest, 2 s.
        """
        return not settler_of(self).nack(self, delay)

    def extend(self, invisible_s: float | None = None) -> bool:
        """Keep a message of a :class:`commitmq.ShareConsumer` invisible for longer. False when it came too late."""
        return not settler_of(self).extend(self, invisible_s)

    @property
    def tags(self) -> str | None:
        return self.properties.get(Property.TAGS)

    @property
    def keys(self) -> list[str]:
        """The message keys; an empty list without any."""
        return self.properties.get(Property.KEYS, "").split()

    @property
    def sharding_key(self) -> str | None:
        return self.properties.get(Property.SHARDING_KEY)

    @property
    def unique_id(self) -> str | None:
        """The id that the producer gave to the message."""
        return self.properties.get(Property.UNIQUE_KEY)

    @property
    def msg_id(self) -> str | None:
        """The offset message id, which names the node and the physical offset (spec 2.10); None in an unsent message."""
        if not self._store_host:
            return None
        return f"{self._store_host.hex().upper()}{self.physical_offset:016X}"

    def to_json(self) -> dict[str, Any]:
        """The message as plain values for JSON.

        A body that is UTF-8 text is in ``body``, another one in ``body_base64``. A message without a body also has
        ``tombstone``: true. A message with a body that cannot be decoded has ``damage`` and ``raw_body_base64`` instead.
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
    """A message without a body, which deletes ``key`` from a compacted topic: ``commitmq pipeline compact`` drops the key.

    ``key`` is the message key and the sharding key. So the tombstone goes to the queue of the messages that were sent with
    this key, and lies behind them. An empty body in any other message is refused, as by RocketMQ's clients, because it is
    mostly a mistake.
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
        """Give ``keys`` and ``sharding_key`` instead of ``key`` when the two differ.

        Raises InvalidMessageError without any key, and for a value that a message cannot hold.
        """
        if key is None and not keys:
            raise InvalidMessageError("a tombstone needs the key that it deletes")
        super().__init__(
            b"", tags=tags, keys=keys, properties=properties, sharding_key=sharding_key, key=key, flag=flag
        )

    @staticmethod
    def _check_body(body: bytes) -> bytes:
        return body


def check_body(body: bytes) -> bytes:
    """``body`` as bytes. Raises InvalidMessageError for an empty body and for another type (spec 2.7: client body check)."""
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
    """Body, properties and flag of a message to be sent. Raises InvalidMessageError.

    The values are checked again, because a program can change a message after its constructor checked it. A Tombstone and a
    received message may have an empty body.
    """
    body = message.body
    if type(body) is not bytes or (not body and message.queue_offset < 0 and not isinstance(message, Tombstone)):
        body = check_body(body)
    return body, sendable(message.properties), check_flag(message.flag)


def check_alone(
    tags: object = None,
    keys: object = None,
    properties: object = None,
    sharding_key: object = None,
    key: object = None,
    flag: object = 0,
) -> None:
    """Raise InvalidMessageError if an argument beside a Message is one of the values that the Message carries itself."""
    given = {"tags": tags, "keys": keys, "properties": properties, "sharding_key": sharding_key, "key": key}
    beside = [name for name, value in given.items() if value is not None] + (["flag"] if flag else [])
    if beside:
        raise InvalidMessageError(
            f"a Message carries its own tags, keys, properties, sharding key and flag: do not give {', '.join(beside)} beside"
        )


@lru_cache(maxsize=1024)
def check_topic(topic: str) -> str:
    """``topic`` itself. Raises InvalidMessageError if it is no topic that a client may send to."""
    if not isinstance(topic, str):
        raise InvalidMessageError(f"a topic must be a string, not {type(topic).__name__}")
    validate_topic(topic)
    if is_send_forbidden(topic):
        raise InvalidMessageError(f"topic {topic!r} is the node's own; nothing can be sent to it")
    return topic


def check_flag(flag: int) -> int:
    """``flag`` itself. Raises InvalidMessageError unless it fits the record's signed 32 bits."""
    if type(flag) is not int or not -(1 << 31) <= flag < 1 << 31:
        raise InvalidMessageError(f"flag {flag!r} is no signed 32-bit integer")
    return flag
