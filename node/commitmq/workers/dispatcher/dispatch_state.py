"""The stored state of a dispatcher: ``commitmq/dispatchers/NAME.json``, written only by that dispatcher's process.

    position    physical offset below which everything is durable in the dispatcher's own files
    timestamp   store time (ms) of the newest record below it
    epoch       start of the node in which the file was opened last: the same epoch means that only the process died
    clean       closed in order
    skipped     [[start, end], …]: ranges of the log that an operator had the dispatcher skip; kept, because a
                dispatcher may go back to a position of its own after any crash
    gaps        [[start, end], …]: ranges that were deleted from the log before the dispatcher reached them
    cut_to      where the log was cut below what the dispatcher may have in its own files, which still have to go back
    to it;
                -1 otherwise

Lists keep their newest hundred entries. Each write replaces the file durably (write beside, fsync, rename, fsync). A
damaged file is set aside, and the dispatcher begins at the log's beginning. So is one whose position is inside a record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.files.disk import DamagedFileError, set_aside
from commitmq.log import Log
from commitmq.store.log.dispatch_batch import DispatchBatch

_MOST_RANGES: Final = 100
_MOST: Final = (1 << 63) - 1


@dataclass(slots=True)
class DispatchState:
    """The stored state of one dispatcher."""

    path: Path
    position: int = -1
    timestamp: int = 0
    epoch: int = -1
    clean: bool = False
    skipped: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    cut_to: int = -1

    @classmethod
    def load(cls, path: Path, log: Log) -> DispatchState:
        """The state in ``path``; a new one when there is none. Raises StoreError or OSError for a file that cannot be read
        now, or not be set aside.
        """
        try:
            return cls._read(path)
        except FileNotFoundError:
            return cls(path)
        except DamagedFileError as error:
            return cls.start_over(path, log, error)
        except OSError as error:
            raise StoreError(f"the state of a dispatcher cannot be read: {error.strerror}", path=path) from error

    @classmethod
    def start_over(cls, path: Path, log: Log, error: DamagedFileError) -> DispatchState:
        """A new state; the damaged file is set aside. Raises OSError."""
        aside = set_aside(path)
        log.error("a dispatcher starts over: its state is damaged", error=str(error), kept_as=str(aside))
        return cls(path)

    @classmethod
    def _read(cls, path: Path) -> DispatchState:
        try:
            data: dict[str, Any] = orjson.loads(path.read_bytes())
            position, timestamp, epoch = (int(data[name]) for name in ("position", "timestamp", "epoch"))
            skipped, gaps = ([(int(start), int(end)) for start, end in data[name]] for name in ("skipped", "gaps"))
            cut_to = int(data["cut_to"])
            if max(position, timestamp, epoch, cut_to, *(max(one) for one in [*skipped, *gaps])) > _MOST:
                raise ValueError("a number has more than 63 bits")
            return cls(path, position, timestamp, epoch, bool(data["clean"]), skipped, gaps, cut_to)
        except IsADirectoryError as error:
            raise DamagedFileError("it is a folder", path=path) from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DamagedFileError(f"not the state of a dispatcher: {error!r}", path=path) from error

    def save(self) -> None:
        """Replace the file, durably. When it raises StoreError, the old file is unchanged."""
        data = {
            "position": self.position,
            "timestamp": self.timestamp,
            "epoch": self.epoch,
            "clean": self.clean,
            "skipped": self.skipped[-_MOST_RANGES:],
            "gaps": self.gaps[-_MOST_RANGES:],
            "cut_to": self.cut_to,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(self.path, orjson.dumps(data), "dispatcher_state")
        except OSError as error:
            raise StoreError(f"cannot write the dispatcher's state: {error.strerror}", path=self.path) from error

    def lower(self, place: int) -> bool:
        """The log was cut at ``place``. The dispatcher's own files may lead further than its position, and go back when it is
        opened. Whether anything was to be lowered. Raises StoreError.
        """
        was_behind = self.position > place
        self.position = min(self.position, place)
        self.cut_to = place if self.cut_to < 0 else min(self.cut_to, place)
        self.skipped = [(start, min(end, place)) for start, end in self.skipped if start < place]
        self.gaps = [(start, min(end, place)) for start, end in self.gaps if start < place]
        self.save()
        return was_behind

    def without_skipped(self, batch: DispatchBatch) -> DispatchBatch:
        """``batch`` without the skipped records; its range stays."""
        overlapping = [one for one in self.skipped if one[0] < batch.end and one[1] > batch.start]
        if not overlapping:
            return batch
        offsets = batch.rows["physical_offset"]
        keep = np.ones(len(offsets), np.bool_)
        for start, end in overlapping:
            keep &= (offsets < start) | (offsets >= end)
        return DispatchBatch(batch.start, batch.end, batch.rows[keep], batch.topics, batch.log)
