"""What a program sees and pauses of the queues that its consumer or reader has."""

from __future__ import annotations

from collections.abc import Iterable

from commitmq.client.receiving.assignment import Assignment, Queue


class AssignedQueues:
    """A part of :class:`~commitmq.client.receiving.base_consumer.BaseConsumer`."""

    _assignment: Assignment

    def _check_usable(self) -> None:
        raise NotImplementedError

    def pause(self, queues: Iterable[Queue] | None = None) -> None:
        """Return no messages of these queues (default: all assigned queues) until :meth:`resume`.

        The queues stay assigned as long as the consumer polls. A queue that is given back and assigned again is not paused.
        Raises ValueError for a queue that is not assigned.
        """
        self._check_usable()
        self._assignment.set_paused(queues, True)

    def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """End a :meth:`pause`."""
        self._check_usable()
        self._assignment.set_paused(queues, False)

    @property
    def paused(self) -> list[Queue]:
        """The paused queues, sorted."""
        with self._assignment.lock:
            return sorted(key for key, state in self._assignment.owned.items() if state.is_paused)

    @property
    def assignment(self) -> list[Queue]:
        """The assigned queues, sorted."""
        return sorted(self._assignment.keys())

    @property
    def positions(self) -> dict[Queue, int]:
        """For each assigned queue the offset behind the last message that a poll returned."""
        return self._assignment.positions()
