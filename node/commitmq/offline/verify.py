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
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq.errors import CommitMQError
from commitmq.offline.extents import Extent, extents
from commitmq.offline.held_store import HeldStore
from commitmq.offline.verify_index import IndexCheck
from commitmq.offline.verify_queues import QueueCheck
from commitmq.store import json_config
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.commit_log import CommitLog
from commitmq.store.dispatch_batch import LogWalker
from commitmq.store.layout import segment_name

MAX_FINDINGS: Final = 10_000

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
        queues = QueueCheck(self._layout, self._store.config, deleted, self._attributes, self._tell)
        index = IndexCheck(self._layout, self._store.config, bases[0], self._tell)
        walker = LogWalker(
            log,
            max_rows=self._store.config.dispatch.batch_messages,
            max_bytes=self._store.config.dispatch.batch_bytes,
        )
        done = 0
        try:
            for base in bases:
                for extent in self._good_extents(log, base, bases):
                    position = extent.start
                    while position < extent.end:
                        batch = walker.walk(position, extent.end)
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

    def _good_extents(self, log: CommitLog, base: int, bases: list[int]) -> Iterator[Extent]:
        """The stretches of whole records in the segment at ``base``; what is between them is told."""
        for extent in extents(log, base, bases):
            if not extent.damage:
                yield extent
                continue
            path = self._layout.commit_log / segment_name(base)
            is_note = extent.is_torn_end and self._was_open
            self._tell("log.record", path, extent.start - base, extent.end - extent.start, extent.damage, is_note)

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

    def _attributes(self, topic: str) -> dict[str, str] | None:
        try:
            return self._store.topic_attributes(topic)
        except CommitMQError:
            return None  # told already

    def _tombstones(self) -> dict[str, int]:
        try:
            data = orjson.loads((self._layout.own / "deleted_topics.json").read_bytes())
            return {str(name): int(offset) for name, offset in data.items()}
        except (OSError, ValueError):
            return {}
