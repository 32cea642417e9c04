"""Frames of a byte stream (spec 15.1): ``length i4 · serialization i1 · header length i3 · header · body``.

``length`` counts everything behind itself. :class:`FrameParser` turns what a socket received into commands;
:func:`encode_head` gives everything before the body, so that a body can be sent from where it lies.
"""

from __future__ import annotations

import struct
from typing import Final

from commitmq_plugins.rocketmq.remoting import binary_header, json_header
from commitmq_plugins.rocketmq.remoting.codes import SERIALIZE_JSON, SERIALIZE_ROCKETMQ
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import FrameError

MAX_FRAME_BYTES: Final = 16 << 20
MAX_HEADER_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct(">iI")
_HEADER_MAX: Final = (1 << 24) - 1
_NOTHING: Final = memoryview(b"")


class FrameParser:
    """Cuts one connection's bytes into commands: :meth:`add`, then :meth:`next` until it returns None.

    It keeps less than one frame and one read. After a wrong frame ``error`` says what it was. The commands before it are
    still returned; later calls return none.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        """``max_frame_bytes`` is the greatest length of a frame without its own 4 bytes."""
        self.max_frame_bytes, self.max_header_bytes = max_frame_bytes, max_header_bytes
        self.error: FrameError | None = None
        self._pending = bytearray()
        self._needed = 4
        self._view, self._at = _NOTHING, 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of frames that were not returned yet."""
        return len(self._pending) + len(self._view) - self._at

    def feed(self, data: bytes) -> list[Command]:
        """All commands that ``data`` completes."""
        self.add(data)
        commands: list[Command] = []
        while (command := self.next()) is not None:
            commands.append(command)
        return commands

    def add(self, data: bytes) -> None:
        """Take what the peer sent. :meth:`next` must have returned None since the last call."""
        if self.error is not None:
            return
        pending: bytes | bytearray = data
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return
            pending, self._pending = self._pending, bytearray()
        self._view, self._at = memoryview(pending), 0

    def next(self) -> Command | None:
        """The next command. Its body is a view of what was added, or a copy, never of a buffer in use."""
        view, at = self._view, self._at
        end = len(view)
        left = end - at
        if not left or self.error is not None:
            return None
        try:
            if left >= 8:
                length, word = _HEAD.unpack_from(view, at)
                header_bytes = word & _HEADER_MAX
                if (
                    not 4 <= length <= self.max_frame_bytes
                    or word >> 25
                    or header_bytes > length - 4
                    or header_bytes > self.max_header_bytes
                ):
                    self._refuse(length, word)
                if 4 + length <= left:
                    return self._decoded(view, at + 8 + header_bytes, at + 4 + length, word >> 24)
                needed = 4 + length
            else:
                needed = self._needed_of_few(view[at:])
        except FrameError as error:
            self.error = error
            self._view, self._at = _NOTHING, 0
            return None
        self._needed = needed
        self._pending += view[at:]
        self._view, self._at = _NOTHING, 0
        return None

    def _decoded(self, view: memoryview, body_at: int, stop: int, serialize: int) -> Command:
        """The command whose frame ends at ``stop``. The next one begins there."""
        at, end = self._at, len(view)
        header = view[at + 8 : body_at]
        command = binary_header.decode(header) if serialize else json_header.decode(header)
        body = view[body_at:stop]
        # A view keeps all of the read in memory for as long as the request is under way.
        command.body = body if 2 * len(body) >= end else bytes(body)
        command.frame_bytes = stop - at
        if stop < end:
            self._at = stop
        else:
            self._view, self._at = _NOTHING, 0
        return command

    def _needed_of_few(self, view: memoryview) -> int:
        """How many bytes are needed to go on, where a frame has fewer than 8 yet. Raises FrameError."""
        if len(view) < 4:
            return 4
        self._check_length(int.from_bytes(view[:4], "big", signed=True))
        return 8

    def _check_length(self, length: int) -> None:
        """Raises FrameError for a length that no frame may have."""
        if not 4 <= length <= self.max_frame_bytes:
            raise FrameError(
                f"a frame claims {length} bytes, allowed are 4 to {self.max_frame_bytes}: no client of RocketMQ, "
                "or the limit of a frame is too low"
            )

    def _refuse(self, length: int, word: int) -> None:
        """Raises FrameError with what is wrong in a frame's first 8 bytes."""
        self._check_length(length)
        if word >> 24 not in (SERIALIZE_JSON, SERIALIZE_ROCKETMQ):
            raise FrameError(f"a frame has serialization {word >> 24}, known are 0 (JSON) and 1 (ROCKETMQ)")
        header_bytes = word & _HEADER_MAX
        if header_bytes > length - 4:
            raise FrameError(f"a header claims {header_bytes} bytes of a frame of {length}")
        raise FrameError(f"a header claims {header_bytes} bytes, at most {self.max_header_bytes} are allowed")


def encode_head(command: Command, body_bytes: int) -> bytes:
    """Everything of the frame but its body, which has ``body_bytes`` and follows on the wire."""
    if command.serialize == SERIALIZE_JSON:
        header = json_header.encode(command)
    else:
        header = binary_header.encode(command)
    size = len(header)
    if size > _HEADER_MAX:
        raise FrameError(f"the header has {size} bytes, at most {_HEADER_MAX} fit")
    return _HEAD.pack(4 + size + body_bytes, command.serialize << 24 | size) + header


def encode(command: Command) -> bytes:
    """The whole frame of ``command``."""
    return encode_head(command, len(command.body)) + bytes(command.body)
