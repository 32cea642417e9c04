"""How far each delay level is, on disk: RocketMQ's ``config/delayOffset.json``, and ``commitmq/schedule.json`` beside it.

``delayOffset.json`` (spec 12.1) has the next queue offset of each level. ``schedule.json`` has the same offsets, the
position in the log from which deliveries of later messages are found (:mod:`commitmq.workers.runtime.moved_before`), and
the data versions of ``delayOffset.json`` before and after it was written. Another version means that RocketMQ used the
store meanwhile: its offsets count then. RocketMQ delivers a message again after a crash; here the log is read from the
first message on that is not done, so each is delivered once also after RocketMQ's own death.

A damaged file is set aside, and its previous generation counts, or else the other file. Where nothing is left, all messages
that the log still has are looked at again: those whose delivery is found in the log are passed over.

After a cut of the log that took deliveries, earlier positions count (:mod:`commitmq.workers.runtime.mover_positions`).

``schedule.json`` is written first. It is durable before ``delayOffset.json`` changes, and both are written only when
everything delivered before them is flushed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from commitmq import failpoints
from commitmq.files.aside import DamagedFileError, set_aside
from commitmq.log import Log
from commitmq.semantics.delay import MAX_LEVEL
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion
from commitmq.workers.runtime.mover_positions import Trail

UNKNOWN: Final = -1
_MOST: Final = (1 << 63) - 1


@dataclass(slots=True)
class Progress:
    """``offsets``: the next queue offset by level. ``log``: where deliveries behind them begin in the log, or UNKNOWN."""

    offsets: dict[int, int] = field(default_factory=dict)
    log: int = UNKNOWN


class ProgressFiles:
    """The two files. One process uses them."""

    def __init__(self, layout: StoreLayout, log: Log, flushed: Callable[[], int] = lambda: 0) -> None:
        """``flushed``: everything in the CommitLog below it is durable now."""
        self._log, self._flushed = log, flushed
        self._trail = Trail()
        self._theirs = layout.config / "delayOffset.json"
        self._ours = layout.own / "schedule.json"
        self._version = DataVersion()
        self._next: DataVersion | None = None
        """What a call that failed may have left in ``delayOffset.json``."""

    def load(self) -> Progress:
        """What the files say. Levels that they do not name begin at 0. Raises StoreError or OSError for a file that cannot be
        read now, or not be set aside.
        """
        while True:
            try:
                return self._read()
            except DamagedFileError as error:
                aside = set_aside(error.damaged)
                self._log.error("the positions of delay levels are damaged", error=str(error), kept_as=str(aside))

    def _read(self) -> Progress:
        theirs = json_config.load_table(self._theirs)
        data = theirs or {}
        with _shape_of(self._theirs):
            self._version, self._next = DataVersion.from_json(data.get("dataVersion")), None
            offsets = _levels(data.get("offsetTable") or {})
        ours = json_config.load_table(self._ours) or {}
        self._trail = Trail()
        with _shape_of(self._ours):
            if (ours and theirs is None) or _as_list(self._version) in ours.get("versions", ()):
                if not UNKNOWN <= (log := int(ours["log"])) <= _MOST:
                    raise ValueError(f"there is no position {log} in a log")
                self._trail = Trail.from_json(ours.get("trail"))
                return Progress(_levels(ours["offsets"]), log)
        return Progress(offsets)

    def store(self, progress: Progress) -> None:
        """Write both. Raises StoreError or OSError; the same call may be repeated."""
        if self._next is None:
            self._next = replace(self._version)
            self._next.advance()
        versions = [_as_list(self._version), _as_list(self._next)]
        table = dict(sorted(progress.offsets.items()))
        self._trail.note(self._flushed(), [progress.log, [*table.items()]])
        ours = {"log": progress.log, "offsets": table, "versions": versions}
        json_config.persist(self._ours, {**ours, "trail": self._trail.to_json()})
        if failpoints.ACTIVE:
            failpoints.hit("schedule.between_files")
        json_config.persist(self._theirs, {"dataVersion": self._next.to_json(), "offsetTable": table})
        self._version, self._next = self._next, None

    def lower(self, place: int, ends: Callable[[int], int | None]) -> bool:
        """The log was cut at ``place``: go back to what was delivered by then; where nobody knows, look at all messages again.
        Whether that was needed. ``ends``: the end of a level's queue by now, None where it has none.

        Raises StoreError or OSError.
        """
        progress = self.load()
        if not self._trail.entries:  # of RocketMQ: its positions are too new only if a message itself is gone
            if (
                all(offset <= (ends(level) or 0) for level, offset in progress.offsets.items())
                and progress.log <= place
            ):
                return False
            found = None
        elif max(self._trail.end, progress.log) <= place:
            return False
        else:
            found = self._trail.cut(place)
        if found is None:
            self.store(Progress())
        else:
            log, offsets = found
            self.store(Progress(_levels(dict(offsets)), min(int(log), place)))
        return True


@contextlib.contextmanager
def _shape_of(path: Path) -> Iterator[None]:
    """Raises DamagedFileError where the content of ``path`` has another shape."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise DamagedFileError(
            f"it has another shape than positions have: {error!r}", path=json_config.loaded_path(path)
        ) from error


def _levels(table: dict[Any, Any]) -> dict[int, int]:
    found = {int(level): int(offset) for level, offset in table.items()}
    if any(offset > _MOST for offset in found.values()):
        raise ValueError("an offset has more than 63 bits")
    return {level: offset for level, offset in found.items() if 1 <= level <= MAX_LEVEL and offset >= 0}


def _as_list(version: DataVersion) -> list[int]:
    return list(version.to_json().values())
