"""A log made of given records and the index files of it, through the real code without a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from commitmq.format.file_names import segment_name
from commitmq.format.index import IndexShape, list_index_files
from commitmq.format.record import Record, encode_filler, encode_record
from commitmq.log import get_log
from commitmq.store.index.index_files import IndexFiles
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker

SEGMENT_BYTES = 65_536


@dataclass
class IndexStore:
    """``root`` holds commitlog/, index/, run/ and the state; ``records`` is what the log has, with places."""

    root: Path
    shape: IndexShape = field(default_factory=lambda: IndexShape(7, 20))
    records: list[Record] = field(default_factory=list)
    end: int = 0
    clock: Callable[[], datetime] = datetime.now

    def __post_init__(self) -> None:
        (self.root / "run").mkdir(parents=True, exist_ok=True)
        (self.root / "commitlog").mkdir(exist_ok=True)

    @property
    def folder(self) -> Path:
        return self.root / "index"

    @property
    def log(self) -> CommitLog:
        return CommitLog(self.root / "commitlog", SEGMENT_BYTES)

    def append(self, records: Iterable[Record]) -> list[Record]:
        """Store the records behind the log's end; returns them with their places."""
        placed = []
        for record in records:
            left = SEGMENT_BYTES - self.end % SEGMENT_BYTES
            if len(encode_record(record)) + 8 > left:
                self._write(encode_filler(left))
                self.end += left
            put = replace(record, physical_offset=self.end)
            data = encode_record(put)
            self._write(data)
            self.end += len(data)
            placed.append(replace(put, total_size=len(data)))
        self.records += placed
        return placed

    def _write(self, data: bytes) -> None:
        base = self.end // SEGMENT_BYTES * SEGMENT_BYTES
        path = self.root / "commitlog" / segment_name(base)
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.truncate(SEGMENT_BYTES)
            file.seek(self.end - base)
            file.write(data)

    def files(self) -> IndexFiles:
        """The writing side, not opened yet."""
        return IndexFiles(
            self.folder,
            self.shape,
            self.log,
            get_log("test"),
            state_path=self.root / "files.json",
            run=self.root / "run",
            clock=self.clock,
        )

    def index(self, files: IndexFiles, position: int, *, end: int | None = None, batch_rows: int = 5) -> int:
        """Hand the log from ``position`` on to ``files``, in small batches; returns the end."""
        limit = self.end if end is None else end
        walker = LogWalker(self.log, max_rows=batch_rows, max_bytes=1 << 20)
        while position < limit:
            batch = walker.walk(position, limit)
            files.insert(batch)
            position = batch.end
        return position

    def build(self, *, clean: bool = True, batch_rows: int = 5) -> None:
        """Open, index everything, close in order."""
        self.new_node()
        files = self.files()
        position = files.open(clean=clean, index_timestamp=0, log_end=self.end)
        files.close(self.index(files, position, batch_rows=batch_rows))

    def new_node(self) -> None:
        """What the start of a node does to ``run/``."""
        with suppress(FileNotFoundError):
            (self.root / "run" / "index.written").unlink()

    def contents(self) -> list[bytes]:
        """The files' bytes, oldest first."""
        return [(self.folder / name).read_bytes() for name in self.names()]

    def names(self) -> list[str]:
        return list_index_files(self.folder)
