"""Goal: a deletion of expired segments that is killed at any step is finished, nothing above the minimum is lost, and
neither the log's minimum nor a queue's offsets ever go back. A disk that fills up costs the oldest segments and no more.

Method: failpoints at every step, for the cleanup process alone and for the whole node; a disk of eight megabytes (a tmpfs)
that a filler brings to each rung of the ladder, with a process that keeps a deleted segment mapped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Consumer, Producer
from expiring import (
    EVERY_HOUR,
    SEGMENT_BYTES,
    SETTINGS,
    TOPIC,
    Stored,
    expiry,
    make_old,
    segments,
    wait_for_first_segment,
    wait_until_durable,
)
from nodes import Node, commitmq, eventually, start_node

POINTS = ("cleanup.before_publish", "cleanup.after_publish", "cleanup.before_unlink", "cleanup.after_unlink")
QUIET_QUEUE = 2
AGE = f"retention.delete_when={EVERY_HOUR}"


def test_the_process_killed_at_every_step_finishes_what_it_began(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    points = ";".join(f"{name}=kill@{2 if 'unlink' in name else 1}" for name in POINTS)
    extra = {"COMMITMQ_FAILPOINTS": points, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, AGE, **extra) as node, Producer(node.address) as producer:
        stored = Stored()
        stored.send(producer, 20, queue=QUIET_QUEUE)
        stored.send(producer, 500)
        wait_until_durable(node)
        bases = segments(node)
        make_old(node, bases[:4])
        wait_for_first_segment(node, bases[4])
        eventually(lambda: len(list(fired.iterdir())) == len(POINTS), f"all of {points} fire")
        eventually(lambda: node.row("cleanup")["state"] == "ready", "cleanup is back")
        assert node.row("cleanup")["restarts"] == len(POINTS)
        assert segments(node)[0] == bases[4], "more went than was expired"
        assert stored.check(node.address) == bases[4]
        assert stored.send(producer, 1, queue=QUIET_QUEUE).queue_offset == 20


def is_halted(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def start_with(node: Node, point: str) -> None:
    """Start the node; its cleanup will be halted at ``point``, if there is one."""
    extra = {"COMMITMQ_FAILPOINTS": f"{point}=stop{'@2' if 'unlink' in point else ''}"} if point else {}
    started = node.start(**extra)
    assert started.returncode == 0, started.stderr


def kill_at(node: Node, stored: Stored, point: str) -> tuple[int, int]:
    """Let the node expire three segments, kill all of it at ``point``; where the log was to begin, and what was published."""
    with Producer(node.address) as producer:
        if not stored.acked:
            stored.send(producer, 25, queue=QUIET_QUEUE)
        stored.send(producer, 250)
        wait_until_durable(node)
    bases = segments(node)
    make_old(node, bases[:3])
    pid = node.pids()["cleanup"]
    eventually(lambda: is_halted(pid), f"cleanup gets to {point}: {segments(node)}")
    with Admin(node.address) as admin:
        published = int(admin.status()["positions"]["min_offset"])
        if published == bases[3]:
            admin.offsets(TOPIC)  # now consumers have been told, and there is no way back
    node.kill_all()
    return bases[3], published


@pytest.mark.slow  # test_kill_node.py kills a node at each of these under load; here it is seen what exactly is left
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(POINTS[1:3], id="published, or begun"),
        pytest.param((POINTS[3], POINTS[0]), marks=pytest.mark.long, id="half done, or decided"),
    ],
)
def test_the_node_killed_at_every_step_finishes_it_at_its_next_start(tmp_path: Path, points: tuple[str, ...]) -> None:
    node = Node(tmp_path / "store", *SETTINGS, AGE)
    stored = Stored()
    try:
        start_with(node, points[0])
        for point, following in zip(points, (*points[1:], ""), strict=True):
            wanted, published = kill_at(node, stored, point)
            start_with(node, following)
            if point == "cleanup.before_publish":
                wait_for_first_segment(node, wanted)
            else:
                assert published == wanted
                assert segments(node)[0] == wanted, "recovery has finished the deletion"
            assert stored.check(node.address, published) == wanted
            with Producer(node.address) as producer:
                last = max(offset for queue, offset in stored.acked if queue == QUIET_QUEUE)
                assert stored.send(producer, 1, queue=QUIET_QUEUE).queue_offset == last + 1
        ended = node.stop()
        assert ended.returncode == 0, ended.stderr
        sizes = [part for setting in SETTINGS if setting.startswith("index.") for part in ("--set", setting)]
        verified = commitmq("store", "verify", str(node.store), *sizes)
        assert verified.returncode == 0, verified.stdout + verified.stderr
    except BaseException as error:
        error.add_note(f"--- the end of node.log ---\n{node.log_tail()}")
        raise
    finally:
        node.end()


# ---------------------------------------------------------------- a disk that fills up

DISK_BYTES = 8 << 20
DISK_SETTINGS = (
    *SETTINGS,
    "retention.delete_when=",
    "commit_log.preallocate_segments=1",
    "disk.warning_ratio=0.95",
    "disk.check_interval_ms=100",
)
HOLDER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
held = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
os.close(fd)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of DISK_BYTES."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},nr_inodes=4096", "commitmq-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        reason = f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}"
        if os.environ.get("COMMITMQ_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def used(folder: Path) -> float:
    found = os.statvfs(folder)
    return 1 - found.f_bfree / found.f_blocks


def fill_to(folder: Path, ratio: float) -> None:
    """Make or grow or cut the filler so that ``ratio`` of the disk is used."""
    filler = folder / "filler"
    filler.touch()
    target = filler.stat().st_size + int((ratio - used(folder)) * DISK_BYTES)
    with filler.open("r+b") as file:
        file.truncate(max(0, min(target, filler.stat().st_size)))
        if target:
            os.posix_fallocate(file.fileno(), 0, target)
    assert abs(used(folder) - ratio) < 0.005, used(folder)


@contextlib.contextmanager
def holding(path: Path) -> Iterator[int]:
    """A process that has ``path`` mapped; its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        yield holder.pid
        holder.send_signal(signal.SIGKILL)


