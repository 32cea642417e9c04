"""A message as pages and JSON show it: a row of a list, or whole. Bodies and properties are text, never markup."""

from __future__ import annotations

import codecs
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from commitmq.client.message import Message

PREVIEW_BYTES: Final = 200
BODY_BYTES: Final = 64 * 1024
_HEX_BYTES: Final = 4 * 1024
_PRETTY_BYTES: Final = 4 * BODY_BYTES
_MOST_KEYS: Final = 20
_KEY_LENGTH: Final = 200


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list. ``preview`` is the beginning of its body; ``is_text`` false when that is hexadecimal."""

    topic: str
    queue: int
    offset: int
    message_id: str | None
    unique_id: str | None
    tag: str | None
    keys: list[str]
    store_ms: int
    born_ms: int
    size: int
    preview: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class WholeMessage:
    """All of one message; of its body 64 KiB at most. ``body_form``: json, text or hex. ``damage``: why it cannot be
    decoded.
    """

    row: MessageRow
    physical_offset: int
    sys_flag: int
    flag: int
    reconsume_times: int
    origin_topic: str
    properties: dict[str, str]
    body: str
    body_form: str
    body_bytes: int
    body_is_cut: bool
    damage: str | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter: what is None does not count."""

    tag: str | None = None
    key: str | None = None
    text: str | None = None

    @property
    def is_filter(self) -> bool:
        return bool(self.tag or self.key or self.text)

    def fits(self, message: Message) -> bool:
        """Whether all that is given holds."""
        if self.tag and message.tags != self.tag:
            return False
        if self.key and self.key not in message.keys:
            return False
        if not self.text:
            return True
        return self.text.encode() in body_of(message) or any(
            self.text in one for pair in message.properties.items() for one in pair
        )


def body_of(message: Message) -> bytes:
    """The decoded body; the stored bytes of one that cannot be decoded."""
    return message.raw_body if message.damage is not None else message.body


def row_of(message: Message) -> MessageRow:
    """The row of a message."""
    body = body_of(message)
    text = _text(body, PREVIEW_BYTES)
    return MessageRow(
        message.topic,
        message.queue_id,
        message.queue_offset,
        message.msg_id,
        message.unique_id,
        message.tags,
        [one[:_KEY_LENGTH] for one in message.keys[:_MOST_KEYS]],
        message.store_timestamp,
        message.born_timestamp,
        len(body),
        body[:PREVIEW_BYTES].hex(" ") if text is None else text,
        text is not None,
    )


def whole(message: Message) -> WholeMessage:
    """All of a message."""
    body = body_of(message)
    shown, form = _shown(body)
    return WholeMessage(
        row_of(message),
        message.physical_offset,
        message.sys_flag,
        message.flag,
        message.reconsume_times,
        message.origin_topic,
        message.properties,
        shown,
        form,
        len(body),
        len(body) > (_HEX_BYTES if form == "hex" else BODY_BYTES),
        message.damage,
    )


def _shown(body: bytes) -> tuple[str, str]:
    text = _text(body, BODY_BYTES)
    if text is None:
        return body[:_HEX_BYTES].hex(" "), "hex"
    if len(body) <= BODY_BYTES and text[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            return _pretty(json.loads(text)), "json"
    return text, "text"


def _pretty(value: object) -> str:
    """Indented JSON. Raises ValueError when that is far longer: deep nesting makes a short body a huge page."""
    parts, size = [], 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        parts.append(part)
        size += len(part)
        if size > _PRETTY_BYTES:
            raise ValueError("too long")
    return "".join(parts)


def _text(body: bytes, most: int) -> str | None:
    """The first ``most`` bytes as UTF-8, without a character that is cut there; None for other bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(body[:most], final=len(body) <= most)
    except UnicodeDecodeError:
        return None
