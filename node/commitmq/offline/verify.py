"""``store verify``: the whole of a store read and compared: the log with itself, its ConsumeQueues and index with the log.

Nothing is changed. What is wrong is a list of :class:`Finding`: what kind, in which file, where and how far, in a sentence.

    log.segment      a segment is missing, or has another size
    log.record       bytes that are no record where one must be, up to the next one that is
    log.order        queue offsets of a queue do not follow each other
    queue.missing    a record without its unit; queue.wrong: a unit that says something else than its record
    queue.extra      units that no record of the log stands for
    index.missing    a key of a record without its item; index.wrong: an item that no key of a record stands for
    index.chain      an item or a slot that leads elsewhere than to its predecessor; index.header: counts that are not so
    file.unreadable  a file that cannot be read as what it is

A store that was not closed in order (``abort`` is there) may lack units and items of its last records, and may have a torn
end: a recovery is made for those. They are told as notes, not as damage.

The log is read once, batch by batch; memory does not grow with it. Memory for queues is one small object each.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from commitmq.errors import CommitMQError
from commitmq.kernels import walk as kernel
from commitmq.offline.held_store import HeldStore
from commitmq.offline.verify_index import IndexCheck
from commitmq.offline.verify_queues import QueueCheck
from commitmq.store import json_config
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.commit_log import CommitLog
from commitmq.store.dispatch_batch import LogWalker
from commitmq.store.layout import segment_name
from commitmq.store.recovery import REASONS

MAX_FINDINGS: Final = 10_000
_MAGIC: Final = re.compile(rb"\xda\xa3\x20[\xa7\xab]")
_WINDOW_BYTES: Final = 1 << 20

Progress = Callable[[int, int], None]
"""Called with bytes of the log done and in all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be. ``offset`` and ``extent`` are bytes of ``file`` (relative to the store)."""

    kind: str
    file: str
    offset: int
    extent: int
    detail: str
    is_note: bool = False


@dataclass(slots=True)
class Report:
    """What was read, and the findings. Counts beyond :data:`MAX_FINDINGS` are in ``untold``."""

    segments: int = 0
    log_bytes: int = 0
    records: int = 0
    queues: int = 0
    units: int = 0
    index_files: int = 0
    index_items: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    untold: int = 0

    @property
    def is_sound(self) -> bool:
        """True when nothing was found but notes."""
        return not self.untold and all(one.is_note for one in self.findings)

    def add(self, finding: Finding) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
        elif not finding.is_note:
            self.untold += 1

    def to_json(self) -> dict[str, Any]:
        return {"sound": self.is_sound, **asdict(self)}


def verify(store: HeldStore, progress: Progress = lambda _done, _total: None) -> Report:
    """Read all of ``store``. Raises StoreError only when the folder of the log cannot be read at all."""
    begun = time.perf_counter()
    report = Report()
    _Verifier(store, report, progress).run()
    report.seconds = time.perf_counter() - begun
    return report


class _Verifier:
    def __init__(self, store: HeldStore, report: Report, progress: Progress) -> None:
        self._store = store
        self._layout = store.layout
        self._report = report
        self._progress = progress
        self._segment_bytes = store.config.commit_log.segment_bytes
        self._was_open = self._layout.abort.exists()

    def run(self) -> None:
        self._small_files()
        bases = self._segments()
        report = self._report
        if not bases or any(one.kind == "log.segment" for one in report.findings):
            return  # without all of the log nothing else can be judged
        log = CommitLog(self._layout.commit_log, self._segment_bytes)
        deleted = self._tombstones()
        queues = QueueCheck(self._layout, self._store.config, deleted, self._tell)
        index = IndexCheck(self._layout, self._store.config, bases[0], self._tell)
        walker = LogWalker(
            log,
            max_rows=self._store.config.dispatch.batch_messages,
            max_bytes=self._store.config.dispatch.batch_bytes,
        )
        done = 0
        try:
            for base in bases:
                for start, end in self._good_extents(log, base, bases):
                    position = start
                    while position < end:
                        batch = walker.walk(position, end)
                        queues.take(batch)
                        index.take(batch)
                        report.records += len(batch)
                        position = batch.end
                        self._progress(done + position - base, len(bases) * self._segment_bytes)
                report.segments += 1
                done += self._segment_bytes
        finally:
            walker.release()
            log.close()
        report.log_bytes = done
        report.queues, report.units = queues.finish()
        report.index_files, report.index_items = index.finish(self._was_open)

    def _tell(self, kind: str, path: Path, offset: int, extent: int, detail: str, is_note: bool = False) -> None:
        file = os.path.relpath(path, self._layout.root)
        self._report.add(Finding(kind, file, offset, extent, detail, is_note))

    # ------------------------------------------------------------ the log

    def _segments(self) -> list[int]:
        """Bases of the segments; a gap or a wrong size is told, and ends the list."""
        bases: list[int] = []
        for path in sorted(self._layout.commit_log.iterdir()):
            if len(path.name) != 20 or not path.name.isdecimal():
                continue
            size = path.stat().st_size
            if size != self._segment_bytes:
                self._tell("log.segment", path, 0, size, f"it has {size} bytes, the others {self._segment_bytes}")
                break
            base = int(path.name)
            if bases and base != bases[-1] + self._segment_bytes:
                missing = (base - bases[-1]) // self._segment_bytes - 1
                self._tell("log.segment", path, 0, 0, f"{missing} segment(s) before this one are missing")
                break
            bases.append(base)
        return bases

    def _good_extents(self, log: CommitLog, base: int, bases: list[int]) -> Iterator[tuple[int, int]]:
        """Stretches of whole records in the segment at ``base``; what is between them is told."""
        segment = np.frombuffer(log.read(base, self._segment_bytes), np.uint8)
        out = np.zeros(5, np.int64)
        position = 0
        while position < segment.size:
            result = kernel.scan(segment, position, segment.size, base, False, out)
            good_end, reason = int(out[1]), int(out[4])
            if good_end > position:
                yield base + position, base + good_end
            if result == kernel.WALK_BLANK:
                self._check_filler(segment, base, good_end)
                return
            if result != kernel.WALK_BAD:
                return
            is_written_behind = any(any(log.read(later, 8)) for later in bases if later > base)
            if not segment[good_end:].any():
                if is_written_behind:
                    self._bad(base, good_end, segment.size, "zeros, and records follow in later segments")
                return
            following = _next_record(segment, good_end + 1, base)
            why = REASONS.get(reason, f"reason {reason}")
            if following < 0:
                torn = not is_written_behind
                what = f"a torn end of the log: {why}" if torn else why
                extent_end = min(segment.size, max(_last_nonzero(segment) + 1, good_end + 8))
                self._bad(base, good_end, extent_end, what, is_note=torn and self._was_open)
                return
            self._bad(base, good_end, following, why)
            position = following

    def _check_filler(self, segment: NDArray[np.uint8], base: int, position: int) -> None:
        size = int.from_bytes(segment[position : position + 4].tobytes(), "big", signed=True)
        if size != segment.size - position:
            self._bad(base, position, position + 8, f"a filler of {size} bytes with {segment.size - position} left")

    def _bad(self, base: int, start: int, end: int, why: str, *, is_note: bool = False) -> None:
        self._tell("log.record", self._layout.commit_log / segment_name(base), start, end - start, why, is_note)

    # ------------------------------------------------------------ everything else

    def _small_files(self) -> None:
        for path in sorted(self._layout.config.glob("*.json")) if self._layout.config.is_dir() else []:
            try:
                json_config.load(path)
            except (CommitMQError, OSError) as error:
                self._tell("file.unreadable", path, 0, 0, str(error))
        try:
            Checkpoint.load(self._layout.checkpoint)
        except CommitMQError as error:
            self._tell("file.unreadable", self._layout.checkpoint, 0, 0, str(error))
        for path in sorted(self._layout.own.glob("*.json")) if self._layout.own.is_dir() else []:
            try:
                orjson.loads(path.read_bytes())
            except (json.JSONDecodeError, OSError) as error:
                self._tell("file.unreadable", path, 0, 0, str(error))

    def _tombstones(self) -> dict[str, int]:
        try:
            data = orjson.loads((self._layout.own / "deleted_topics.json").read_bytes())
            return {str(name): int(offset) for name, offset in data.items()}
        except (OSError, ValueError):
            return {}


def _next_record(segment: NDArray[np.uint8], start: int, base: int) -> int:
    """Position of the first whole record at or behind ``start`` that says it belongs there; -1 without one.

    A body may hold anything, also what looks like a record: only one with its own physical offset and right CRCs counts.
    """
    out = np.zeros(5, np.int64)
    for window in range(start, segment.size, _WINDOW_BYTES):
        data = segment[window : window + _WINDOW_BYTES + 8].tobytes()
        hits = sorted(hit.start() - 4 + window for hit in _MAGIC.finditer(data, 4))
        for position in hits:
            head = segment[position : position + 36].tobytes()
            size = int.from_bytes(head[:4], "big", signed=True)
            if int.from_bytes(head[28:36], "big", signed=True) != base + position:
                continue
            if 0 < size <= segment.size - position:
                kernel.scan(segment, position, position + size, base, False, out)
                if int(out[0]) == 1:
                    return position
    return -1


def _last_nonzero(segment: NDArray[np.uint8]) -> int:
    """Position of the last byte that is not zero; -1 without one. Looks from the end, a window at a time."""
    for stop in range(segment.size, 0, -_WINDOW_BYTES):
        start = max(0, stop - _WINDOW_BYTES)
        found = np.flatnonzero(segment[start:stop])
        if len(found):
            return start + int(found[-1])
    return -1
