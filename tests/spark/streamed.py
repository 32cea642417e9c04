"""A query of a test: each run reads what is there, and goes on from the checkpoint of the one before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "topic string, queue_id int, queue_offset bigint, body binary"


class Query:
    """Runs a stream with availableNow into memory; the checkpoint stays, so the next run goes on."""

    def __init__(self, spark: SparkSession, folder: Path, **options: str) -> None:
        self.spark = spark
        self.folder = folder
        self.options = options
        self.batches: list[list[Any]] = []

    def run(self, *, dies: bool = False) -> list[str]:
        """The bodies of one run; ``batches`` has its micro-batches. It ``dies`` at the end of its first micro-batch, before
        Spark has noted that one.
        """
        self.batches = []

        def keep(frame: DataFrame, _number: int) -> None:
            self.batches.append(frame.collect())
            if dies:
                raise RuntimeError("the driver dies")

        stream = self.spark.readStream.format("commitmq").schema(SCHEMA).options(**self.options).load()
        query = (
            stream.writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(100)
        finally:
            query.stop()
        return sorted(row.body.decode() for batch in self.batches for row in batch)
