"""Tracks the queues whose units are not all on the device yet, and so the position below which everything is.

The queue that waits longest comes first, with the position that the log was dispatched to before its first unsynced
unit: below that position no unit of any queue is missing on the device. So the durable position follows the syncs one
by one, in any order, and a recovery begins at the unit that waits longest, not at the last time that all were synced.
"""

from __future__ import annotations

from collections.abc import Iterator

from commitmq.store.queues.queue_files import QueueFiles


class Unsynced:
    """Queues by the position of their first unsynced unit. :meth:`reached` sets that position for the units added next."""

    def __init__(self) -> None:
        self._waiting: dict[
            QueueFiles, list[int]
        ] = {}  # bytes, and position and time when it began to wait; in that order
        self._position = 0
        self._timestamp = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueueFiles]:
        return iter(self._waiting)

    def __contains__(self, queue: QueueFiles) -> bool:
        return queue in self._waiting

    def reached(self, position: int, timestamp: int) -> None:
        """Everything below ``position`` (bytes of the log) was added; ``timestamp`` (ms) is that of its newest record."""
        self._position, self._timestamp = position, timestamp

    def add(self, queue: QueueFiles, size: int) -> None:
        """``size`` bytes were appended to ``queue``, of records at or behind the position reached."""
        found = self._waiting.get(queue)
        if found is None:
            self._waiting[queue] = [size, self._position, self._timestamp]
        else:
            found[0] += size

    def discard(self, queue: QueueFiles) -> None:
        """``queue`` is synced, or deleted."""
        self._waiting.pop(queue, None)

    def clear(self) -> None:
        self._waiting.clear()

    def durable(self) -> tuple[int, int]:
        """``(position, timestamp)`` below which no queue waits."""
        for _, position, timestamp in self._waiting.values():
            return position, timestamp
        return self._position, self._timestamp

    def waiting_below(self, position: int) -> list[QueueFiles]:
        """Queues with unsynced units of records that begin, or may begin, below ``position``; the oldest first."""
        found = []
        for queue, (_, since, _) in self._waiting.items():
            if since >= position:
                break
            found.append(queue)
        return found

    def with_bytes(self, least: int) -> list[QueueFiles]:
        """Queues with at least ``least`` unsynced bytes."""
        return [queue for queue, (size, _, _) in self._waiting.items() if size >= least]
