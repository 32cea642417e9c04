"""Typed errors: every failure that a caller can meet has one class, and a sentence with the fault, its place and the
remedy.

Only this module is imported by clients and workers alike, so it must stay free of heavy imports.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Final


class CommitMQError(Exception):
    """Base of every error this package raises on purpose. All of them can be pickled and copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Their __init__ takes other arguments than the sentence that is in args.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[CommitMQError], arguments: tuple[Any, ...]) -> CommitMQError:
    error: CommitMQError = BaseException.__new__(kind, *arguments)
    error.args = arguments
    return error


class ConfigError(CommitMQError):
    """A configuration key or value is unknown, has the wrong type or is out of range."""


class MissingExtraError(CommitMQError, ModuleNotFoundError):
    """The call needs an extra of this package that is not installed; the text has the command that installs it."""


class NodeAddressError(ConfigError, ValueError):
    """The node's address, given in the call or as COMMITMQ_NODE, is not valid."""


# ---------------------------------------------------------------- store


class StoreError(CommitMQError):
    """A file of the store is unusable in its present state. ``path`` and ``offset`` name the place."""

    def __init__(self, message: str, *, path: Path | str | None = None, offset: int | None = None) -> None:
        where = "" if path is None else f" [{path}" + ("" if offset is None else f" at offset {offset}") + "]"
        super().__init__(message + where)
        self.path = None if path is None else Path(path)
        self.offset = offset


class CorruptRecordError(StoreError):
    """The bytes at this place are no valid record: length, magic, CRC or field sizes disagree."""


class CutRefusedError(StoreError):
    """A recovery would have to cut a part of the log that it must not cut by itself; nothing was changed.

    ``end`` is the log's end after the cut, which an operator allows by name. Behind it lie ``cut_bytes`` in
    ``segments`` segments, with ``records`` whole records.
    """

    def __init__(
        self, message: str, *, path: Path | str, end: int, cut_bytes: int = 0, segments: int = 0, records: int = 0
    ) -> None:
        super().__init__(message, path=path)
        self.end, self.cut_bytes, self.segments, self.records = end, cut_bytes, segments, records


class SegmentSizeError(StoreError):
    """A segment file's size differs from the configured one; opening it anyway would misplace every record."""


class StoreLockedError(StoreError):
    """Another live process holds the store. ``pid`` is that process (0 when the system hides it)."""

    def __init__(self, message: str, *, pid: int, path: Path | str | None = None) -> None:
        super().__init__(message, path=path)
        self.pid = pid


class OffsetOutOfRangeError(StoreError):
    """A request for a physical offset below the log's minimum or at/after its end."""


class DiskFullError(StoreError):
    """No space is left for a file the store needs; nothing was written."""


# ---------------------------------------------------------------- protocol and clients


class Outcome(StrEnum):
    """Whether the message of a failed send is stored. Every failed send has exactly one of these."""

    NOT_STORED = "not_stored"
    STORED = "stored"
    UNKNOWN = "unknown"


class Code(StrEnum):
    """Why a request or a send failed: the values of :attr:`RequestError.code`. The node's are in protocol/PROTOCOL.md,
    with their meanings; a newer node may have more. RocketMQ's ResponseCode and PutMessageStatus name most of them.
    """

    # The node's.
    BAD_HEADER = "BAD_HEADER"
    UNSUPPORTED_VERSION = "UNSUPPORTED_VERSION"
    UNKNOWN_OP = "UNKNOWN_OP"
    INVALID_PARAMETER = "INVALID_PARAMETER"
    FRAME_TOO_LARGE = "FRAME_TOO_LARGE"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    WRONG_ENDPOINT = "WRONG_ENDPOINT"
    TOPIC_NOT_EXIST = "TOPIC_NOT_EXIST"
    GROUP_NOT_EXIST = "GROUP_NOT_EXIST"
    NO_PERMISSION = "NO_PERMISSION"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = "LMQ_CONSUME_QUEUE_NUM_EXCEEDED"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPPED_FILE_FAILED = "CREATE_MAPPED_FILE_FAILED"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    SYSTEM_BUSY = "SYSTEM_BUSY"
    SYSTEM_ERROR = "SYSTEM_ERROR"
    FILTER_FAILED = "FILTER_FAILED"
    INDEX_DISABLED = "INDEX_DISABLED"
    PRODUCER_FENCED = "PRODUCER_FENCED"
    OUT_OF_ORDER_SEQUENCE = "OUT_OF_ORDER_SEQUENCE"
    UNKNOWN_PRODUCER_ID = "UNKNOWN_PRODUCER_ID"
    TRANSACTION_ENDED = "TRANSACTION_ENDED"
    WHEEL_TIMER_MSG_ILLEGAL = "WHEEL_TIMER_MSG_ILLEGAL"
    WHEEL_TIMER_NOT_ENABLE = "WHEEL_TIMER_NOT_ENABLE"
    WHEEL_TIMER_FLOW_CONTROL = "WHEEL_TIMER_FLOW_CONTROL"
    ILLEGAL_OPERATION = "ILLEGAL_OPERATION"
    FENCED = "FENCED"
    UNKNOWN_MEMBER = "UNKNOWN_MEMBER"

    # The client's.
    NODE_UNAVAILABLE = "NODE_UNAVAILABLE"
    """The node cannot be reached."""
    CONNECTION_LOST = "CONNECTION_LOST"
    """The connection ended before the answer."""
    TIMEOUT = "TIMEOUT"
    """The time for the send was over."""
    AUTHENTICATION_FAILED = "AUTHENTICATION_FAILED"
    """The node does not let this client in: it needs a profile, or does not know the key of the profile."""
    BAD_ANSWER = "BAD_ANSWER"
    """The peer does not speak the protocol."""
    CLIENT_BUFFER_FULL = "CLIENT_BUFFER_FULL"
    """As many messages as ``max_pending`` allows are pending."""
    CLIENT_BUSY = "CLIENT_BUSY"
    """Sends before the batch are still pending."""
    CLIENT_CLOSED = "CLIENT_CLOSED"
    """The producer was closed before the message was sent."""
    CLIENT_ERROR = "CLIENT_ERROR"
    """A fault of the client."""


