"""What a test needs that throws exceptions into threads at any place: logging that outlives it.

``logging.Handler`` of Python 3.11 and 3.12 takes its lock by a call before the ``try`` that gives it back. A thread that is
interrupted between the two keeps the lock, and every other thread that logs waits for ever. 3.13 has a ``with`` there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logging_survives() -> Iterator[None]:
    """Within it handlers lock as Python 3.13's do; behind it no lock is anybody's."""

    def handle(handler: logging.Handler, record: logging.LogRecord) -> bool:
        found = handler.filter(record)
        if found:
            lock = handler.lock
            if lock is None:
                handler.emit(record)
            else:
                with lock:
                    handler.emit(record)
        return bool(found)

    before = logging.Handler.handle
    logging.Handler.handle = handle  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        logging.Handler.handle = before  # type: ignore[method-assign]
        for reference in list(logging._handlerList):  # type: ignore[attr-defined]
            handler = reference()
            if handler is not None:
                handler.createLock()
