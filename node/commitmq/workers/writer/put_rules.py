"""What happens to a message with a property of message semantics when it is put: it is stored where it waits (spec 12.1).

The check of a run tells in a word whether any record carries such a property, so plain runs pay nothing. A run has one
destination: the client puts messages with the same delay into one run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from commitmq.format.constants import Property
from commitmq.semantics import delay
from commitmq.store.log.readdressing import Target, find, readdress, sizes_of, starts_of
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, CheckedRun, RunCheck
from commitmq.workers.writer.send_checks import Refusal

_DELAY = 1 << SPECIAL_PROPERTIES.index(Property.DELAY)


@dataclass(frozen=True, slots=True)
class Placed:
    """A run and the queue in which it is to be stored."""

    run: CheckedRun
    topic: str
    queue_id: int


class PutRules:
    """Rewrites checked runs. ``checker`` says how records of this log look."""

    def __init__(self, checker: RunCheck, *, delays: bool) -> None:
        """``delays``: the node delivers delayed messages."""
        self._checker = checker
        self._delays = delays

    def place(self, run: CheckedRun, topic: str, queue_id: int) -> Placed:
        """Where ``run``, which carries special properties, is stored, and in which bytes.

        Raises Refusal for a run of several destinations or a property without a meaning, MessageIllegalError when a
        rewritten record would break a limit.
        """
        if run.special & _DELAY:
            return self._delayed(run, topic, queue_id)
        return Placed(run, topic, queue_id)

    def place_copy(self, run: CheckedRun, topic: str, queue_id: int, *, delayed: bool) -> Placed:
        """The same for a copy that the node itself made. ``delayed``: it has a delay level. Raises as :meth:`place`."""
        if delayed:
            placed = self._delayed(run, topic, queue_id)
        else:
            placed = Placed(self._readdressed(run, starts_of(run), topic, queue_id, None), topic, queue_id)
        return replace(placed, run=replace(placed.run, moved=True))

    def _delayed(self, run: CheckedRun, topic: str, queue_id: int) -> Placed:
        if not self._delays:
            raise Refusal("MESSAGE_ILLEGAL", "this node delivers no delayed messages (schedule.enable is false)")
        starts = starts_of(run)
        found = find(run.data, starts, sizes_of(run), [Property.DELAY])
        _, firsts = found.alike()
        if len(firsts) > 1:
            raise Refusal("MESSAGE_ILLEGAL", "all messages of a run need the same property DELAY: send them in several")
        text = found.value(0, 0)
        try:
            level = delay.parse_level(text.decode("ascii", "replace"))
        except ValueError as error:
            raise Refusal("MESSAGE_ILLEGAL", str(error)) from error
        if level == 0:
            return Placed(run, topic, queue_id)
        pairs = {Property.REAL_TOPIC: topic, Property.REAL_QUEUE_ID: str(queue_id)}
        if text != b"%d" % level:
            pairs = {Property.DELAY: str(level), **pairs}
        queue = delay.queue_of(level)
        return Placed(self._readdressed(run, starts, delay.SCHEDULE_TOPIC, queue, pairs), delay.SCHEDULE_TOPIC, queue)

    def _readdressed(
        self, run: CheckedRun, starts: NDArray[np.int64], topic: str, queue_id: int, pairs: dict[str, str] | None
    ) -> CheckedRun:
        checker = self._checker
        target = Target(topic.encode(), queue_id, len(checker.store_host) == 20, checker.properties_crc)
        if pairs is None:
            return readdress(run.data, starts, target)
        more = "".join(f"{name}\x01{value}\x02" for name, value in pairs.items())
        return readdress(run.data, starts, target, [more.encode()])