_PASSING: Final = frozenset(
    (
        Code.SERVICE_NOT_AVAILABLE,
        Code.CREATE_MAPPED_FILE_FAILED,
        Code.SYSTEM_BUSY,
        Code.WHEEL_TIMER_FLOW_CONTROL,
        Code.NODE_UNAVAILABLE,
        Code.CONNECTION_LOST,
        Code.TIMEOUT,
        Code.CLIENT_BUFFER_FULL,
        Code.CLIENT_BUSY,
    )
)


class RequestError(CommitMQError):
    """A request failed. ``code`` is one of :class:`Code`, or a newer node's. ``retry_after_ms``: the node's advice when
    to ask again, or None.
    """

    def __init__(self, code: str, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later, with nothing changed but the time."""
        return self.code in _PASSING


class ProtocolError(RequestError):
    """The node refused a request, or the client could not understand its answer."""

    @property
    def more(self) -> dict[str, Any]:
        """What a node's answer says besides code and sentence."""
        return {} if self.retry_after_ms is None else {"retry_after_ms": self.retry_after_ms}


class TopicNotFoundError(ProtocolError):
    """The topic does not exist."""


class GroupNotFoundError(ProtocolError):
    """The consumer group does not exist."""


class SendError(RequestError):
    """A send did not end with the promised ack. ``outcome`` says whether the message is in the log. ``code`` is a
    RocketMQ PutMessageStatus name where the store refused, else a protocol code.
    """

    def __init__(self, code: str, message: str, *, outcome: Outcome, retry_after_ms: int | None = None) -> None:
        # Not super(): beside this class there may be another below the base.
        RequestError.__init__(self, code, message, retry_after_ms=retry_after_ms)
        self.outcome = outcome

    @property
    def retryable(self) -> bool:
        """Whether the same send may succeed later and store no message twice: it is certain that nothing is stored. An
        idempotent producer itself repeats sends with an unknown outcome.
        """
        return self.outcome is Outcome.NOT_STORED and self.code in _PASSING


class ProducerFencedError(SendError):
    """A producer of a higher epoch has the ``producer_id`` now; this one cannot send any more."""


class NodeUnavailableError(RequestError):
    """No answer from the node within the time allowed. A send that fails so is a SendError too, with its outcome."""

    def __init__(self, message: str, *, code: str = Code.NODE_UNAVAILABLE.value) -> None:
        super().__init__(code, message)


class AuthenticationError(NodeUnavailableError):
    """The node does not let this client in: it needs a profile, or does not know the key of the profile."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=Code.AUTHENTICATION_FAILED.value)


class UnansweredSendError(SendError, NodeUnavailableError):
    """A send that the node did not take, or did not answer, within the time allowed."""


class RequestTimeoutError(RequestError):
    """No reply came to a request in time. The request is stored, and may still be handled. ``correlation_id`` is the
    request's, which its reply has too.
    """

    def __init__(self, message: str, *, correlation_id: str) -> None:
        super().__init__(Code.TIMEOUT.value, message)
        self.correlation_id = correlation_id


class _TopicNotFoundSendError(SendError, TopicNotFoundError):
    """A send to a topic that does not exist."""


# Codes of a send that mean: no answer.
UNANSWERED_CODES: Final = frozenset(("NODE_UNAVAILABLE", "CONNECTION_LOST", "TIMEOUT"))

_SEND_ERRORS: Final[dict[str, type[SendError]]] = {
    **dict.fromkeys(UNANSWERED_CODES, UnansweredSendError),
    "TOPIC_NOT_EXIST": _TopicNotFoundSendError,
    "PRODUCER_FENCED": ProducerFencedError,
}


def send_error(code: str, message: str, outcome: Outcome, retry_after_ms: int | None = None) -> SendError:
    """The error of a send with ``code``, of the class that says so: NodeUnavailableError too without an answer,
    TopicNotFoundError too without a topic, ProducerFencedError.
    """
    kind = _SEND_ERRORS.get(code, SendError)
    return kind(code, message, outcome=outcome, retry_after_ms=retry_after_ms)


class FencedError(ProtocolError):
    """A group member acted on queues it no longer owns; its commit was refused and changed nothing."""

    def __init__(self, message: str) -> None:
        super().__init__("FENCED", message)


class FilterError(CommitMQError, ValueError):
    """An expression cannot be understood, or the filter behind it failed.

    ``position`` is the character (from 1) at which the expression goes wrong, None when that does not apply; ``plugin``
    is set when the plugin is at fault and not the expression.
    """

    def __init__(self, message: str, *, position: int | None = None, plugin: str | None = None) -> None:
        super().__init__(message if position is None else f"at character {position}: {message}")
        self.position = position
        self.plugin = plugin


class InvalidMessageError(CommitMQError, ValueError):
    """A message breaks a limit that the client can check before it sends: body, properties or topic name."""


class UndecodableBodyError(CommitMQError, ValueError):
    """A received message's body does not match its sysFlag, or needs a package that is not installed. The message
    itself was delivered: its ``raw_body`` has the bytes as stored, its ``damage`` this reason.
    """
