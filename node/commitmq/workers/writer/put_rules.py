"""What happens to a message with a property of message semantics when it is put: it is stored where it waits (spec 12.1,
12.3).

The check of a run tells in a word whether any record carries such a property, so plain runs pay nothing. A run has one
destination: the client puts messages of one delay level into one run, and messages with times of their own into another.

How many messages may be due in the same second: RocketMQ's ``timerCongestNumEachSlot`` (spec 12.2).

While a slot of the wheel has more messages than the limit, further ones are refused at random, the more the fuller it is; with
twice the limit all are. The file of the wheel says what a slot had when this writer first saw a message for it. From then on
the writer counts what it takes itself, for the timer puts messages into the wheel a moment later. A cancellation is
never refused. Messages that a transaction commits are not counted before they are in the wheel.

The put-time rule for messages with a time of their own: they are stored in ``rmq_sys_wheel_timer`` (spec 12.2).

:mod:`commitmq.semantics.timer` has the rule for one record. Here it is for runs, whose messages may have different times.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.config import NodeConfig
from commitmq.config.schema import TimerConfig
from commitmq.files import disk
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
from commitmq.format.timer_wheel import SLOT_BYTES, decode_slot
from commitmq.semantics import delay, timer, transaction
from commitmq.semantics.timer import REQUESTS, TIMER_TOPIC, TimerRules, refused_share, slot_for, slot_index
from commitmq.store.layout import StoreLayout
from commitmq.store.log.append import longs
from commitmq.store.log.readdressing import Found, Target, find, readdress, sizes_of, starts_of
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, CheckedRun, MessageIllegalError, RunCheck
from commitmq.workers.writer.send_checks import Refusal

_MOST_SLOTS: Final = 65_536
_PRECISION_MS: Final = 1_000
_RETRY_MS: Final = 1_000  # then a delay leads to another slot
_OFF: Final = 2**31 - 1


class SlotLimit:
    """``wheel`` is the path of the file ``timerwheel``. ``draw`` gives a number from 0 to 1."""

    def __init__(self, wheel: Path, limit: int, draw: Callable[[], float] = random.random) -> None:
        self._wheel = wheel
        self._rules = TimerRules(congest_count=limit)
        self._draw = draw
        self._counts: dict[int, int] = {}
        """By the slot's time, in the order in which they were first seen."""

    def take(self, slots_ms: NDArray[np.int64], *, counts: bool = True) -> None:
        """Count messages of one run for the slots ``slots_ms``, all or none. Raises Refusal.

        Without ``counts`` it is a look: the messages are not stored in the wheel now.
        """
        limit = self._rules.congest_count
        if limit >= _OFF:
            return
        slots, numbers = np.unique(slots_ms, return_counts=True)
        totals: dict[int, int] = {}
        for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True):
            before = self._count(slot)
            totals[slot] = before + number
            if totals[slot] > 2 * limit or (before > limit and self._draw() < refused_share(before, self._rules)):
                raise Refusal(
                    "WHEEL_TIMER_FLOW_CONTROL",
                    f"{before} messages are due in the same second as {number} of this send; more than {limit}"
                    f" (timer.slot_messages) are refused at random, more than {2 * limit} always",
                    _RETRY_MS,
                )
        if counts:
            self._counts.update(totals)
            if len(self._counts) > _MOST_SLOTS:
                self._forget()

    def _count(self, slot_ms: int) -> int:
        if slot_ms in self._counts:
            return self._counts[slot_ms]
        try:
            with disk.opened(self._wheel, os.O_RDONLY, "timerwheel") as fd:
                raw = os.pread(fd, SLOT_BYTES, slot_index(slot_ms) * SLOT_BYTES)
        except OSError:
            return 0  # the timer has not made it yet
        slot = slot_for(decode_slot(raw, 0), slot_ms) if len(raw) == SLOT_BYTES else None
        return 0 if slot is None else max(0, slot.messages)

    def _forget(self) -> None:
        """Slots that have passed; then, if need be, the oldest half: the file knows them by now."""
        now_ms = time.time_ns() // 1_000_000 - _PRECISION_MS
        kept = [slot for slot in self._counts if slot > now_ms]
        if len(kept) > _MOST_SLOTS // 2:
            kept = kept[len(kept) - _MOST_SLOTS // 2 :]
        self._counts = {slot: self._counts[slot] for slot in kept}


PRECISION_MS: Final = 1_000
_ILLEGAL: Final = "WHEEL_TIMER_MSG_ILLEGAL"
_MOST_MS: Final = 1 << 50  # further away than any limit, and no sum with it overflows
_NAMES: Final = (*timer.REQUESTS, Property.TIMER_DELETE_KEY)
_SCALES: Final = (1000, 1, 1)


class TimerRule:
    """Finds the times of a run's messages, and the properties that they get."""

    def __init__(self, config: TimerConfig, wheel: Path) -> None:
        """``wheel``: the path of the file ``timerwheel``."""
        self._config = config
        self._slots = SlotLimit(wheel, config.slot_messages)

    def properties(self, run: CheckedRun, topic: str, queue_id: int, *, is_stored: bool = True) -> list[bytes] | None:
        """The encoded properties that each message of ``run`` gets in the timer topic; None when the times of all have
        passed: then they are plain messages.

        A message whose time has passed goes with the others of its run, and is delivered at once. ``is_stored``: it will be
        stored in the timer topic now. Raises Refusal.
        """
        if not self._config.enable:
            raise Refusal("WHEEL_TIMER_NOT_ENABLE", "this node delivers no messages at a time (timer.enable is false)")
        found = find(run.data, starts_of(run), sizes_of(run), _NAMES)
        now_ms = time.time_ns() // 1_000_000
        asked = _asked(found, now_ms)
        passed = asked <= now_ms
        if (passed & (found.lengths[3] > 0)).any():
            raise Refusal(_ILLEGAL, "a cancellation must come before the time of delivery")
        late_ms = int(asked.max()) - now_ms
        if late_ms > self._config.max_delay_ms:
            sentence = f"the message is due in {late_ms} ms, timer.max_delay_ms allows {self._config.max_delay_ms}"
            raise Refusal(_ILLEGAL, sentence)
        if passed.all():
            return None
        exact = asked % PRECISION_MS == 0
        out = np.where(exact, asked - PRECISION_MS, asked - asked % PRECISION_MS)
        self._slots.take(out[~passed & (found.lengths[3] == 0)], counts=is_stored)
        rest = f"{Property.REAL_TOPIC}\x01{topic}\x02{Property.REAL_QUEUE_ID}\x01{queue_id}\x02"
        times, numbers = np.unique(out, return_inverse=True)
        encoded = [f"{Property.TIMER_OUT_MS}\x01{one}\x02{rest}".encode() for one in times.tolist()]
        return [encoded[number] for number in numbers.tolist()]


def due_of(more: bytes) -> int:
    """The slot (ms) in properties that :meth:`TimerRule.properties` has made."""
    return int(more[len(Property.TIMER_OUT_MS) + 1 :].partition(b"\x02")[0])


def _asked(found: Found, now_ms: int) -> NDArray[np.int64]:
    """When each message is to be delivered. Raises Refusal."""
    asked: NDArray[np.int64] = np.zeros(found.starts.shape[1], np.int64)
    known: NDArray[np.bool_] = np.zeros(len(asked), np.bool_)
    for name, (row, scale) in enumerate(zip(timer.REQUESTS, _SCALES, strict=True)):
        there = (found.lengths[name] > 0) & ~known
        if not there.any():
            continue
        values, good = longs(found.data, found.starts[name], np.where(there, found.lengths[name], 0))
        if (there & ~good).any():
            text = found.value(name, int(np.argmax(there & ~good))).decode("utf-8", "replace")
            raise Refusal(_ILLEGAL, f"the property {row} is no number: {text!r:.80}")
        times = np.clip(values, -_MOST_MS, _MOST_MS) * scale
        asked[there] = (times if row == Property.TIMER_DELIVER_MS else times + now_ms)[there]
        known |= there
    if not known.all():
        raise Refusal(
            "MESSAGE_ILLEGAL",
            f"all messages of a run need a time of delivery, or none: give {', '.join(timer.REQUESTS)}, or send several runs",
        )
    return asked


def without_requests(run: CheckedRun) -> CheckedRun:
    """``run`` without the requests for a timer: a delay level wins over them, and they are not stored."""
    names = tuple(name.encode() + b"\x01" for name in timer.REQUESTS)
    records = [_without(run.data[start:end], names) for start, end in zip(starts_of(run), run.ends, strict=True)]
    ends = np.cumsum([len(one) for one in records], dtype=np.int64)
    return CheckedRun(np.frombuffer(b"".join(records), np.uint8), ends, run.count, run.special, run.moved)


def _without(record: NDArray[np.uint8], names: tuple[bytes, ...]) -> bytes:
    data = record.tobytes()
    parts = parts_of(data)
    at, size = parts.properties, parts.properties_bytes
    pairs = [one for one in data[at : at + size].split(b"\x02") if one and not one.startswith(names)]
    text = b"".join(one + b"\x02" for one in pairs)
    total = at + len(text)
    return total.to_bytes(4, "big") + data[4 : at - 2] + len(text).to_bytes(2, "big") + text


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
