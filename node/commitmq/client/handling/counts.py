"""The counters of ``run``."""

from __future__ import annotations

from typing import NamedTuple


class HandlerCounts(NamedTuple):
    """What became of the messages of ``run`` so far, and how many there are now.

    ``handled``: calls of the handler that ended with DONE. ``failed``: those that did not. ``dead``: messages that went to
    the dead letters. ``running``: handlers that run now. ``unfinished``: messages that were fetched and are not done.
    """

    handled: int = 0
    failed: int = 0
    dead: int = 0
    running: int = 0
    unfinished: int = 0
