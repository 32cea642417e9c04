"""What can be wrong with a frame or with a field of one. ``closes`` says whether the connection can go on."""

from __future__ import annotations

from typing import ClassVar

from commitmq.errors import CommitMQError


class RemotingError(CommitMQError):
    """Base of the errors of RocketMQ's protocol."""

    closes: ClassVar[bool] = False
    """Whether the connection must be closed: the place of the next frame is unknown, or the peer is no client."""


class FrameError(RemotingError):
    """Bytes that are no frame: a wrong length, a header that cannot be read. RocketMQ closes such a connection too."""

    closes = True


class FieldError(RemotingError):
    """A header field is missing or has a value of another type. The request fails, the connection goes on.

    ``field`` is its name on the wire, ``value`` its text, None for a field that is missing.
    """

    def __init__(self, message: str, field: str, value: str | None = None) -> None:
        super().__init__(message)
        self.field, self.value = field, value


class BodyError(RemotingError):
    """A body that cannot be read. The request fails, the connection goes on."""


class PeerGoneError(RemotingError):
    """The peer closed its connection, or was disconnected, before it answered a request of this server."""


class PeerSilentError(RemotingError):
    """The peer did not answer a request of this server in time."""
