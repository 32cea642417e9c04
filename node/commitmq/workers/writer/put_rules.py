"""What happens to a message with a property of message semantics when it is put: it is stored where it waits (spec 12.1,
12.3).

The check of a run tells in a word whether any record carries such a property, so plain runs pay nothing. A run has one
destination: the client puts messages of one delay level into one run, and messages with times of their own into another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.format.constants import (
    HOST_BYTES,
    HOST_V6_BYTES,
    MAX_PROPERTIES_BYTES,
    RECONSUME_TIMES_OFFSET,
    SYS_FLAG_OFFSET,
    Property,
    SysFlag,
)
from commitmq.format.record import parts_of
from commitmq.semantics import delay, transaction
from commitmq.semantics.timer import REQUESTS, TIMER_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.log.readdressing import Target, find, readdress, sizes_of, starts_of
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, CheckedRun, MessageIllegalError, RunCheck
from commitmq.workers.writer.send_checks import Refusal
from commitmq.workers.writer.timer_rule import TimerRule, due_of, without_requests

_DELAY = 1 << SPECIAL_PROPERTIES.index(Property.DELAY)
_TRANSACTION = 1 << SPECIAL_PROPERTIES.index(Property.TRANSACTION_PREPARED)
_ROOM_BYTES = 256  # for what checks, a commit, the timer and its rolls add to the properties of a message that waits
_TIMER = sum(1 << SPECIAL_PROPERTIES.index(name) for name in (*REQUESTS, Property.TIMER_DELETE_KEY))


@dataclass(frozen=True, slots=True)
class Placed:
    """A run and the queue in which it is to be stored. ``due_ms``: when the slot of its first timer message ends."""

    run: CheckedRun
    topic: str
    queue_id: int
    due_ms: int | None = None

    def where(self, asked: str) -> dict[str, str | int]:
        """What an answer says of a place that is none of the topic ``asked``."""
        if self.topic == asked:
            return {}
        place: dict[str, str | int] = {"stored_topic": self.topic, "stored_queue": self.queue_id}
        return place if self.due_ms is None else {**place, "due_ms": self.due_ms}


class PutRules:
    """Rewrites checked runs. ``checker`` says how records of this log look, ``layout`` where the store's files are."""

    def __init__(self, checker: RunCheck, config: NodeConfig, layout: StoreLayout) -> None:
        self._checker = checker
        self._delays = config.schedule.enable
        self._transactions = config.transaction.enable
        self._timer = TimerRule(config.timer, layout.root / "timerwheel")

    def place(self, run: CheckedRun, topic: str, queue_id: int) -> Placed:
        """Where ``run``, which carries special properties, is stored, and in which bytes. Its born hosts stay if they did.

        Raises Refusal for a run of several destinations or a property without a meaning, MessageIllegalError when a
        rewritten record would break a limit.
        """
        placed = self._placed(run, topic, queue_id)
        return replace(placed, run=replace(placed.run, moved=True)) if run.moved else placed

    def _placed(self, run: CheckedRun, topic: str, queue_id: int) -> Placed:
        if run.special & _TRANSACTION and (half := self._half(run, topic, queue_id)) is not None:
            return half
        if run.special & _DELAY:
            placed = self._delayed(run, topic, queue_id)
            if placed.topic != topic or not run.special & _TIMER:
                return placed
        if run.special & _TIMER:
            return self._timed(run, topic, queue_id)
        return Placed(run, topic, queue_id)

    def _half(self, run: CheckedRun, topic: str, queue_id: int) -> Placed | None:
        """Half messages in the half topic (spec 12.3); None for messages whose TRAN_MSG is another word than true, and for
        those that are tried again with a delay level: clients before 4.6.1 leave TRAN_MSG in them.

        A delay comes into effect when the transaction is committed.
        """
        starts = starts_of(run)
        names = [Property.TRANSACTION_PREPARED, Property.PRODUCER_GROUP, Property.UNIQUE_KEY, Property.DELAY]
        found = find(run.data, starts, sizes_of(run), names)
        are_halves = {
            found.value(0, index).lower() == b"true"
            and not (_is_delayed(found.value(3, index)) and _tries(run, int(starts[index])))
            for index in range(run.count)
        }
        if True not in are_halves:
            return None
        if False in are_halves:
            raise Refusal(
                "MESSAGE_ILLEGAL", "all messages of a run need the same property TRAN_MSG: send them in several"
            )
        if not self._transactions:
            raise Refusal("MESSAGE_ILLEGAL", "this node takes no half messages (transaction.enable is false)")
        # What could never be committed is refused now.
        is_delayed = bool(run.special & _DELAY) and self._delayed(run, topic, queue_id).topic != topic
        if run.special & _TIMER and not is_delayed:
            self._timer.properties(run, topic, queue_id, is_stored=False)
        real = f"{Property.REAL_TOPIC}\x01{topic}\x02{Property.REAL_QUEUE_ID}\x01{queue_id}\x02".encode()
        more = []
        for index in range(run.count):
            if not found.value(1, index):
                raise Refusal("MESSAGE_ILLEGAL", "a half message needs PGROUP, the group of its producer")
            if not (unique := found.value(2, index)):
                raise Refusal("MESSAGE_ILLEGAL", "a half message needs UNIQ_KEY, the id of its transaction")
            more.append(b"%b\x01%b\x02%b" % (Property.TRANSACTION_ID.encode(), unique, real))
        target = self._target(transaction.HALF_TOPIC, 0)
        return Placed(_with_room(readdress(run.data, starts, target, more)), transaction.HALF_TOPIC, 0)

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
        found = find(run.data, starts_of(run), sizes_of(run), [Property.DELAY])
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
        if run.special & _TIMER or run.moved:  # (nobody looked which properties a copy has)
            run = without_requests(run)
        more = ["".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode()]
        moved = self._readdressed(run, starts_of(run), delay.SCHEDULE_TOPIC, queue, more)
        return Placed(moved, delay.SCHEDULE_TOPIC, queue)

    def _timed(self, run: CheckedRun, topic: str, queue_id: int) -> Placed:
        more = self._timer.properties(run, topic, queue_id)
        if more is None:
            return Placed(run, topic, queue_id)
        moved = _with_room(self._readdressed(run, starts_of(run), TIMER_TOPIC, 0, more))
        return Placed(moved, TIMER_TOPIC, 0, due_of(more[0]))

    def _readdressed(
        self, run: CheckedRun, starts: NDArray[np.int64], topic: str, queue_id: int, more: Sequence[bytes] | None
    ) -> CheckedRun:
        return readdress(run.data, starts, self._target(topic, queue_id), more)

    def _target(self, topic: str, queue_id: int) -> Target:
        checker = self._checker
        return Target(topic.encode(), queue_id, len(checker.store_host) == 20, checker.properties_crc)


