"""Which queues hold units that are not on the device yet, and so how far everything is.

The queue that waits for longest comes first, with where the log was dispatched to before its first such unit: nothing
below that is missing on the device, in any queue. So the durable position follows the syncs one by one, whatever order
they are done in, and a recovery begins at the unit that waits for longest, not at the last time that all were synced.
"""

from __future__ import annotations

from collections.abc import Iterator

from commitmq.store.queues.queue_files import QueueFiles


class Unsynced:
    """Queues by the place of their first unsynced unit. :meth:`reached` says where that place is for what is added next."""

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
        """Everything below ``position`` (bytes of the log) was added; ``timestamp`` (ms) is its newest record's."""
        self._position, self._timestamp = position, timestamp

    def add(self, queue: QueueFiles, size: int) -> None:
        """``size`` bytes were appended to ``queue``, of records at or behind the position reached."""
        found = self._waiting.get(queue)
        if found is None:
            self._waiting[queue] = [size, self._position, self._timestamp]
        else:
            found[0] += size

    def discard(self, queue: QueueFiles) -> None:
        """``queue`` is synced, or gone."""
        self._waiting.pop(queue, None)

    def clear(self) -> None:
        self._waiting.clear()

    def durable(self) -> tuple[int, int]:
        """``(position, timestamp)`` below which nothing waits."""
        for _, position, timestamp in self._waiting.values():
            return position, timestamp
        return self._position, self._timestamp

    def waiting_below(self, position: int) -> list[QueueFiles]:
        """Queues with unsynced units of records that begin below ``position``, or may, the oldest first."""
        found = []
        for queue, (_, since, _) in self._waiting.items():
            if since >= position:
                break
            found.append(queue)
        return found

    def with_bytes(self, least: int) -> list[QueueFiles]:
        """Queues with at least so many unsynced bytes."""
        return [queue for queue, (size, _, _) in self._waiting.items() if size >= least]
