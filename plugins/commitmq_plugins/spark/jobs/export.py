"""Exports messages as Parquet files, exactly once: each run adds new messages, and a killed run is simply repeated.

Work is done in steps of a few partitions per core. A step's tasks write files under names that no reader takes for
data. When all are done, one commit (:mod:`commitmq_plugins.spark.jobs.manifest`) adds the files and the positions
behind their last messages to the export at once. A run that dies before that has changed nothing that counts.

The driver and every executor must see the folder under the same path.

Writes messages into Parquet files of bounded size, one folder for each topic and day.

This runs in Spark's Python workers. Memory is bounded: rows wait until a row group of their file is full, and when all
waiting rows together become too many, the file with the most is written.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from commitmq import failpoints
from commitmq.errors import ConfigError
from commitmq.files.disk import sync_folder
from commitmq.format.constants import LMQ_PREFIX
from commitmq_plugins.spark.columns import COLUMNS
from commitmq_plugins.spark.jobs.manifest import (
    FOLDER,
    PART_PREFIX,
    DataFile,
    ExportError,
    Manifest,
    Positions,
    make_folder,
)
from commitmq_plugins.spark.jobs.positions import (
    News,
    behind,
    frame_of,
    map_in_arrow,
    news,
    over,
    schema_of,
    split_sources,
)
from commitmq_plugins.spark.options import SourceOptions, UnreadableRange, coalesced
from commitmq_plugins.spark.plan import Partition
from commitmq_plugins.spark.reading import read_partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


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


BODIES: Final = ("raw", "json", "csv")
DEFAULT_FILE_BYTES: Final = 128 * 1024 * 1024
DEFAULT_PARTITION_BYTES: Final = 256 * 1024 * 1024
_MALFORMED: Final = "_malformed"
_WHOLE: Final = "_whole"
_PARTITIONS_A_CORE: Final = 4
_REPORT: Final = pa.schema(
    [
        (name, pa.string() if kind == "string" else pa.int64())
        for name, kind in (column.split() for column in REPORT_SCHEMA.split(", "))
    ]
)


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the rows. ``body``: one of :data:`BODIES`; ``schema``: DDL of parsed bodies.

    A parsed body is the struct ``value``. The column ``body`` is then null, except for bodies that are no such JSON or
    CSV, and for all bodies with ``keep_body``. ``parser``: options of Spark's from_json or from_csv.
    """

    body: str = "raw"
    schema: str = ""
    keep_body: bool = False
    parser: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that do not go together."""
        if self.body not in BODIES:
            raise ConfigError(f"bodies are exported as {', '.join(BODIES)}, not {self.body!r}")
        if (self.body == "raw") == bool(self.schema):
            raise ConfigError("bodies that are parsed need a schema, and raw ones have none")

    def to_json(self) -> dict[str, Any]:
        return {"body": self.body, "schema": self.schema, "keep_body": self.keep_body, "parser": dict(self.parser)}

    @property
    def ddl(self) -> str:
        """Spark's schema of the exported rows, with the partition columns ``topic`` and ``date`` at its end."""
        rows = [f"{name} {kind}" for name, (kind, _) in COLUMNS.items() if name != "topic"]
        value = [f"value struct<{_members(self.schema)}>"] if self.schema else []
        return ", ".join([*rows, *value, "topic string", "date string"])


@dataclass(slots=True)
class Exported:
    """The counts of a run. ``gaps``: missing messages; ``malformed``: bodies that could not be parsed."""

    commits: int = 0
    messages: int = 0
    files: int = 0
    bytes: int = 0
    malformed: int = 0
    gaps: list[UnreadableRange] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "commits": self.commits,
            "messages": self.messages,
            "files": self.files,
            "bytes": self.bytes,
            "malformed": self.malformed,
            "gaps": [one.to_json() for one in self.gaps],
        }


def export(
    spark: SparkSession,
    sources: Sequence[str],
    target: Path,
    *,
    topics: Sequence[str] = (),
    form: Form | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES,
    fail_on_data_loss: bool = True,
) -> Exported:
    """Add to ``target`` every message of ``sources`` that it does not have yet.

    ``topics``: only these; by default all except light message queues, whose messages belong to other topics too. Files
    grow to ``max_file_bytes``, up to a row group more. Raises DataLossError for messages that expired or are damaged,
    unless they may be skipped; ExportError when ``target`` has another form, or another run works on it.
    """
    target = target.absolute()
    form = form or Form()
    folders, nodes = split_sources(sources)
    wanted = frozenset(topics)

    def wants(topic: str) -> bool:
        return topic in wanted if wanted else not topic.startswith(LMQ_PREFIX)

    done = Exported()
    with Manifest(target).locked():
        manifest = Manifest(target)
        if manifest.form is not None and manifest.form != form.to_json():
            raise ExportError(f"{target} was exported as {manifest.form}, not as {form.to_json()}: use another folder")
        manifest.clean()
        report = target / FOLDER / "gaps"
        options = SourceOptions(
            stores=folders,
            nodes=nodes,
            topics=tuple(topics),
            decompress=True,
            fail_on_data_loss=fail_on_data_loss,
            gap_report=str(report),
        )
        cores = spark.sparkContext.defaultParallelism
        found = news(
            options,
            wants,
            manifest.positions,
            manifest.facts,
            least=cores,
            max_bytes=max_partition_bytes,
        )
        gaps, passed = found.gaps, found.passed
        step = cores * _PARTITIONS_A_CORE
        for start in range(0, len(found.partitions), step):
            part = found.partitions[start : start + step]
            shutil.rmtree(report, ignore_errors=True)
            rows = _written(spark, part, options, form, target, len(manifest.commits) + 1, max_file_bytes)
            if failpoints.ACTIVE:
                failpoints.hit("export.after_tasks")
            gaps = coalesced([*gaps, *_reported(report)])
            _commit(manifest, form, rows, {**passed, **behind(part, found.names)}, gaps, found, done)
            gaps, passed = [], {}
        if gaps:
            _commit(manifest, form, [], passed, gaps, found, done)
        shutil.rmtree(report, ignore_errors=True)
        manifest.clean()
    return done


