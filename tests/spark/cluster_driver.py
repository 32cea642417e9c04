"""A driver program beside the tests: a process can have one Spark, and that of the tests is a local one.

``cluster_driver.py MASTER`` reads requests, a JSON list ``[function, *arguments]`` a line, from standard input and answers
each by a line of JSON: ``{"result": …}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

import commitmq
from commitmq_plugins.spark.commands import pipeline
from commitmq_plugins.spark.sessions import QUICK_START, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTORS = 2
_WAIT_S = 240
_PROBES = 8


def executors(spark: SparkSession) -> list[list[Any]]:
    """Process ids of the Python daemons of both executors, and the file from which each imports commitmq."""
    context = spark.sparkContext
    deadline = time.monotonic() + _WAIT_S
    # The driver is counted as well.
    while context._jsc.sc().getExecutorMemoryStatus().size() <= EXECUTORS:
        if time.monotonic() > deadline:
            raise TimeoutError("the executors did not come")
        time.sleep(0.2)

    def look(_: Iterable[int]) -> Iterator[tuple[int, str]]:
        time.sleep(0.5)  # or one executor would do all of it
        yield os.getppid(), str(commitmq.__file__)

    found = context.parallelize(range(_PROBES), _PROBES).mapPartitions(look).collect()
    return [list(one) for one in sorted(set(found))]


def read(spark: SparkSession, options: dict[str, str]) -> list[list[Any]]:
    """Queue, offset, tags, keys and text of all messages, in order."""
    frame = spark.read.format("commitmq").options(**options).load()
    rows = frame.selectExpr("queue_id", "queue_offset", "tags", "keys", "cast(body as string)").collect()
    return sorted(list(row) for row in rows)


def copy(spark: SparkSession, source: dict[str, str], sink: dict[str, str], rows_a_send: int) -> None:
    """Write what ``source`` reads to ``sink``, queue by queue."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", rows_a_send)
    frame = spark.read.format("commitmq").options(**source).load()
    frame.write.format("commitmq").mode("append").options(**sink).save()


def command(spark: SparkSession, *words: str) -> list[Any]:
    """``commitmq pipeline WORDS``: exit code and standard output. It uses this process's session, which spares a JVM."""
    done = CliRunner().invoke(pipeline, [*words, "--master", str(spark.sparkContext.master)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return [done.exit_code, done.stdout]


FUNCTIONS: dict[str, Callable[..., Any]] = {"executors": executors, "read": read, "copy": copy, "command": command}


def main(master: str) -> None:
    """Answer until standard input ends."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what else prints must not come between
        quick = {**QUICK_START, "spark.executor.extraJavaOptions": QUICK_START["spark.driver.extraJavaOptions"]}
        spark = session(master, app="cluster tests", **quick)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                answer = {"result": FUNCTIONS[name](spark, *arguments)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
