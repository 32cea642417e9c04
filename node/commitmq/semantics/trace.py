"""Message trace: the records in the body of a message of the trace topic (remoting 6.10).

Fields are separated by 0x01, each record ends with 0x02, a missing text is ``null``:

    Pub             timestamp region group topic msgId tags keys storeHost bodyLength cost msgType offsetMsgId success
                    (older clients leave offsetMsgId out, the Go client adds its host)
    SubBefore       timestamp region group requestId msgId retryTimes keys
    SubAfter        requestId msgId cost success keys contextCode timestamp group
                    (clients of the cloud leave the last two out, old ones contextCode too)
    EndTransaction  timestamp region group topic msgId tags keys storeHost msgType transactionId state fromCheck
    Recall          timestamp region group topic msgId success

A trace message has the message ids and keys of its records as KEYS: that is how a trace is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, Final

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import KEY_SEPARATOR
from commitmq.format.java import hash_map_order

TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
MAX_BODY_BYTES: Final = 128_000
MAX_RECORDS: Final = 10
"""RocketMQ's client puts at most this many records of one topic and region into a message."""
_FIELD, _END = "\x01", "\x02"
_NULL: Final = "null"


class MessageType(IntEnum):
    """msgType of a trace record."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeReturnType(IntEnum):
    """contextCode of a SubAfter record."""

    SUCCESS = 0
    TIMEOUT = 1
    EXCEPTION = 2
    NULL = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceRecord:
    """Fields in their stored order; a text that is None is stored as ``null``."""

    kind: ClassVar[str] = ""
    least: ClassVar[int] = 0
    """How many fields a record has at least; the rest keeps its default."""

    def encode(self) -> str:
        """The record's text, with its end mark. Raises InvalidMessageError when a field has one of the separators."""
        values = [getattr(self, one.name) for one in fields(self)]
        if fields(self)[-1].name == "client_host" and values[-1] is None:
            values.pop()  # Java's client has no such field
        texts = [_text(value) for value in values]
        if any(_FIELD in text or _END in text for text in texts):
            raise InvalidMessageError("a text of a trace record has 0x01 or 0x02, which separate fields and records")
        return _FIELD.join([self.kind, *texts]) + _END

    @classmethod
    def parse(cls, parts: list[str]) -> Any:
        """The record of the fields ``parts``, kind excluded. Raises ValueError for too few, or a field of no sense."""
        if len(parts) < cls.least:
            raise ValueError(f"{cls.kind} has {len(parts)} fields, at least {cls.least} are needed")
        known = fields(cls)
        return cls(**{one.name: _value(str(one.type), part) for one, part in zip(known, parts, strict=False)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfProducer(_TraceRecord):
    """Of a message in the store. Times are ms, ``store_host`` is ``ip:port``."""

    timestamp: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    tags: str | None
    keys: str | None
    store_host: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pub(_OfProducer):
    """A message was sent."""

    kind: ClassVar[str] = "Pub"
    least: ClassVar[int] = 12
    body_bytes: int
    cost_ms: int
    message_type: MessageType = MessageType.NORMAL
    offset_message_id: str | None = None
    success: bool = True
    client_host: str | None = None

    @classmethod
    def parse(cls, parts: list[str]) -> Any:
        """Twelve fields are an old client's, without offsetMsgId."""
        if len(parts) == 12:
            parts = [*parts[:11], _NULL, parts[11]]
        return super(Pub, cls).parse(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubBefore(_TraceRecord):
    """A consumer is about to handle a message; ``request_id`` leads to the SubAfter record."""

    kind: ClassVar[str] = "SubBefore"
    least: ClassVar[int] = 7
    timestamp: int
    region: str | None
    group: str | None
    request_id: str | None
    message_id: str | None
    retry_times: int
    keys: str | None
    client_host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAfter(_TraceRecord):
    """A consumer has handled a message, in ``cost_ms``."""

    kind: ClassVar[str] = "SubAfter"
    least: ClassVar[int] = 5
    request_id: str | None
    message_id: str | None
    cost_ms: int
    success: bool
    keys: str | None
    result: ConsumeReturnType = ConsumeReturnType.SUCCESS
    timestamp: int = 0
    group: str | None = None

    @classmethod
    def parse(cls, parts: list[str]) -> Any:
        """A client of the cloud writes a separator behind contextCode and nothing more."""
        if len(parts) == 7 and not parts[6]:
            parts = parts[:6]
        return super(SubAfter, cls).parse(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransactionTrace(_OfProducer):
    """A producer ended a transaction; ``state`` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""

    kind: ClassVar[str] = "EndTransaction"
    least: ClassVar[int] = 12
    message_type: MessageType
    transaction_id: str | None
    state: str
    from_check: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallTrace(_TraceRecord):
    """A delayed message was recalled."""

    kind: ClassVar[str] = "Recall"
    least: ClassVar[int] = 6
    timestamp: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    success: bool


TraceRecord = Pub | SubBefore | SubAfter | EndTransactionTrace | RecallTrace
_KINDS: Final[dict[str, type[_TraceRecord]]] = {
    one.kind: one for one in (Pub, SubBefore, SubAfter, EndTransactionTrace, RecallTrace)
}


def encode_trace(records: Iterable[TraceRecord]) -> bytes:
    """The body of a trace message. Raises InvalidMessageError when a text has one of the two separators."""
    return "".join(record.encode() for record in records).encode()


def decode_trace(body: bytes) -> list[TraceRecord]:
    """The records in ``body``; records of an unknown kind are skipped. Raises InvalidMessageError for a broken one."""
    found: list[TraceRecord] = []
    for text in body.decode("utf-8", "replace").split(_END):
        kind, *parts = text.split(_FIELD)
        if kind in _KINDS:
            try:
                found.append(_KINDS[kind].parse(parts))
            except ValueError as error:
                raise InvalidMessageError(f"no valid trace record: {text[:200]!r}: {error}") from error
    return found


def trace_keys(records: Iterable[TraceRecord]) -> str:
    """KEYS of the trace message: message ids and keys of ``records``, each once, in the order of a Java HashSet."""
    keys: dict[str, None] = {}
    for record in records:
        texts = [record.message_id, *(getattr(record, "keys", None) or "").split(KEY_SEPARATOR)]
        keys.update(dict.fromkeys(text for text in texts if text))
    return KEY_SEPARATOR.join(hash_map_order(keys, 16))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _NULL if value is None else str(int(value) if isinstance(value, IntEnum) else value)


def _value(kind: str, text: str) -> Any:
    if kind.startswith("str"):
        return None if text == _NULL and "None" in kind else text
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text)
    return {"MessageType": MessageType, "ConsumeReturnType": ConsumeReturnType}[kind](int(text))
