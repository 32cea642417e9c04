"""The callbacks of a consumer: ``on_assign`` and ``on_revoke`` tell a program which queues it gets and loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from commitmq.client import checks
from commitmq.client.receiving.assignment import Assignment, Queue, QueueState

Told = Callable[[list[Queue]], object]
"""``on_assign`` and ``on_revoke``: called with queues, sorted."""


class QueueCallbacks:
    """Calls the two callbacks, in the thread that polls or closes.

    If a callback raises, the next poll calls it again with the same queues.
    """

    def __init__(self, on_assign: Told | None, on_revoke: Told | None) -> None:
        """Raises ValueError for a callback that cannot be called."""
        checks.callback("on_assign", on_assign)
        checks.callback("on_revoke", on_revoke)
        self.on_assign = on_assign
        self.on_revoke = on_revoke

    def tell_changes(self, assignment: Assignment) -> None:
        """Tell which queues were lost and which are new since the last call."""
        with assignment.lock:
            lost = sorted(assignment.lost)
            new = [state for state in assignment.owned.values() if not state.is_announced and not state.revoked_at]
        if lost:
            if self.on_revoke is not None:
                self.on_revoke(lost)
            with assignment.lock:
                assignment.lost = [key for key in assignment.lost if key not in lost]
        if new:
            if self.on_assign is not None:
                self.on_assign(sorted(state.key for state in new))
            for state in new:
                state.is_announced = True

    def tell_revoked(self, states: Iterable[QueueState]) -> None:
        """Tell that these queues are about to be given back."""
        announced = [state for state in states if state.is_announced]
        if not announced:
            return
        if self.on_revoke is not None:
            self.on_revoke(sorted(state.key for state in announced))
        for state in announced:
            state.is_announced = False
