"""``spark.read.format("commitmq")``: the data source that Spark calls.

Spark makes these objects in Python workers of its own: :class:`CommitMQSource` and the planning of partitions run in one
beside the driver, :meth:`BatchReader.read` in one of each executor. They travel pickled, so they hold plain values only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from commitmq_plugins.spark import columns
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.plan import StorePartition, cut, slices_of
from commitmq_plugins.spark.stores import OpenStore

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "commitmq"
_DEFAULT_PARTITIONS = 2


class CommitMQSource(DataSource):
    """The format ``commitmq``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        """All columns; see :mod:`commitmq_plugins.spark.columns`."""
        options = SourceOptions.parse(self.options)
        return columns.default_schema(several_stores=len(options.stores) > 1, properties=options.include_properties)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        return BatchReader(SourceOptions.parse(self.options), schema)


class BatchReader(DataSourceReader):
    """Plans and reads what is there now."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Raises ConfigError or ValueError for options and columns that do not exist."""
        columns.check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Ranges of the log; see :mod:`commitmq_plugins.spark.plan`."""
        found: list[InputPartition] = []
        for folder in self._options.stores:
            store = OpenStore(Path(folder))
            try:
                floor, bound = store.span()
                queues = [one for one in store.queue_list(floor, bound) if self._wants(one.topic)]
                least = self._options.min_partitions or _DEFAULT_PARTITIONS
                found += cut(
                    store,
                    slices_of(store, queues, floor),
                    bound,
                    least=-(-least // len(self._options.stores)),
                    max_bytes=self._options.max_bytes_per_partition,
                )
            finally:
                store.close()
        return found

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition. Spark gives None when there is no partition at all."""
        if not isinstance(partition, StorePartition):
            return
        from commitmq_plugins.spark.reading import PartitionReader

        reader = PartitionReader(
            partition, to_arrow_schema(self._schema, timezone="UTC"), decompress=self._options.decompress
        )
        yield from reader.batches()

    def _wants(self, topic: str) -> bool:
        return not self._options.topics or topic in self._options.topics
