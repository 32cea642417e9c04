"""``spark.read.format("commitmq")`` and ``readStream``: the data source that Spark calls.

Spark creates these objects in Python workers of its own: :class:`CommitMQSource` and the planning of partitions run in
one beside the driver, ``read`` in one of each executor. They travel pickled, so they hold plain values only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from commitmq.errors import ConfigError
from commitmq.log import get_log
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.gaps import Gap, GapPolicy
from commitmq_plugins.spark.options import IGNORE, WAIT, SourceOptions
from commitmq_plugins.spark.origins import chosen, existing, open_origins, require_topics
from commitmq_plugins.spark.plan import least_partitions
from commitmq_plugins.spark.quiet import quiet_daemon

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "commitmq"
_log = get_log("spark")
_ADVICE: Final = ". With missingTopics=ignore it counts as empty"
# For every process that imports this module to plan a read.
quiet_daemon()
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
        return columns.default_schema(
            several_stores=options.several, properties=options.include_properties, state=options.state
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``. Raises ConfigError for options that have no meaning there."""
        options = SourceOptions.parse(self.options)
        for name, attribute in _STREAM_ONLY:
            if getattr(options, attribute):
                raise ConfigError(f"option {name} is for readStream")
        if options.missing_topics == WAIT:
            raise ConfigError("option missingTopics: wait is for readStream; of read it is fail or ignore")
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""
        from commitmq_plugins.spark.streaming import StreamReader

        return StreamReader(SourceOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For ``df.write``. Raises ConfigError for an overwrite: a log can only be appended to."""
        from commitmq_plugins.spark.sinks import BatchSink, SinkOptions

        if overwrite:
            raise ConfigError("a topic cannot be overwritten: write with mode append")
        return BatchSink(SinkOptions.parse(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For ``writeStream``, in the output mode append or update."""
        from commitmq_plugins.spark.sinks import SinkOptions, StreamSink

        del overwrite
        return StreamSink(SinkOptions.parse(self.options), schema)


class BatchReader(DataSourceReader):
    """Plans and reads the messages that exist when it plans.

    It has no ``pushFilters``. Spark plans the partitions of a frame once and uses them for every query on that frame. A
    plan that one query's filters had cut would answer the next query wrongly. (Spark also refuses a reader with that
    method while push-down is off, which is its default.)
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Raises ConfigError for options and columns that do not exist."""
        columns.check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Ranges of the log; see :mod:`commitmq_plugins.spark.plan`. Raises DataLossError for missing messages, and
        ConfigError for a missing topic.
        """
        options = self._options
        gaps: list[Gap] = []
        found: list[InputPartition] = []
        origins = open_origins(options)
        try:
            topics = existing(origins, options.topics) if options.missing_topics == IGNORE else options.topics
            require_topics(origins, topics, advice=_ADVICE)
            if options.topics_pattern and not any(map(options.wants, {one for at in origins for one in at.topics()})):
                places = ", ".join(origin.name for origin in origins)
                _log.warning("no topic matches topicsPattern", pattern=options.topics_pattern, places=places)
            for origin in origins:
                slices = chosen(origin, options, gaps)
                least = least_partitions(options, len(origins))
                parts = origin.parts_of(slices, least=least, max_bytes=options.max_bytes_per_partition)
                found += origin.partitions(slices, parts)
        finally:
            for origin in origins:
                origin.close()
        GapPolicy(options.fail_on_data_loss, options.gap_report).take(gaps)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition."""
        from commitmq_plugins.spark.reading import record_batches  # what planning does not need

        return record_batches(partition, self._schema, self._options)
