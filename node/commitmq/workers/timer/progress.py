"""How far the timer is, on disk: RocketMQ's ``config/timercheck``, and ``commitmq/timer.json`` beside it (spec 12.2).

``timercheck`` has the slot to deliver next and the next queue offset of the timer topic. ``timer.json`` has the same,
the end of the timer log that belongs to them, the position in the log from which deliveries of later messages are found
(:mod:`commitmq.workers.runtime.run_mover`), and the data versions of ``timercheck`` before and after it was written.
Another version means that RocketMQ used the store in the meantime: its positions count then, and the wheel and the
timer log are rebuilt from the timer topic.

A damaged file is set aside, and what it said is not known: wheel and timer log are rebuilt then, and messages whose
delivery is found in the log are skipped.

After a cut of the log that took deliveries, earlier positions count (:mod:`commitmq.workers.runtime.mover_positions`).

``timer.json`` is written first, and both only when all that they speak of is durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.files.disk import DamagedFileError
from commitmq.format.timer import TimerCheck, decode_check, encode_check
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.json_config import DataVersion
from commitmq.workers.runtime.mover_positions import MOST_OFFSET, UNKNOWN, ProgressPair

_MOST_AHEAD_MS: Final = 10 * 365 * 86_400_000  # a clock that was wrong may have been ahead


class ClockSetBack(NamedTuple):
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
class TimerProgress:
    """``read_ms``: slots before it are delivered. ``queue_offset``: messages before it are in the wheel, or delivered.

    ``log``: deliveries that these two do not speak of lie behind it in the CommitLog; UNKNOWN where nobody wrote it
    down. ``log_end``: the end of the timer log. ``is_whole``: wheel and timer log fit to this; else they are rebuilt.
    ``set_backs``: what to know of messages of the queue that are before the last of them, in their order.
    """

    read_ms: int = 0
    queue_offset: int = 0
    log: int = UNKNOWN
    log_end: int = 0
    is_whole: bool = False
    set_backs: tuple[ClockSetBack, ...] = ()


class TimerProgressFiles(ProgressPair[TimerProgress, TimerCheck]):
    """The two files."""

    def __init__(self, layout: StoreLayout, log: Log, flushed: Callable[[], int] = lambda: 0) -> None:
        theirs, ours = layout.config / "timercheck", layout.own / "timer.json"
        super().__init__(theirs, ours, "the positions of the timer", log, flushed)

    def _decode(self, theirs: TimerCheck | None, ours: dict[Any, Any], *, ours_counts: bool) -> TimerProgress:
        set_backs = tuple(ClockSetBack(*map(int, one)) for one in ours.get("set_backs", ()))
        if not ours_counts:
            check = theirs or TimerCheck(0, 0, 0, 0)
            return TimerProgress(
                check.last_read_ms, min(check.queue_offset, check.master_queue_offset), set_backs=set_backs
            )
        read_ms, offset, log, end = (int(ours[name]) for name in ("read_ms", "queue_offset", "log", "log_end"))
        if not 0 <= read_ms <= _latest_ms() or min(offset, end, log + 1) < 0 or max(offset, end, log) > MOST_OFFSET:
            raise ValueError("a time or an offset that no timer wrote")
        return TimerProgress(read_ms, offset, log, end, bool(ours["is_whole"]) and theirs is not None, set_backs)

    def _read_theirs(self) -> tuple[DataVersion, TimerCheck] | None:
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
        return DataVersion(check.counter, check.state_version, check.timestamp), check

    def store(self, progress: TimerProgress, *, first_offset: int = 0) -> None:
        """Write both. Raises StoreError or OSError; the same call may be repeated. While the wheel is rebuilt, RocketMQ
        shall take everything from ``first_offset`` on: it may deliver again, and loses nothing.
        """

        def theirs(version: DataVersion) -> None:
            if failpoints.ACTIVE:
                failpoints.hit("timer.between_files")
            offset = progress.queue_offset if progress.is_whole else first_offset
            numbers = version.state_version, version.timestamp, version.counter
            check = TimerCheck(progress.read_ms, progress.log_end, offset, offset, *numbers)
            atomic_file.replace(self._theirs, encode_check(check), "timercheck")

        ours = {**asdict(progress), "set_backs": [list(one) for one in progress.set_backs]}
        self._write(ours, [progress.read_ms, progress.queue_offset, progress.log], theirs)

    def lower(self, place: int, end: int | None) -> bool:
        """The log was cut at ``place``: go back to what was delivered by then; where nobody knows, look at all messages again.
        Whether that was needed. ``end``: of the timer topic's queue by now, None where it has none.

        Raises StoreError or OSError.
        """
        progress = self.load()
        if not self._is_too_new(place, progress.log, lambda: progress.queue_offset <= (end or 0)):
            return False
        read_ms, offset, log = map(int, self._trail.cut(place) or (0, 0, UNKNOWN))
        known = tuple(one for one in progress.set_backs if one.queue_offset <= offset and one.log <= place)
        self.store(TimerProgress(read_ms, offset, min(log, place), set_backs=known))
        return True


def _latest_ms() -> int:
    return time.time_ns() // 1_000_000 + _MOST_AHEAD_MS
