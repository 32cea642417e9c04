"""Typed errors: every failure a caller can meet has one class, a sentence that says what, where and what to do.

Only this module is imported by clients and workers alike, so it must stay free of heavy imports.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class CommitMQError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(CommitMQError):
    """A configuration key or value is unknown, has the wrong type or is out of range."""


# ---------------------------------------------------------------- store


class StoreError(CommitMQError):
    """A file of the store cannot be used as it is. ``path`` and ``offset`` say where."""

    def __init__(self, message: str, *, path: Path | str | None = None, offset: int | None = None) -> None:
        where = "" if path is None else f" [{path}" + ("" if offset is None else f" at offset {offset}") + "]"
        super().__init__(message + where)
        self.path = None if path is None else Path(path)
        self.offset = offset


class CorruptRecordError(StoreError):
    """The bytes at this place are no valid record: length, magic, CRC or field sizes disagree."""


class SegmentSizeError(StoreError):
    """A segment file's size differs from the configured one; opening it anyway would misplace every record."""


class StoreLockedError(StoreError):
    """Another live process holds the store. ``pid`` is that process (0 when the system does not tell)."""

    def __init__(self, message: str, *, pid: int, path: Path | str | None = None) -> None:
        super().__init__(message, path=path)
        self.pid = pid


class OffsetOutOfRangeError(StoreError):
    """A physical offset below the log's minimum or at/after its end was asked for."""


class DiskFullError(StoreError):
    """No space is left for a file the store needs; nothing was written."""


# ---------------------------------------------------------------- protocol and clients


class Outcome(StrEnum):
    """What is known of a send that failed. Every failed send is exactly one of these."""

    NOT_STORED = "not_stored"
    STORED = "stored"
    UNKNOWN = "unknown"


class ProtocolError(CommitMQError):
    """The node (or a client) refused a request. ``code`` is stable and documented in client/PROTOCOL.md."""

    def __init__(self, code: str, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


class SendError(ProtocolError):
    """A send did not end with the promised ack. ``outcome`` says whether the message is in the log.

    ``code`` is a RocketMQ PutMessageStatus name where the store refused, else a protocol code.
    """

    def __init__(self, code: str, message: str, *, outcome: Outcome, retry_after_ms: int | None = None) -> None:
        super().__init__(code, message, retry_after_ms=retry_after_ms)
        self.outcome = outcome


class NodeUnavailableError(ProtocolError):
    """No answer from the node within the time allowed."""

    def __init__(self, message: str, *, code: str = "NODE_UNAVAILABLE") -> None:
        super().__init__(code, message)


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