def exported(spark: SparkSession, root: Path, *, topics: Sequence[str] = (), commits: Sequence[int] = ()) -> DataFrame:
    """The messages of an export, by its manifest: no file that is unfinished, and no message twice. ``topics`` and
    ``commits``: only these. Raises ExportError when there is no export.
    """
    root = root.absolute()
    manifest = Manifest(root)
    if manifest.form is None:
        raise ExportError(f"{root} holds no export: it has no commit")
    paths = [
        str(root / file.path)
        for commit in manifest.commits
        for file in commit.files
        if (not commits or commit.number in commits) and (not topics or file.topic in topics)
    ]
    form = Form(**manifest.form)
    if not paths:
        return spark.createDataFrame([], form.ddl)
    # A manifest's files exist; listing their folders again would only cost time.
    return spark.read.schema(form.ddl).option("basePath", str(root)).parquet(*paths)


def _written(
    spark: SparkSession,
    partitions: Sequence[Partition],
    options: SourceOptions,
    form: Form,
    target: Path,
    number: int,
    max_file_bytes: int,
) -> list[Row]:
    """Let tasks write ``partitions`` into files that no commit names yet. Returns their reports."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = FileWriter(target, number, max_file_bytes)
        for batch in batches:
            writer.take(batch)
        yield pa.RecordBatch.from_pylist(writer.close(), _REPORT)

    names = list(COLUMNS)
    if form.body == "raw":
        # Rows never leave the Python worker.
        _, schema = schema_of(names)
        return over(spark, partitions, lambda one: write(read_partition(one, schema, options)), REPORT_SCHEMA).collect()
    rows = frame_of(spark, partitions, names, options)
    if form.body == "json":
        rows = _whole_json(rows)
    return map_in_arrow(_parsed(rows, form), write, REPORT_SCHEMA).collect()


def _whole_json(frame: DataFrame) -> DataFrame:
    """``frame`` with the column ``_whole``: whether nothing follows the first JSON value of a body. Spark's from_json
    takes the first value and silently ignores the rest.
    """

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            whole = [body is None or is_whole_json(body) for body in batch.column("body").to_pylist()]
            yield batch.append_column(_WHOLE, pa.array(whole, pa.bool_()))

    ddl = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema)
    return map_in_arrow(frame, work, f"{ddl}, {_WHOLE} boolean")


def is_whole_json(body: bytes) -> bool:
    """False when something follows the first JSON value of ``body``. Spark judges bodies that are no strict JSON at all."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body.decode("utf-8", "replace").lstrip()
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(text)
        except (ValueError, RecursionError):
            return True
        return not text[end:].strip()
    return True


def _parsed(frame: DataFrame, form: Form) -> DataFrame:
    """``frame`` with the column ``value``."""
    from pyspark.sql import functions as sql

    parse = sql.from_json if form.body == "json" else sql.from_csv
    options = {**form.parser, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _MALFORMED}
    schema = f"{form.schema}, {_MALFORMED} string"
    text = sql.col("body").cast("string")
    frame = frame.withColumn("value", parse(text, schema, options))
    good = sql.col("value").isNotNull() & sql.col(f"value.{_MALFORMED}").isNull()
    if _WHOLE in frame.columns:
        good = good & sql.col(_WHOLE)
    frame = frame.withColumn("value", sql.when(good, sql.col("value").dropFields(_MALFORMED)))
    if not form.keep_body:
        frame = frame.withColumn("body", sql.when(sql.col("value").isNull(), sql.col("body")))
    return frame.drop(_WHOLE)


def _members(schema: str) -> str:
    """DDL of columns as the members of a struct."""
    from pyspark.sql.types import StructType

    return StructType.fromDDL(schema).simpleString().removeprefix("struct<").removesuffix(">")


def _commit(
    manifest: Manifest,
    form: Form,
    rows: Sequence[Row],
    positions: Positions,
    gaps: Sequence[UnreadableRange],
    found: News,
    done: Exported,
) -> None:
    files = [
        DataFile(row.path, row.topic, row.date, row.rows, row.bytes, row.first_ms, row.last_ms)
        for row in sorted(rows, key=lambda one: (one.topic, one.date, one.first_ms, one.path))
    ]
    manifest.commit(form.to_json(), files, positions, [one.to_json() for one in gaps], found.facts)
    done.commits += 1
    done.messages += sum(one.rows for one in files)
    done.files += len(files)
    done.bytes += sum(one.bytes for one in files)
    done.malformed += sum(row.malformed for row in rows)
    done.gaps += gaps


def _reported(folder: Path) -> list[UnreadableRange]:
    """The gaps that tasks have reported. A task that was tried several times may have reported some several times."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    return [UnreadableRange(**json.loads(line)) for line in lines]
