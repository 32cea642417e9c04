"""``spark.read.format("commitmq")`` and ``readStream``: the data source that Spark calls.

Spark makes these objects in Python workers of its own: :class:`CommitMQSource` and the planning of partitions run in one
beside the driver, ``read`` in one of each executor. They travel pickled, so they hold plain values only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from commitmq.errors import ConfigError
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.gaps import Gap, GapPolicy
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.origins import open_origins
from commitmq_plugins.spark.plan import FilePartition, Partition, PullPartition
from commitmq_plugins.spark.ranges import Pruning, chosen

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

FORMAT: Final = "commitmq"
_MOST_PARTITIONS: Final = 32
_STREAM_ONLY: Final = (
    ("maxOffsetsPerTrigger", "max_offsets_per_trigger"),
    ("maxBytesPerTrigger", "max_bytes_per_trigger"),
    ("group", "group"),
)


class CommitMQSource(DataSource):
    """The format ``commitmq``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        """All columns; see :mod:`commitmq_plugins.spark.columns`."""
        options = SourceOptions.parse(self.options)
        return columns.default_schema(several_stores=options.several, properties=options.include_properties)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``. Raises ConfigError for options that mean nothing there."""
        options = SourceOptions.parse(self.options)
        for name, attribute in _STREAM_ONLY:
            if getattr(options, attribute):
                raise ConfigError(f"option {name} is for readStream")
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""
        from commitmq_plugins.spark.streaming import StreamReader

        return StreamReader(SourceOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For ``df.write``. Raises ConfigError: a log is only added to."""
        from commitmq_plugins.spark.sinks import BatchSink, SinkOptions

        if overwrite:
            raise ConfigError("a topic cannot be overwritten: write with mode append")
        return BatchSink(SinkOptions.parse(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For ``writeStream``, in the output mode append or update."""
        from commitmq_plugins.spark.sinks import SinkOptions, StreamSink

        del overwrite
        return StreamSink(SinkOptions.parse(self.options), schema)


class _Push:
    """``pushFilters`` of a reader.

    Spark refuses a reader that has that method while pushing down is switched off, and compares functions to find out.
    This one passes for the method that does nothing, so that one reader serves both settings.
    """

    __func__ = DataSourceReader.pushFilters

    def __init__(self, pruning: Pruning) -> None:
        self._pruning = pruning

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Remember what can be used; all filters are left to Spark as well."""
        self._pruning.learn(filters)
        return filters


class BatchReader(DataSourceReader):
    """Plans and reads what is there when it plans."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Raises ConfigError or ValueError for options and columns that do not exist."""
        columns.check_schema(schema)
        self._options = options
        self._schema = schema
        self._pruning = Pruning()

    @property
    def pushFilters(self) -> Any:
        """See :class:`_Push`."""
        return _Push(self._pruning)

    def partitions(self) -> list[InputPartition]:
        """Ranges of the log; see :mod:`commitmq_plugins.spark.plan`. Raises DataLossError for what is missing."""
        options = self._options
        gaps: list[Gap] = []
        found: list[InputPartition] = []
        origins = open_origins(options)
        try:
            for origin in origins:
                slices = [self._pruning.applied(origin, one) for one in chosen(origin, options, gaps)]
                least = least_partitions(options, len(origins))
                found += origin.partitions(slices, least=least, max_bytes=options.max_bytes_per_partition)
        finally:
            for origin in origins:
                origin.close()
        GapPolicy(options.fail_on_data_loss, options.gap_report).take(gaps)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition."""
        return record_batches(partition, self._schema, self._options)


def least_partitions(options: SourceOptions, origins: int) -> int:
    """How many partitions of one of ``origins`` stores to make at least: one a core unless it is said."""
    wanted = options.min_partitions or min(max(2, os.cpu_count() or 1), _MOST_PARTITIONS)
    return -(-wanted // origins)


def record_batches(
    partition: InputPartition | None, schema: StructType, options: SourceOptions
) -> Iterator[pa.RecordBatch]:
    """Read one partition. Spark gives None when there was no partition at all."""
    if not isinstance(partition, FilePartition | PullPartition):
        return
    from commitmq_plugins.spark.reading import PartitionReader

    wanted: Partition = partition
    yield from PartitionReader(wanted, to_arrow_schema(schema, timezone="UTC"), options).batches()
