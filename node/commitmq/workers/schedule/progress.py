"""How far each delay level is, on disk: RocketMQ's ``config/delayOffset.json``, and ``commitmq/schedule.json`` beside
it.

``delayOffset.json`` (spec 12.1) has the next queue offset of each level. ``schedule.json`` has the same offsets, the
position in the log from which deliveries of later messages are found (:mod:`commitmq.workers.runtime.run_mover`), and
the data versions of ``delayOffset.json`` before and after it was written. Another version means that RocketMQ used the
store in the meantime: its offsets count then. RocketMQ delivers a message again after a crash; here the log is read
from the first message on that is not done, so each is delivered once also after RocketMQ's own death.

A damaged file is set aside, and its previous generation counts, or else the other file. Where nothing is left, all
messages that the log still has are looked at again: those whose delivery is found in the log are skipped.

After a cut of the log that took deliveries, earlier positions count (:mod:`commitmq.workers.runtime.mover_positions`).

``schedule.json`` is written first. It is durable before ``delayOffset.json`` changes, and both are written only when
everything delivered before them is flushed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from commitmq import failpoints
from commitmq.log import Log
from commitmq.semantics.delay import MAX_LEVEL
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion
from commitmq.workers.runtime.mover_positions import MOST_OFFSET, UNKNOWN, ProgressPair, shape_of


@dataclass(slots=True)
class ScheduleProgress:
    """``offsets``: the next queue offset by level. ``log``: where deliveries behind them begin in the log, or UNKNOWN."""

    offsets: dict[int, int] = field(default_factory=dict)
    log: int = UNKNOWN


class ScheduleProgressFiles(ProgressPair[ScheduleProgress, dict[int, int]]):
    """The two files. Levels that they do not name begin at 0."""

    def __init__(self, layout: StoreLayout, log: Log, flushed: Callable[[], int] = lambda: 0) -> None:
        theirs, ours = layout.config / "delayOffset.json", layout.own / "schedule.json"
        super().__init__(theirs, ours, "the positions of delay levels", log, flushed)

    def _read_theirs(self) -> tuple[DataVersion, dict[int, int]] | None:
        if (table := json_config.load_table(self._theirs)) is None:
            return None
        with shape_of(self._theirs):
            return DataVersion.from_json(table.get("dataVersion")), _levels(table.get("offsetTable") or {})

    def _decode(self, theirs: dict[int, int] | None, ours: dict[Any, Any], *, ours_counts: bool) -> ScheduleProgress:
        if not ours_counts:
            return ScheduleProgress(theirs or {})
        if not UNKNOWN <= (log := int(ours["log"])) <= MOST_OFFSET:
            raise ValueError(f"there is no position {log} in a log")
        return ScheduleProgress(_levels(ours["offsets"]), log)

    def store(self, progress: ScheduleProgress) -> None:
        """Write both. Raises StoreError or OSError; the same call may be repeated."""
        table = dict(sorted(progress.offsets.items()))

        def theirs(version: DataVersion) -> None:
            if failpoints.ACTIVE:
                failpoints.hit("schedule.between_files")
            json_config.persist(self._theirs, {"dataVersion": version.to_json(), "offsetTable": table})

        self._write({"log": progress.log, "offsets": table}, [progress.log, [*table.items()]], theirs)

    def lower(self, place: int, ends: Callable[[int], int | None]) -> bool:
        """The log was cut at ``place``: go back to what was delivered by then; where nobody knows, look at all messages again.
        Whether that was needed. ``ends``: the end of a level's queue by now, None where it has none.

        Raises StoreError or OSError.
        """
        progress = self.load()

        def is_there() -> bool:
            return all(offset <= (ends(level) or 0) for level, offset in progress.offsets.items())

        if not self._is_too_new(place, progress.log, is_there):
            return False
        log, offsets = self._trail.cut(place) or (UNKNOWN, ())
        self.store(ScheduleProgress(_levels(dict(offsets)), min(int(log), place)))
        return True


def _levels(table: dict[Any, Any]) -> dict[int, int]:
    found = {int(level): int(offset) for level, offset in table.items()}
    if any(offset > MOST_OFFSET for offset in found.values()):
        raise ValueError("an offset has more than 63 bits")
    return {level: offset for level, offset in found.items() if 1 <= level <= MAX_LEVEL and offset >= 0}
