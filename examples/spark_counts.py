"""Spark reads the files of a store as a DataFrame and counts the messages of each topic and tag.
Run `python examples/spark_counts.py STORE_FOLDER`; its node may run or not, and the extra `spark` brings Spark and a Java.
"""

from __future__ import annotations

import sys

from commitmq_plugins.spark import session


def main(store: str) -> None:
    spark = session("local[2]", app="example")
    messages = spark.read.format("commitmq").option("store", store).load()
    for row in messages.groupBy("topic", "tags").count().orderBy("topic", "tags").collect():
        print(f"{row['topic']}, tag {row['tags']}: {row['count']} messages")


if __name__ == "__main__":
    main(sys.argv[1])
