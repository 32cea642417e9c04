"""Goal: a stream into files has every message once, whatever was killed meanwhile: its driver, or the node.

Method: a driver process with its JVM is killed with SIGKILL in mid-stream, then the node, each twice; at the end a last
driver reads on to the end, and sink and topic are compared message by message.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from source_reading import wait_until_shown

from commitmq import Message, Producer
from nodes import Node, environment, free_ports, start_node

SEED = 71_113
ROUNDS = 2
MESSAGES = 3_000


def driver(node: Node, folder: Path, *mode: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("stream_driver.py")
    with (folder / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, script, node.address, "killed", folder, *mode],
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for_batches(folder: Path, more: int) -> None:
    """Until ``more`` further micro-batches were committed."""
    commits = folder / "checkpoint" / "commits"

    def count() -> int:
        return sum(entry.name.isdecimal() for entry in commits.iterdir()) if commits.is_dir() else 0

    wanted, deadline = count() + more, time.monotonic() + 240
    while count() < wanted:
        assert time.monotonic() < deadline, (folder / "driver.log").read_text()[-3000:]
        time.sleep(0.05)


def committed_files(folder: Path) -> list[str]:
    """The files that Spark's sink counts as written: a killed driver may leave others, which no reader of Spark's sees."""
    # The checksums and unfinished files beside them begin with a point.
    logs = [path for path in (folder / "_spark_metadata").iterdir() if path.name[0].isdecimal()]
    lines = [line for path in logs for line in path.read_text().splitlines()]
    names = {Path(json.loads(line)["path"]).name for line in lines if line.startswith("{")}
    return sorted(str(folder / unquote(name)) for name in names)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    sent: list[bytes] = []
    with start_node(tmp_path, f"network.port={free_ports()}") as node:

        def send() -> None:
            bodies = [f"{len(sent) + number}".encode() for number in range(MESSAGES)]
            with Producer(node=node.address, timeout_s=60) as producer:
                producer.send_batch("killed", [Message(body) for body in bodies])
            sent.extend(bodies)

        send()
        for _ in range(ROUNDS):
            process = driver(node, tmp_path)
            wait_for_batches(tmp_path, 2)
            time.sleep(rng.random())
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            send()
            process = driver(node, tmp_path)
            wait_for_batches(tmp_path, 2)
            node.kill_all()
            time.sleep(rng.random())
            assert node.start().returncode == 0
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            send()
        wait_until_shown(node.address)
        process = driver(node, tmp_path, "--once")
        assert process.wait(timeout=300) == 0, (tmp_path / "driver.log").read_text()[-3000:]
    table = pq.read_table(committed_files(tmp_path / "out"))
    places = list(zip(table["queue_id"].to_pylist(), table["queue_offset"].to_pylist(), strict=True))
    assert len(set(places)) == len(places)
    assert sorted(table["body"].to_pylist()) == sorted(sent)
