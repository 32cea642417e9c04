"""A program that streams a topic into another and into Parquet files until it is killed, for test_stream_crashes.py.

    python two_streams.py ADDRESS FOLDER [--finish]

``--finish``: take what is there and end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from commitmq_plugins.spark.sessions import QUICK_START, session


def main(address: str, folder: Path, finish: bool) -> None:
    # A driver that dies in its first batch leaves files that Spark would refuse for ever.
    more = {"spark.log.level": "ERROR", "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false"}
    spark = session("local[2,4]", app="crashes", **QUICK_START, **more)
    queries = []
    for name in ("topic", "files"):
        stream = (
            spark.readStream.format("commitmq")
            .options(node=address, topics="in", maxOffsetsPerTrigger="20000" if finish else "400")
            .schema("queue_id int, keys string, body binary")
            .load()
        )
        writer = stream.writeStream.option("checkpointLocation", str(folder / f"checkpoint-{name}"))
        writer = writer.trigger(availableNow=True) if finish else writer.trigger(processingTime="200 milliseconds")
        if name == "topic":
            writer = writer.format("commitmq").options(node=address, topic="out")
        else:
            writer = writer.format("parquet").option("path", str(folder / "files"))
        queries.append(writer.start())
    (folder / "running").touch()
    if finish:
        for query in queries:
            query.awaitTermination()
    else:
        # One that fails ends the program, and with it the other: whoever started it starts it again.
        spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--finish" in sys.argv[3:])
