"""How fast `store verify`, `store rebuild` and their twins on Spark are, on one log and in one run.

    bench_store_jobs.py [--gib SIZE] [--dir FOLDER]

Run it in an environment with the extra `spark`. Makes a log of 300-byte bodies with a tag and a key in 16 queues, and its
queues and index; then each job runs on it, Spark's with one and with two cores, each after a small one that starts its JVM and
workers. All files are in the page cache. Prints megabytes of log a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from commitmq.config import NodeConfig
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild
from commitmq.offline.rebuild_parallel import rebuild_parallel
from commitmq.offline.verify import verify
from commitmq.store.layout import StoreLayout, segment_name
from commitmq.store.record import Record, encode_filler, encode_record

SEGMENT_BYTES = 1 << 30
QUEUES = 16
BODY_BYTES = 300
START_MS = 1_700_000_000_000
RECORDS_AT_ONCE = 100_000


def make_log(root: Path, size_bytes: int) -> None:
    """A log of at least ``size_bytes``: one record, with its places, key and time patched for each."""
    layout = StoreLayout(root)
    layout.commit_log.mkdir(parents=True)
    key = "0" * 12
    record = Record("bench", body=os.urandom(BODY_BYTES), properties={"TAGS": "tag", "KEYS": key})
    model = np.frombuffer(encode_record(record), np.uint8)
    key_at = bytes(model).index(key.encode())
    number, end = 0, 0
    while end < size_bytes:
        left = SEGMENT_BYTES - end % SEGMENT_BYTES
        count = min(RECORDS_AT_ONCE, (left - 8) // len(model))
        path = layout.commit_log / segment_name(end - end % SEGMENT_BYTES)
        if not path.exists():
            path.touch()
            os.truncate(path, SEGMENT_BYTES)
        with path.open("r+b") as file:
            file.seek(end % SEGMENT_BYTES)
            if not count:
                file.write(encode_filler(left))
                end += left
                continue
            numbers = np.arange(number, number + count)
            records = np.tile(model, (count, 1))
            put(records, 12, numbers % QUEUES, ">i4")
            put(records, 20, numbers // QUEUES, ">i8")
            put(records, 28, end + np.arange(count) * len(model), ">i8")
            put(records, 56, START_MS + numbers // 100, ">i8")
            digits = numbers[:, None] // 10 ** np.arange(11, -1, -1) % 10 + 48
            records[:, key_at : key_at + 12] = digits
            file.write(records.data)
        number, end = number + count, end + count * len(model)


def put(records: np.ndarray, at: int, values: np.ndarray, kind: str) -> None:
    size = np.dtype(kind).itemsize
    records[:, at : at + size] = values.astype(kind)[:, None].view(np.uint8)


def here(root: Path) -> dict[str, float]:
    """Seconds of the jobs in this process."""
    with HeldStore(root, NodeConfig()) as store:
        verified = verify(store)
        assert verified.is_sound, verified.findings[:3]
        made = rebuild(store)
        shutil.rmtree(made.kept)
        pieces = rebuild_parallel(store)
        shutil.rmtree(pieces.kept)
    return {"verify": verified.seconds, "rebuild": made.seconds, "rebuild in pieces": pieces.seconds}


def on_spark(root: Path, small: Path, master: str) -> dict[str, float]:
    """Seconds of Spark's jobs; of a process of its own, because a JVM keeps its master."""
    command = [sys.executable, __file__, "--spark", master, "--dir", str(root), "--small", str(small)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def spark_jobs(root: Path, small: Path, master: str) -> dict[str, float]:
    from commitmq_plugins.spark.jobs import rebuild as rebuilding
    from commitmq_plugins.spark.jobs import verify as verifying
    from commitmq_plugins.spark.sessions import session

    spark = session(master, **{"spark.log.level": "ERROR"})
    seconds = {}
    for store in (small, root):
        begun = time.perf_counter()
        (report,) = verifying.verify(spark, [store]).values()
        assert report.is_sound, report.findings[:3]
        middle = time.perf_counter()
        (made,) = rebuilding.rebuild(spark, [store]).values()
        seconds = {"verify": middle - begun, "rebuild": time.perf_counter() - middle}
        shutil.rmtree(made.kept)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--spark", help=argparse.SUPPRESS)
    parser.add_argument("--small", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.spark:
        print(json.dumps(spark_jobs(arguments.dir, arguments.small, arguments.spark)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-") as folder:
        root, small = Path(folder, "store"), Path(folder, "small")
        size = int(arguments.gib * (1 << 30))
        for path, wanted in ((root, size), (small, 1 << 27)):
            make_log(path, wanted)
            with HeldStore(path, NodeConfig()) as store:
                shutil.rmtree(rebuild(store).kept)
        print(f"{'job':30}{'s':>8}{'MB/s':>8}")
        for where, seconds in (
            ("one process", here(root)),
            ("local[1]", on_spark(root, small, "local[1]")),
            ("local[2]", on_spark(root, small, "local[2]")),
        ):
            for job, took in seconds.items():
                print(f"{job + ', ' + where:30}{took:8.1f}{size / took / 1e6:8.0f}", flush=True)


if __name__ == "__main__":
    main()