def looked(node: Node) -> None:
    """Wait until the node has had time for several looks."""
    time.sleep(0.6)
    assert node.row("cleanup")["state"] == "ready"


@pytest.mark.slow
def test_a_filling_disk_costs_the_oldest_segments_and_no_more(disk: Path) -> None:
    per_segment = SEGMENT_BYTES / DISK_BYTES
    with start_node(disk, *DISK_SETTINGS, "retention.keep_unconsumed=true") as node, Producer(node.address) as producer:
        stored = Stored()
        stored.send(producer, 2_500)
        wait_until_durable(node)
        with Admin(node.address) as admin:
            admin.reset_offsets("slow", TOPIC, "latest")
        there = segments(node)
        assert len(there) > 35
        assert used(disk) < 0.7

        # Above 75 %: what is expired goes, at any hour; what is not stays.
        make_old(node, there[:2])
        looked(node)
        assert segments(node) == there, "below 75 % expired segments wait for their hour"
        fill_to(disk, 0.8)
        wait_for_first_segment(node, there[2])
        looked(node)
        assert segments(node) == there[2:]
        assert eventually(lambda: expiry(node).get("last_round"), "status")["reasons"] == ["disk"]

        # Above 85 %: the oldest go, until it is 85 % again, not a whole round. Somebody holds the first of them.
        with holding(node.store / "commitlog" / f"{there[2]:020d}") as pid:
            fill_to(disk, 0.85 + 2.3 * per_segment)  # not a half: the log of the node grows on this disk too
            wait_for_first_segment(node, there[5])
            looked(node)
            assert segments(node) == there[5:], "a slow holder must not cost more segments"
            told = expiry(node)
            assert told["last_round"]["reasons"] == ["forced"]
            assert told["held_bytes"] == SEGMENT_BYTES
            assert any(f"({pid})" in one for one in told["held_by"]), told
            before = used(disk)
            assert "still held by" in commitmq("status", "--node", node.address).stdout
        eventually(lambda: used(disk) <= before - 0.9 * per_segment, "the space comes back")
        assert expiry(node)["overrode"] is None
        assert stored.check(node.address) == there[5]

        # The same when a group has not read what goes: it goes all the same, and loudly.
        with Admin(node.address) as admin:
            admin.reset_offsets("slow", TOPIC, "earliest")
        fill_to(disk, 0.85 + 0.3 * per_segment)
        wait_for_first_segment(node, there[6])
        over = eventually(lambda: expiry(node).get("overrode"), "status says whose messages went")
        assert "group slow" in over["needed_by"]
        assert over["segments"] == 1
        assert "needed segments are deleted" in node.log()
        assert "THE DISK WAS SO FULL" in commitmq("status", "--node", node.address).stdout
        looked(node)
        assert segments(node) == there[6:]
        # The group goes on at the first message that is left.
        with Consumer(TOPIC, group="slow", node=node.address, start="earliest") as consumer:
            first = consumer.poll(10)[0]
            assert stored.acked[first.queue_id, first.queue_offset][1].physical_offset >= there[6]
        stored.check(node.address, there[6])
