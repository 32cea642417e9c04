"""The put-time rule for messages with a time of their own: they are stored in ``rmq_sys_wheel_timer`` (spec 12.2).

:mod:`commitmq.semantics.timer` has the rule for one record. Here it is for runs, whose messages may have different times.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.config.schema import TimerConfig
from commitmq.format.constants import Property
from commitmq.format.record import parts_of
from commitmq.semantics import timer
from commitmq.store.log.property_numbers import longs
from commitmq.store.log.readdressing import Found, find, sizes_of, starts_of
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.writer.send_checks import Refusal
from commitmq.workers.writer.slot_limit import SlotLimit

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
