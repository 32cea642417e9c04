"""Runs that a busy node refused: certainly not stored, and with the time after which the node may take them.

The producer rests, and then sends their messages again, within their own time. It keeps the order of a queue: while earlier
runs are in flight no new one goes, and a run that a later run of its queue has overtaken fails with its refusal. A message
without the time for another try fails at once, so its outcome is certain. The rest is that of the whole lane, at most
MAX_REST_S at once, so other topics of the producer wait with the busy one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from commitmq.client.sending.run import NEVER_S, Run
from commitmq.errors import SendError
from commitmq.protocol import wire

MAX_REST_S: Final = 1.0
_SLEEP_S: Final = 0.05
_TRY_S: Final = 0.2
_BUSY: Final = "SYSTEM_BUSY"


def is_busy(answer: dict[str, Any]) -> bool:
    """Whether a refusal is that of a busy node, which names the time to wait."""
    return (
        answer.get("code") == _BUSY
        and answer.get("outcome") == "not_stored"
        and type(answer.get("retry_after_ms")) is int
    )


def rest_s(answer: dict[str, Any]) -> float:
    """How long to rest after the refusal ``answer``."""
    return min(max(int(answer["retry_after_ms"]) / 1000, 0.0), MAX_REST_S)


class BusyRuns:
    """See the module. Used by the owner of the connection only."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.error: SendError | None = None
        """Why the lane rests; None while it does not."""
        self._until = 0.0
        self._held: list[tuple[Run, SendError]] = []
        self._passed: set[tuple[str, int]] = set()
        self._clock, self._sleep = clock, sleep

    @property
    def left_s(self) -> float:
        """The time that a message needs at least from now on to be sent again and answered."""
        return max(0.0, self._until - self._clock()) + _TRY_S

    def note(self, answer: dict[str, Any]) -> SendError:
        """The node has refused a message; the lane rests."""
        error = self.error = wire.send_refusal(answer)
        self._until = max(self._until, self._clock() + rest_s(answer))
        return error

    def hold(self, run: Run, answer: dict[str, Any], *, alone: bool) -> None:
        """The node has refused ``run``. With ``alone`` nothing else is in flight, so its messages wait again at once."""
        self._held.append((run, self.note(answer)))
        if alone:
            self._let_go()

    def passed(self, run: Run) -> None:
        """The node has stored ``run`` while others are held."""
        self._passed.add((run.topic, run.queue))

    def is_over(self, *, in_flight: bool) -> bool:
        """Whether the lane may send; rests a moment where it may not, so that a loop may ask without a pause."""
        if in_flight:
            return False
        self._let_go()
        left_s = self._until - self._clock()
        if left_s > 0:
            self._sleep(min(left_s, _SLEEP_S))
            return False
        self.error = None
        return True

    def fail(self) -> None:
        """Fail the runs that are held, with their refusals."""
        held, self._held = self._held, []
        for run, error in held:
            run.failed(lambda error=error: error)  # type: ignore[misc]

    def expire(self, now: float) -> float:
        """Fail held messages whose time is over; returns the next deadline."""
        ends = [run.expire(now, lambda error=error: error) for run, error in self._held]  # type: ignore[misc]
        return min(ends, default=NEVER_S)

    def _let_go(self) -> None:
        """Nothing is in flight: the messages of held runs wait again, in their order, or fail where others overtook them."""
        held, self._held = self._held, []
        passed, self._passed = self._passed, set()
        for run, error in reversed(held):
            if run.queue >= 0 and (run.topic, run.queue) in passed:
                run.failed(lambda error=error: error)  # type: ignore[misc]
            else:
                run.give_back()
