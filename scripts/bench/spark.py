"""How fast Spark reads a store beside its own Parquet files, and the jobs on Spark beside those of one process.

    scripts/bench/spark [--messages N] [--repeat RUNS] [--dir FOLDER] [--json FILE]

A real node stores messages with bodies of 300 bytes, a tag and a key each; Spark writes them to Parquet from the source. Then,
in one session of ``local[2]``, source and Parquet answer the same questions in turn, and the store is verified and rebuilt by
this process and by Spark in turn. The same on ``local[1]`` shows the gain of the second core. The first round of
everything is not counted: it starts workers and compiles. Files are in the page cache. Prints medians, ratios and
goals; --json writes every time as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commitmq import Message
from commitmq.config import NodeConfig
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild
from commitmq.offline.rebuild_parallel import rebuild_parallel
from commitmq.offline.verify import verify
from commitmq.testing.node import start_node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BODY_BYTES = 300
QUEUES = 16
SEND = 4_000
TOPIC = "bench"
# Tests use small files; here the node has its own sizes, because they are measured.
SETTINGS = (
    "profile=server",
    "commit_log.segment_bytes=1073741824",
    "commit_log.flush_mode=async",
    "consume_queue.file_bytes=6000000",
    "index.hash_slots=5000000",
    "index.max_items=20000000",
)
# Name: the question, the columns that it needs, and its limit as a multiple of Parquet's time.
QUESTIONS = {
    "count": ("count(*)", "queue_offset bigint", 1.5),
    "two narrow columns": ("sum(queue_id), max(queue_offset)", "queue_id int, queue_offset bigint", 1.5),
    "bodies": ("sum(length(body))", "body binary", 2.5),
}
# The cost of a question before the first row: Spark asks a source in Python for its plan in processes of its own.
ONE_MESSAGE = {
    "startingOffsets": json.dumps({TOPIC: {str(queue): 0 if queue == 0 else -1 for queue in range(QUEUES)}}),
    "endingOffsets": json.dumps({TOPIC: {str(queue): 1 if queue == 0 else -1 for queue in range(QUEUES)}}),
}
Times = dict[str, list[float]]


def make_store(folder: Path, messages: int) -> tuple[Path, int]:
    """A closed store with ``messages`` messages that a node has written; also the bytes of its log."""
    shared = random.Random(1).randbytes(BODY_BYTES * 64)  # random, so that Parquet cannot compress it away
    with start_node(folder, SETTINGS) as node:
        node.admin.topic_create(TOPIC, QUEUES)
        for number, first in enumerate(range(0, messages, SEND)):
            bodies = (
                str(one).encode().ljust(12) + shared[one % 8_000 : one % 8_000 + BODY_BYTES - 12]
                for one in range(first, min(first + SEND, messages))
            )
            sent = [Message(body, tags=f"T{at % 3}", keys=[f"k{first + at}"]) for at, body in enumerate(bodies)]
            node.send_many(TOPIC, sent, queue=number % QUEUES)
        node.wait_until_dispatched("consume_queue", timeout_s=600)
        written = int(node.admin.status()["positions"]["written"])
        node.stop()
        return node.store, written


def took(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def reads(spark: SparkSession, store: Path, parquet: Path | None, runs: int) -> Times:
    """Seconds of each question by each reader."""
    times: Times = {}
    for run in range(runs + 1):
        for name, (question, schema, _) in QUESTIONS.items():
            frames = {"commitmq": spark.read.format("commitmq").schema(schema).load(str(store))}
            if parquet is not None:
                frames["parquet"] = spark.read.parquet(str(parquet))
            answers = {}
            for reader, frame in frames.items():
                asked = frame.selectExpr(*split(question))
                begun = time.perf_counter()
                answers[reader] = asked.collect()
                if run:
                    times.setdefault(f"{name}, {reader}", []).append(time.perf_counter() - begun)
            assert len(set(map(str, answers.values()))) == 1, answers
        frame = spark.read.format("commitmq").schema("queue_offset bigint").options(**ONE_MESSAGE).load(str(store))
        begun = time.perf_counter()
        assert frame.count() == 1
        if run:
            times.setdefault("one message, commitmq", []).append(time.perf_counter() - begun)
    return times


def split(question: str) -> list[str]:
    return [f"{part} as answer{number}" for number, part in enumerate(question.split(", "))]


def jobs(spark: SparkSession, store: Path, runs: int, *, also_here: bool) -> Times:
    """Seconds of both jobs, on Spark and, if asked for, in this process."""
    from commitmq_plugins.spark.jobs import rebuild as rebuilding
    from commitmq_plugins.spark.jobs import rebuild as verifying

    def verify_here() -> None:
        with HeldStore(store, NodeConfig()) as held:
            report = verify(held)
        assert report.is_sound, report.findings[:3]

    def verify_there() -> None:
        (report,) = verifying.verify(spark, [store]).values()
        assert report.is_sound, report.findings[:3]

    def rebuild_here() -> None:
        with HeldStore(store, NodeConfig()) as held:
            shutil.rmtree(rebuild(held).kept)

    def rebuild_in_pieces() -> None:
        with HeldStore(store, NodeConfig()) as held:
            shutil.rmtree(rebuild_parallel(held).kept)

    def rebuild_there() -> None:
        (made,) = rebuilding.rebuild(spark, [store]).values()
        shutil.rmtree(made.kept)

    actions = {"verify, spark": verify_there, "rebuild, spark": rebuild_there}
    if also_here:
        actions = {
            "verify, one process": verify_here, "verify, spark": verify_there,
            "rebuild, one process": rebuild_here, "rebuild, in pieces": rebuild_in_pieces, "rebuild, spark": rebuild_there,
        }  # fmt: skip
    times: Times = {}
    for run in range(runs + 1):
        for name, action in actions.items():
            seconds = took(action)
            if run:
                times.setdefault(name, []).append(seconds)
    return times


def measure(master: str, store: Path, parquet: Path, runs: int) -> Times:
    """All seconds on ``master``. The comparisons are measured only when the Parquet files do not exist yet."""
    from commitmq_plugins.spark.sessions import session

    is_first = not parquet.exists()
    spark = session(master, app="bench", **{"spark.driver.memory": "2g"})
    if is_first:
        spark.read.format("commitmq").load(str(store)).write.parquet(str(parquet))
    times = reads(spark, store, parquet if is_first else None, runs)
    times.update(jobs(spark, store, runs, also_here=is_first))
    spark.stop()
    return times


def measured(master: str, store: Path, parquet: Path, runs: int) -> Times:
    """:func:`measure` in a process of its own, because a JVM keeps its master."""
    words = ["--master", master, "--store", str(store), "--parquet", str(parquet), "--repeat", str(runs)]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=True)
    found: Times = json.loads(done.stdout.splitlines()[-1])
    return found


def report(two: Times, one: Times, log_bytes: int) -> dict[str, Any]:
    """Medians. A ratio is the median of the ratios of each run, because its two parts follow one another on a machine
    that others may use.
    """
    seconds = {name: statistics.median(values) for name, values in two.items()}
    alone = {name: statistics.median(values) for name, values in one.items()}

    def ratio(first: str, second: str) -> float:
        return statistics.median(a / b for a, b in zip(two[first], two[second], strict=True))

    read: dict[str, Any] = {}
    for name, (_, _, goal) in QUESTIONS.items():
        ours, theirs = f"{name}, commitmq", f"{name}, parquet"
        times = ratio(ours, theirs)
        read[name] = {
            "commitmq_s": seconds[ours], "parquet_s": seconds[theirs], "ratio": times, "goal": goal, "met": times <= goal,
        }  # fmt: skip
    work: dict[str, Any] = {}
    for name in ("verify", "rebuild"):
        ours, theirs = f"{name}, spark", f"{name}, one process"
        work[name] = {
            "spark_mb_s": log_bytes / seconds[ours] / 1e6,
            "one_process_mb_s": log_bytes / seconds[theirs] / 1e6,
            "faster": ratio(theirs, ours),
        }
    scaling = {name: alone[name] / seconds[name] for name in alone}
    fixed = seconds["one message, commitmq"]
    return {
        "reads": read,
        "fixed_s": fixed,
        "jobs": work,
        "second_core": scaling,
        "seconds": {"local[2]": two, "local[1]": one},
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['messages']:,} messages of {BODY_BYTES} bytes, {found['log_bytes'] / 1e6:,.0f} MB of log, local[2];")
    print("load average before and after: " + ", ".join(f"{load:.1f}" for load in found["load"]))
    print(f"\n{'read':22}{'commitmq s':>12}{'parquet s':>12}{'ratio':>8}{'goal':>8}")
    for name, row in found["reads"].items():
        verdict = "" if row["met"] else "  missed"
        print(
            f"{name:22}{row['commitmq_s']:12.2f}{row['parquet_s']:12.2f}{row['ratio']:8.2f}{row['goal']:8.1f}{verdict}"
        )
    print(f"{'count of one message':22}{found['fixed_s']:12.2f}")
    print(f"\n{'job':22}{'spark MB/s':>12}{'alone MB/s':>12}{'faster':>8}")
    for name, row in found["jobs"].items():
        print(f"{name:22}{row['spark_mb_s']:12.0f}{row['one_process_mb_s']:12.0f}{row['faster']:8.2f}")
    print(f"\n{'local[1] to local[2]':30}{'faster':>8}")
    for name, ratio in found["second_core"].items():
        print(f"{name:30}{ratio:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench/spark", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=2_000_000, metavar="N", help="default 2000000")
    parser.add_argument("--repeat", type=int, default=3, metavar="RUNS", help="runs that count of each (default 3)")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where to work; needs 2.5 GB for 2000000 messages")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    for name in ("--master", "--store", "--parquet"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.master:
        found = measure(options.master, Path(options.store), Path(options.parquet), options.repeat)
        print(json.dumps(found))
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="commitmq-bench-") as folder:
        sys.stderr.write("storing messages …\n")
        store, log_bytes = make_store(Path(folder), options.messages)
        times = {}
        for master in ("local[2]", "local[1]"):
            sys.stderr.write(f"measuring on {master} …\n")
            times[master] = measured(master, store, Path(folder, "parquet"), options.repeat)
    result = {
        "messages": options.messages, "body_bytes": BODY_BYTES, "log_bytes": log_bytes, "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]], **report(times["local[2]"], times["local[1]"], log_bytes),
    }  # fmt: skip
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
