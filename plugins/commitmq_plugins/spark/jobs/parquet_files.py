"""Writes messages into Parquet files of bounded size, one folder for each topic and day.

This runs in Spark's Python workers. Memory is bounded: rows wait until a row group of their file is full, and when all
waiting rows together become too many, the file with the most is written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from commitmq import failpoints
from commitmq.files.disk import sync_folder
from commitmq_plugins.spark.jobs.manifest import PART_PREFIX, DataFile, make_folder

_ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
_MAX_WAITING_BYTES: Final = 128 * 1024 * 1024
_MAX_OPEN: Final = 64
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

REPORT_SCHEMA: Final = (
    "path string, topic string, date string, rows bigint, bytes bigint, "
    "first_ms bigint, last_ms bigint, malformed bigint"
)
"""A task's report of each of its files; ``malformed`` is the number of bodies that could not be parsed."""


def date_of(day: int) -> str:
    """The date (UTC) of a number of days since 1970."""
    return (_EPOCH + timedelta(days=day)).strftime("%Y-%m-%d")


def folder_of(topic: str, date: str) -> str:
    """The folder of a topic's day, in Hive's naming of partitions: special characters of a path are written as ``%XX``."""
    return f"topic={quote(topic, safe='-_.~ ')}/date={date}"


class _File:
    """One file in progress: waiting rows, and the writer once there is a row group."""

    __slots__ = ("data", "first_ms", "last_ms", "malformed", "rows", "sink", "waiting", "waiting_bytes", "writer")

    def __init__(self, data: DataFile) -> None:
        self.data = data
        self.waiting: list[pa.RecordBatch] = []
        self.waiting_bytes = self.rows = self.malformed = 0
        self.first_ms = self.last_ms = 0
        self.sink: Any = None
        self.writer: Any = None


class FileWriter:
    """Takes record batches with the columns ``topic`` and ``store_timestamp``; all other columns go into the files."""

    def __init__(self, root: Path, number: int, max_bytes: int) -> None:
        """``number``: the commit of the files; ``max_bytes``: a file ends at the first row group beyond it."""
        self._root = root
        self._number = number
        self._max_bytes = max_bytes
        self._open: dict[tuple[str, int], _File] = {}
        self._waiting_bytes = 0
        self._finished: list[dict[str, Any]] = []

    def take(self, batch: pa.RecordBatch) -> None:
        """Write the rows of ``batch`` into the files of their topics and days."""
        for (topic, day), part in _by_folder(batch):
            key = (topic, day)
            file = self._open.pop(key, None) or self._new(topic, day)
            self._open[key] = file  # keeps the files in order of last use
            self._put(file, part)
            if file.waiting_bytes >= min(_ROW_GROUP_BYTES, self._max_bytes):
                self._write(file)
                if file.sink.tell() >= self._max_bytes:
                    self._finish(key)
            while self._waiting_bytes > _MAX_WAITING_BYTES:
                self._write(max(self._open.values(), key=lambda one: one.waiting_bytes))
            if len(self._open) > _MAX_OPEN:
                self._finish(next(iter(self._open)))

    def close(self) -> list[dict[str, Any]]:
        """Finish all files. Returns their reports, in the form of :data:`REPORT_SCHEMA`."""
        for key in list(self._open):
            self._finish(key)
        return self._finished

    def _new(self, topic: str, day: int) -> _File:
        date = date_of(day)
        # Every attempt uses a new name: of several attempts at a task only the files of one are committed.
        name = f"{PART_PREFIX}{self._number:08}-{secrets.token_hex(8)}.parquet"
        return _File(DataFile(f"{folder_of(topic, date)}/{name}", topic, date, 0, 0, 0, 0))

    def _put(self, file: _File, part: pa.RecordBatch) -> None:
        times = pc.min_max(part.column("store_timestamp").cast(pa.int64()))
        first, last = times["min"].as_py() // 1000, times["max"].as_py() // 1000
        file.first_ms = min(file.first_ms, first) if file.rows else first
        file.last_ms = max(file.last_ms, last) if file.rows else last
        if "value" in part.schema.names:
            file.malformed += part.column("value").null_count
        file.rows += part.num_rows
        rest = part.drop_columns(["topic"])
        # Hold a copy of the rows, not the batch that they are a part of.
        file.waiting.append(rest)
        file.waiting_bytes += rest.nbytes
        self._waiting_bytes += rest.nbytes

    def _write(self, file: _File) -> None:
        if not file.waiting:
            return
        table = pa.Table.from_batches(file.waiting)
        if file.writer is None:
            path = self._root / file.data.unfinished_path
            make_folder(path.parent)
            file.sink = path.open("xb")
            file.writer = pq.ParquetWriter(file.sink, table.schema, compression="zstd", coerce_timestamps="us")
        if failpoints.ACTIVE:
            failpoints.hit("export.before_write")
        file.writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting_bytes -= file.waiting_bytes
        file.waiting, file.waiting_bytes = [], 0

    def _finish(self, key: tuple[str, int]) -> None:
        file = self._open.pop(key)
        self._write(file)
        file.writer.close()
        file.sink.flush()
        os.fsync(file.sink.fileno())
        size = file.sink.tell()
        file.sink.close()
        sync_folder((self._root / file.data.path).parent)
        if failpoints.ACTIVE:
            failpoints.hit("export.after_file")
        self._finished.append(
            {
                "path": file.data.path,
                "topic": file.data.topic,
                "date": file.data.date,
                "rows": file.rows,
                "bytes": size,
                "first_ms": file.first_ms,
                "last_ms": file.last_ms,
                "malformed": file.malformed,
            }
        )


def _by_folder(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], pa.RecordBatch]]:
    """The rows of ``batch`` by topic and day of storing, in the batch's order."""
    if not batch.num_rows:
        return
    topics = batch.column("topic").dictionary_encode()
    # No real clock is before 1970; such a time counts as the first day.
    days = np.maximum(np.asarray(batch.column("store_timestamp").cast(pa.int64())), 0) // _DAY_US
    groups = np.asarray(topics.indices).astype(np.int64) * (1 << 32) + days
    found, which = np.unique(groups, return_inverse=True)
    for number, group in enumerate(found.tolist()):
        part = batch if len(found) == 1 else batch.take(pa.array(np.flatnonzero(which == number)))
        yield (topics.dictionary[group >> 32].as_py(), group & 0xFFFFFFFF), part
