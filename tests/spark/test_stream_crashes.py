"""Goal: stream → topic and stream → Parquet hold every message once, though driver, workers and node are killed.

Method: a producer goes on sending while a driver of its own (a process, with its JVM) streams; at random moments one of
them dies by SIGKILL and is started again. At the end source, topic and files are compared message by message. The seed is
printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from topic_contents import bodies

from commitmq import ExactlyOnce, Producer
from commitmq.testing.node import CommitMQNode, start_node
from nodes import free_ports
from shares import shared

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER = Path(__file__).with_name("two_streams.py")
ROLES = ("writer", "reader-0", "flush", "reput", "dispatcher-consume_queue", "coordinator")


class Sender(threading.Thread):
    """Sends numbered messages until it is told to stop; what it was told is stored is in ``sent``."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._over = threading.Event()
        self.sent = 0
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            with Producer(self._address, delivery=ExactlyOnce(), timeout_s=120) as producer:
                while not self._over.is_set():
                    numbers = range(self.sent, self.sent + 20)
                    keys = [f"key-{number % 7}" for number in numbers]
                    producer.send_batch("in", [str(number).encode() for number in numbers], keys=keys)
                    self.sent += 20
                    time.sleep(0.05)
        except BaseException as error:
            self.problem = error

    def finish(self) -> int:
        self._over.set()
        self.join(150)
        assert self.problem is None, self.problem
        return self.sent


class Driver:
    """The streaming program, started again whenever it has ended."""

    def __init__(self, address: str, folder: Path) -> None:
        self._arguments = [sys.executable, str(DRIVER), address, str(folder)]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def ensure(self) -> None:
        """Have it run, with its queries started."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        (self._folder / "running").unlink(missing_ok=True)
        with (self._folder / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(self._arguments, stdout=log, stderr=log, start_new_session=True)
        self.starts += 1
        deadline = time.monotonic() + 300
        while not (self._folder / "running").exists() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to all of it, the JVM and its workers included."""
        if self._process is None:
            return
        # Spark puts its JVM and its daemon of workers into groups of their own.
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.kill()
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._process = None

    def kill_worker(self, choose: random.Random) -> None:
        """SIGKILL to one of the Python processes in which tasks run."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
            workers = [one for one in family if "pyspark" in " ".join(one.cmdline())]
            if workers:
                choose.choice(workers).kill()

    def finish(self) -> None:
        """Let it take what is left; the node is well meanwhile."""
        self.kill()
        with (self._folder / "driver.log").open("ab") as log:
            ended = subprocess.run([*self._arguments, "--finish"], stdout=log, stderr=log, timeout=600, check=False)
        if ended.returncode:
            lines = (self._folder / "driver.log").read_text().splitlines()
            reasons = [one for one in lines if "Error" in one or "Exception" in one or "Caused by" in one]
            raise AssertionError("\n".join((*lines[-60:], "--- the reasons, the last at the end ---", *reasons[-30:])))


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommitMQNode]:
    port = free_ports()
    with start_node(tmp_path_factory.mktemp("cmq"), [f"network.port={port}"]) as found:
        yield found


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("rounds", shared([2, 4], 1))
def test_source_topic_and_files_agree_after_many_deaths(
    spark: SparkSession, node: CommitMQNode, tmp_path: Path, rounds: int
) -> None:
    seed = random.randrange(1 << 32)
    sys.stderr.write(f"seed {seed}\n")
    choose = random.Random(seed)
    node.admin.topic_create("in", 4)
    node.admin.topic_create("out", 4)
    sender, driver = Sender(node.address), Driver(node.address, tmp_path)
    sender.start()
    try:
        for number in range(rounds):
            driver.ensure()
            time.sleep(choose.uniform(2, 8))
            kind = ("driver", "node", "worker", "role")[number % 4]
            sys.stderr.write(f"round {number}: {kind}\n")
            if kind == "driver":
                driver.kill()
            elif kind == "worker":
                driver.kill_worker(choose)
            elif kind == "role":
                node.kill(choose.choice(ROLES))
            else:
                node.crash()
                time.sleep(choose.uniform(0, 2))
                node.restart()
        count = sender.finish()
        driver.finish()
    finally:
        driver.kill()
    everything = Counter(str(number).encode() for number in range(count))
    assert bodies(node, "in") == everything
    assert bodies(node, "out") == everything
    # Spark's file sink has a log of its own that says which files count.
    rows = spark.read.parquet(str(tmp_path / "files")).select("body").collect()
    assert Counter(bytes(row.body) for row in rows) == everything
    assert driver.starts > 1
