"""Clients that a program closes, by ``close`` or at the end of a ``with`` block."""

from __future__ import annotations

import os
import sys
import warnings
from abc import abstractmethod
from typing import ClassVar, Self

from commitmq.errors import CommitMQError
from commitmq.protocol.channel import check_fork


class Closing:
    """A client whose ``with`` block ends with :meth:`close`."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class OwnClient(Closing):
    """A client with sockets of its own. It complains when a program forgets it; the child of a fork cannot use it."""

    _kind: ClassVar[str]
    _closed: bool
    """True until all of it is made, and again once it is closed."""
    _pid: int

    @abstractmethod
    def _forgotten(self) -> None:
        """Close at once: nobody has the client any more."""

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            warnings.warn(f"unclosed {self._kind} {self!r}", ResourceWarning, source=self, stacklevel=2)
            if not sys.is_finalizing():  # at the end of the interpreter another thread may hold a lock for ever
                self._forgotten()

    def _check_usable(self) -> None:
        check_fork(self._pid, self._kind)
        if self._closed:
            raise CommitMQError(f"the {self._kind} is closed")
