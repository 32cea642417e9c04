"""How far the timer is, on disk: RocketMQ's ``config/timercheck``, and ``commitmq/timer.json`` beside it (spec 12.2).

``timercheck`` has the slot to deliver next and the next queue offset of the timer topic. ``timer.json`` has the same, the end
of the timer log that belongs to them, the position in the log from which deliveries of later messages are found
(:mod:`commitmq.workers.runtime.moved_before`), and the data versions of ``timercheck`` before and after it was written.
Another version means that RocketMQ used the store meanwhile: its positions count then, and the wheel and the timer log are
made again from the timer topic.

A damaged file is set aside, and what it said is not known: wheel and timer log are made again then, and messages whose
delivery is found in the log are passed over.

After a cut of the log that took deliveries, earlier positions count (:mod:`commitmq.workers.runtime.mover_positions`).

``timer.json`` is written first, and both only when all that they speak of is durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.files.aside import DamagedFileError, set_aside
from commitmq.format.timer_check import TimerCheck, decode_check, encode_check
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.workers.runtime.mover_positions import Trail

UNKNOWN: Final = -1
_MOST: Final = (1 << 63) - 1
_MOST_AHEAD_MS: Final = 10 * 365 * 86_400_000  # a clock that was wrong may have been ahead


class SetBack(NamedTuple):
    """The clock was set back to ``clock_ms``. Of the messages before ``queue_offset`` those were delivered whose slot lies
    before ``read_ms``, and of that slot those whose time is no later than ``due_ms``. Of the others none that asked for a
    delay waits longer than that from ``clock_ms`` on: its slot was computed by the clock that was ahead. All those
    deliveries lie before ``log`` in the CommitLog.
    """

    queue_offset: int
    read_ms: int
    due_ms: int
    clock_ms: int
    log: int


@dataclass(frozen=True, slots=True)
class Progress:
    """``read_ms``: slots before it are delivered. ``queue_offset``: messages before it are in the wheel, or delivered.

    ``log``: deliveries that these two do not speak of lie behind it in the CommitLog; UNKNOWN where nobody wrote it down.
    ``log_end``: the end of the timer log. ``is_whole``: wheel and timer log fit to this; else they are made again.
    ``set_backs``: what to know of messages of the queue that are before the last of them, in their order.
    """

    read_ms: int = 0
    queue_offset: int = 0
    log: int = UNKNOWN
    log_end: int = 0
    is_whole: bool = False
    set_backs: tuple[SetBack, ...] = ()


class ProgressFiles:
    """The two files. One process uses them."""

    def __init__(self, layout: StoreLayout, log: Log, flushed: Callable[[], int] = lambda: 0) -> None:
        """``flushed``: everything in the CommitLog below it is durable now."""
        self._log, self._flushed = log, flushed
        self._trail = Trail()
        self._theirs = layout.config / "timercheck"
        self._ours = layout.own / "timer.json"
        self._version = (0, 0, 0)
        self._next: tuple[int, int, int] | None = None
        """What a call that failed may have left in ``timercheck``."""

    def load(self) -> Progress:
        """What the files say. Raises StoreError or OSError for a file that cannot be read now, or not be set aside."""
        while True:
            try:
                return self._read()
            except DamagedFileError as error:
                aside = set_aside(error.damaged)
                self._log.error("the positions of the timer are damaged", error=str(error), kept_as=str(aside))

    def _read(self) -> Progress:
        theirs = self._check()
        check = theirs or TimerCheck(0, 0, 0, 0)
        self._version, self._next = (check.state_version, check.timestamp, check.counter), None
        ours = json_config.load_table(self._ours) or {}
        self._trail = Trail()
        try:
            set_backs = tuple(SetBack(*map(int, one)) for one in ours.get("set_backs", ()))
            if (ours and theirs is None) or list(self._version) in ours.get("versions", ()):
                read_ms, offset, log, end = (int(ours[name]) for name in ("read_ms", "queue_offset", "log", "log_end"))
                if not 0 <= read_ms <= _latest_ms() or min(offset, end, log + 1) < 0 or max(offset, end, log) > _MOST:
                    raise ValueError("a time or an offset that no timer wrote")
                self._trail = Trail.from_json(ours.get("trail"))
                return Progress(read_ms, offset, log, end, bool(ours["is_whole"]) and theirs is not None, set_backs)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            sentence = f"it has another shape than positions have: {error!r}"
            raise DamagedFileError(sentence, path=json_config.loaded_path(self._ours)) from error
        return Progress(check.last_read_ms, min(check.queue_offset, check.master_queue_offset), set_backs=set_backs)

    def _check(self) -> TimerCheck | None:
        """What RocketMQ's file says; None without one."""
        try:
            check = decode_check(self._theirs.read_bytes())
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise DamagedFileError("it is a folder", path=self._theirs) from error
        except OSError as error:
            raise StoreError(f"the timer's positions cannot be read: {error.strerror}", path=self._theirs) from error
        except StoreError as error:
            raise DamagedFileError(str(error), path=self._theirs) from error
        if not 0 <= check.last_read_ms <= _latest_ms() or min(check.queue_offset, check.master_queue_offset) < 0:
            raise DamagedFileError("it has a time or an offset that no timer wrote", path=self._theirs)
        return check

    def store(self, progress: Progress, *, first_offset: int = 0) -> None:
        """Write both. Raises StoreError or OSError; the same call may be repeated.

        While the wheel is made again, RocketMQ shall take everything from ``first_offset`` on: it may deliver again, and
        loses nothing.
        """
        state, _, counter = self._version
        self._next = self._next or (state, time.time_ns() // 1_000_000, counter + 1)
        self._trail.note(self._flushed(), [progress.read_ms, progress.queue_offset, progress.log])
        table = {
            "trail": self._trail.to_json(),
            "is_whole": progress.is_whole,
            "log": progress.log,
            "log_end": progress.log_end,
            "queue_offset": progress.queue_offset,
            "read_ms": progress.read_ms,
            "set_backs": [list(one) for one in progress.set_backs],
            "versions": [list(self._version), list(self._next)],
        }
        json_config.persist(self._ours, table)
        if failpoints.ACTIVE:
            failpoints.hit("timer.between_files")
        offset = progress.queue_offset if progress.is_whole else first_offset
        check = TimerCheck(progress.read_ms, progress.log_end, offset, offset, *self._next)
        atomic_file.replace(self._theirs, encode_check(check), "timercheck")
        self._version, self._next = self._next, None

    def lower(self, place: int, end: int | None) -> bool:
        """The log was cut at ``place``: go back to what was delivered by then; where nobody knows, look at all messages again.
        Whether that was needed. ``end``: of the timer topic's queue by now, None where it has none.

        Raises StoreError or OSError.
        """
        progress = self.load()
        if not self._trail.entries:  # of RocketMQ: its positions are too new only if a message itself is gone
            if progress.queue_offset <= (end or 0) and progress.log <= place:
                return False
            found = None
        elif max(self._trail.end, progress.log) <= place:
            return False
        else:
            found = self._trail.cut(place)
        read_ms, offset, log = (0, 0, UNKNOWN) if found is None else map(int, found)
        known = tuple(one for one in progress.set_backs if one.queue_offset <= offset and one.log <= place)
        self.store(Progress(read_ms, offset, min(log, place), set_backs=known))
        return True


def _latest_ms() -> int:
    return time.time_ns() // 1_000_000 + _MOST_AHEAD_MS
