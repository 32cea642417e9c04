"""A message as a consumer gets it: made from the stored fields, with the body decompressed if that is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commitmq.client.message import Message
from commitmq.errors import CommitMQError, UndecodableBodyError
from commitmq.format.compression import decompress
from commitmq.format.constants import SysFlag

if TYPE_CHECKING:
    from typing import Any


class _UndecodableMessage(Message):
    """A received message whose body cannot be decompressed as its sysFlag says."""

    __slots__ = ("_damage", "_raw_body")

    _damage: str
    _raw_body: bytes

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For pickle and copy, which would otherwise read ``body``, and that raises."""
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


def decode_body(body: bytes, sys_flag: int) -> bytes | UndecodableBodyError:
    """The decompressed ``body``, or the error that says why it cannot be decompressed."""
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
    """A received message.

    ``body`` has the stored bytes. ``decoded`` is the result of :func:`decode_body` if a caller has it already. ``store_host``
    has 8 or 20 bytes.
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
