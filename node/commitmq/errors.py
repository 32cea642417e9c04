"""Typed errors: every failure that a caller can meet has one class and a sentence that says what, where and what to do.

Only this module is imported by clients and workers alike, so it must stay free of heavy imports.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class CommitMQError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(CommitMQError):
    """A configuration key or value is unknown, has the wrong type or is out of range."""


class MissingExtraError(CommitMQError, ModuleNotFoundError):
    """The call needs an extra of this package that is not installed; the text has the command that installs it."""


class NodeAddressError(ConfigError, ValueError):
    """The node's address, given in the call or as COMMITMQ_NODE, is not valid."""


# ---------------------------------------------------------------- store


class StoreError(CommitMQError):
    """A file of the store is unusable as it is. ``path`` and ``offset`` say where."""

    def __init__(self, message: str, *, path: Path | str | None = None, offset: int | None = None) -> None:
        where = "" if path is None else f" [{path}" + ("" if offset is None else f" at offset {offset}") + "]"
        super().__init__(message + where)
        self.path = None if path is None else Path(path)
        self.offset = offset


class CorruptRecordError(StoreError):
    """The bytes at this place are no valid record: length, magic, CRC or field sizes disagree."""


class CutRefusedError(StoreError):
    """A recovery would have to cut a part of the log that it must not cut by itself; nothing was changed.

    ``end`` is the log's end after the cut, which a person allows by name. Behind it lie ``cut_bytes`` in ``segments``
    segments, with ``records`` whole records.
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


class ProtocolError(CommitMQError):
    """The node (or a client) refused a request. ``code`` is stable and documented in protocol/PROTOCOL.md."""

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
        # Not super(): beside this class there may be another below the base.
        ProtocolError.__init__(self, code, message, retry_after_ms=retry_after_ms)
        self.outcome = outcome


class NodeUnavailableError(ProtocolError):
    """No answer from the node within the time allowed. A send that fails so is a SendError too, with its outcome."""

    def __init__(self, message: str, *, code: str = "NODE_UNAVAILABLE") -> None:
        super().__init__(code, message)


class UnansweredSendError(SendError, NodeUnavailableError):
    """A send that the node did not take, or did not answer, within the time allowed."""


# Codes of a send that mean: no answer.
UNANSWERED_CODES = frozenset(("NODE_UNAVAILABLE", "CONNECTION_LOST", "TIMEOUT"))


def send_error(code: str, message: str, outcome: Outcome, retry_after_ms: int | None = None) -> SendError:
    """The error of a send with ``code``: also a NodeUnavailableError when the code means that the node did not answer."""
    kind = UnansweredSendError if code in UNANSWERED_CODES else SendError
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
