"""The lines that ``commitmq produce`` reads from a file or a pipe, until the input or the command ends."""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

LINE_HELD_S: Final = 0.05
"""A line waits at most this long for others of its batch."""
_READ_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 64 * 1024 * 1024
_DRAINED_BYTES: Final = 1 << 20  # read at most this much from a pipe after the command was told to end


class BadLineError(Exception):
    """The line with this number is no message."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


class UnreadableError(Exception):
    """Reading the input failed with a system error."""


class Ending:
    """Notes Ctrl-C and SIGTERM while it is entered, so that the command can send the lines that it has read. The second
    signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.left_out = False
        """Whether an incomplete line was dropped."""
        self._stack = ExitStack()

    def __enter__(self) -> Ending:
        self.fd, wake = os.pipe()
        os.set_blocking(wake, False)
        self._stack.callback(os.close, self.fd)
        self._stack.callback(os.close, wake)
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._stack.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _note(self, number: int, _frame: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def input_lines(fd: int, advance: Callable[[int], None], ending: Ending) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their ends; (number, None) after each look for more input, at least every 50 ms at first.

    ``advance(count)`` is called for the bytes of each read. Raises BadLineError and UnreadableError.
    """
    rest = b""
    number = 0
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    longest: float | None = LINE_HELD_S
    drained = 0
    while True:
        is_ending = ending.signal is not None
        if not is_ending:
            ready = select.select([fd, ending.fd], [], [], longest)[0]
        else:
            # Read no more of a file, and of a pipe only the bytes that are there.
            ready = [] if is_file or drained >= _DRAINED_BYTES else select.select([fd], [], [], 0)[0]
        if fd not in ready:
            yield number, None
            if is_ending:
                ending.left_out = bool(rest)
                return
            # After twice the time without input the consumer of the lines has sent every held line. (The signal may
            # have come after this look: the input that came before the signal needs one more look.)
            longest = None if longest is None or not ready else longest
            continue
        longest = LINE_HELD_S
        try:
            data = os.read(fd, _READ_BYTES)
        except OSError as error:
            raise UnreadableError("it is closed" if error.errno == errno.EBADF else error.strerror) from error
        if ending.signal is not None:
            drained += len(data)
        advance(len(data))
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            number += 1
            yield number, line.removesuffix(b"\r")
        yield number, None
        if len(rest) > _MAX_LINE_BYTES:
            raise BadLineError(number + 1, f"it is longer than {_MAX_LINE_BYTES} bytes")
    if rest:
        yield number + 1, rest
