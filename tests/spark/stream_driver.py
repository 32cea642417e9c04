"""A driver of its own: streams a topic into Parquet until it is killed, or with ``--once`` to the end of what is there."""

from __future__ import annotations

import sys

from commitmq_plugins.spark.sessions import QUICK_START, session


def main(node: str, topic: str, folder: str, *mode: str) -> None:
    # A driver that dies in its first batch leaves files that Spark would refuse for ever.
    spark = session("local[2]", **QUICK_START, **{"spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    writer = (
        spark.readStream.format("commitmq")
        .schema("queue_id int, queue_offset bigint, body binary")
        .options(node=node, topics=topic, maxOffsetsPerTrigger="500", group="driver_test")
        .load()
        .writeStream.format("parquet")
        .option("path", f"{folder}/out")
        .option("checkpointLocation", f"{folder}/checkpoint")
    )
    query = writer.trigger(availableNow=True).start() if mode else writer.start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
