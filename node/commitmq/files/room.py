"""Writes that wait for room on the disk.

A full disk ends no process and loses nothing: whoever writes to the store does it by :class:`Room`, which leaves out a write
that found no room, says so in ``status`` and once in the log, and does it again later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from commitmq.errors import StoreError
from commitmq.files.no_space import is_no_space
from commitmq.log import Log

AGAIN_MS: Final = 500
_R = TypeVar("_R")


class StoppedWithoutRoom(Exception):
    """The process shall stop, and the disk still has no room: what was not written is found again by the next start."""


class Tell(Protocol):
    """Reports to the supervisor."""

    def __call__(self, **info: Any) -> None: ...


class Room:
    """``waiting``: why each kind of file (``timer log``) cannot be written at present."""

    def __init__(self, log: Log, tell: Tell, pause: Callable[[int], bool]) -> None:
        """``pause``: wait for so many milliseconds; False when the process shall stop."""
        self._log, self._report, self._pause = log, tell, pause
        self.waiting: dict[str, str] = {}

    @classmethod
    def of_nobody(cls, log: Log) -> Room:
        """Outside of a worker: no status shows it, and nothing is waited for."""
        return cls(log, lambda **_: None, lambda _ms: False)

    def try_to(self, what: str, write: Callable[[], object]) -> bool:
        """Call ``write``, which writes ``what``. False when there was no room: then it is to be called again later.

        Raises the other errors of ``write``.
        """
        try:
            write()
        except (OSError, StoreError) as error:
            if not self.lacked(what, error):
                raise
            return False
        self.found(what)
        return True

    def wait(self, what: str, write: Callable[[], _R]) -> _R:
        """Call ``write`` again and again until there is room; returns what it returns.

        Raises its other errors, and StoppedWithoutRoom.
        """
        results: list[_R] = []
        while not self.try_to(what, lambda: results.append(write())):
            if not self._pause(AGAIN_MS):
                raise StoppedWithoutRoom(self.waiting[what])
        return results[0]

    def lacked(self, what: str, error: Exception) -> bool:
        """Note that ``what`` could not be written, when ``error`` says that there was no room; False for another error."""
        if is_no_space(error) and what not in self.waiting:
            self.waiting[what] = str(error)
            self._log.error("waits for room on the disk", file=what, why=str(error))
            self._tell()
        return is_no_space(error)

    def found(self, what: str) -> None:
        """``what`` was written."""
        if what in self.waiting:
            del self.waiting[what]
            self._log.info("has room on the disk again", file=what)
            self._tell()

    def _tell(self) -> None:
        self._report(no_room=dict(self.waiting))