def _is_delayed(text: bytes) -> bool:
    """Whether a property DELAY asks for a level; :meth:`PutRules._delayed` refuses one that is no number."""
    try:
        return delay.parse_level(text.decode("ascii", "replace")) > 0
    except ValueError:
        return False


def _tries(run: CheckedRun, start: int) -> int:
    """reconsumeTimes of the record at ``start``."""
    flags = int(run.data[start + SYS_FLAG_OFFSET + 3])
    hosts = sum(HOST_V6_BYTES if flags & wide else HOST_BYTES for wide in (SysFlag.BORN_HOST_V6, SysFlag.STORE_HOST_V6))
    at = start + RECONSUME_TIMES_OFFSET + hosts
    return int.from_bytes(run.data[at : at + 4].tobytes(), "big")


def _with_room(run: CheckedRun) -> CheckedRun:
    """``run``, whose messages get more properties later. Raises MessageIllegalError for one that has no room for them."""
    most = MAX_PROPERTIES_BYTES - _ROOM_BYTES
    for index in np.flatnonzero(sizes_of(run) > most).tolist():
        start = int(run.ends[index - 1]) if index else 0
        size = parts_of(run.data[start : int(run.ends[index])].tobytes()).properties_bytes
        if size > most:
            raise MessageIllegalError(
                f"record {index}: its properties have {size} bytes where it waits; {most} leave room for what is added later",
                code="PROPERTIES_SIZE_EXCEEDED",
            )
    return run
