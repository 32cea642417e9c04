"""Where the records of a run lie, and how many messages a client's batch has."""

from __future__ import annotations

from itertools import accumulate
from typing import Any


class Places:
    """The physical offset of each record of a run, from the parts of an answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._parts = [list(part) for part in answer.get("parts", ())] or [
            [1 << 62, int(answer.get("physical_offset", 0))]
        ]

    def next(self, size: int) -> int:
        """The place of the next record, which has ``size`` bytes."""
        part = self._parts[0]
        at = int(part[1])
        part[0] -= 1
        part[1] += size
        if part[0] == 0 and len(self._parts) > 1:
            del self._parts[0]
        return at

    def next_of(self, sizes: list[int]) -> list[int]:
        """The places of the next records, which have ``sizes`` bytes."""
        part = self._parts[0]
        if len(self._parts) > 1 and int(part[0]) <= len(sizes):
            return [self.next(size) for size in sizes]
        *found, end = accumulate(sizes, initial=int(part[1]))
        part[0] -= len(sizes)
        part[1] = end
        return found


def count_of(body: Any) -> int:
    """Messages of a client batch; what is wrong in it, the writer says."""
    view, at, count = memoryview(body), 0, 0
    while at + 4 <= len(view):
        size = int.from_bytes(view[at : at + 4], "big", signed=True)
        if size < 22:
            break
        at += size
        count += 1
    return count
