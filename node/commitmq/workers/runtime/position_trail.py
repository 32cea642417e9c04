"""Earlier positions of a mover, for a log that is cut below what the newest ones speak of.

A position says what is done; done means that copies, acks or ends are in the log. Where the log is cut in front of them, the
position is too new, although the messages that it passed are still there: they would be lost. So each file of positions keeps
earlier ones, each with the end of the log at that time, everything below which was durable. After a cut the newest that did
not need more of the log counts, and what it has not passed is looked at again.

Entries become rarer the further the log has gone on since: at any place of the log there is one that is at most about twice as
far from the newest as that place is. A power cut takes nothing that a position speaks of, so only a person who cuts flushed
messages off, or an older copy of the log beside newer positions, needs any of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

_NEAR_BYTES: Final = 65_536
"""Closer to the newest one entry is as good as another."""


class Trail:
    """``entries``: (end of the log, positions as JSON), both oldest first."""

    def __init__(self, entries: Iterable[tuple[int, Any]] = ()) -> None:
        self.entries = list(entries)

    @classmethod
    def from_json(cls, found: Any) -> Trail:
        """Raises TypeError or ValueError for anything else than :meth:`to_json` made."""
        return cls((int(end), positions) for end, positions in found or ())

    def to_json(self) -> list[list[Any]]:
        return [[end, positions] for end, positions in self.entries]

    @property
    def end(self) -> int:
        """What the newest positions need of the log; -1 without any."""
        return self.entries[-1][0] if self.entries else -1

    def note(self, end: int, positions: Any) -> None:
        """These are the newest ones; everything that they speak of lies below ``end`` and is durable."""
        self.cut(end - 1)
        kept: list[tuple[int, Any]] = [(end, positions)]
        for number in range(len(self.entries) - 1, -1, -1):
            behind, one = kept[-1][0], self.entries[number]
            older = self.entries[number - 1] if number else None
            if older is None or behind - older[0] >= max(end - behind, _NEAR_BYTES):
                kept.append(one)
        self.entries = kept[::-1]

    def cut(self, place: int) -> Any | None:
        """Forget what needs more than the log up to ``place``; the newest positions that are left, None without any."""
        while self.entries and self.entries[-1][0] > place:
            self.entries.pop()
        return self.entries[-1][1] if self.entries else None
