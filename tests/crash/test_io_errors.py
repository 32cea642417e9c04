"""Goal: a device that refuses, tears writes short, a clock that jumps and a worker that stands still cost no acknowledged
message, and what is refused is said.

Method: failpoints raise the errno that the system call at their place would, or hand less than wanted to the call that
writes; everything else is the real node. What was acknowledged is held against the files as in ``traffic``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from calamities import WrongClock
from test_kill9 import SETTINGS, check_everything
from traffic import Traffic, seed

from commitmq import Admin, Producer, Reader
from commitmq.errors import Outcome, SendError
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from nodes import WORKERS, Node, eventually, start_node

# Each errs once in the life of the node, under load; the node must go on or say what it refuses.
ERRORS = {
    "disk.reserve.segment:before": "errno:ENOSPC@4",
    "flush.before_checkpoint": "errno:EIO@2",
    "disk.replace.json:before": "errno:EIO@4",
    "journal.append": "short:7@3",
    "journal.before_fdatasync": "errno:EIO@6",
    "queue.append": "short:13@30",
    "queue.inside_create": "errno:ENOSPC@9",
    "queue.before_fdatasync": "errno:EIO@9",
}


def numbers(node: Node) -> list[int]:
    found: list[int] = []
    with Reader(queues=[("orders", 0)], node=node.address) as consumer:
        while batch := consumer.poll(1.0):
            found += [int(message.body.split()[0]) for message in batch]
    return found


@pytest.mark.parametrize("role", [pytest.param("flush", marks=pytest.mark.slow), "writer"])
def test_a_failed_flush_makes_the_store_read_only_until_it_is_started_again(tmp_path: Path, role: str) -> None:
    """Neither the death of the process that failed nor that of the whole node makes it forgotten."""
    extra = {"COMMITMQ_FAILPOINTS": f"{role}.before_fdatasync=errno:EIO@5", "COMMITMQ_FAILPOINTS_ONCE": str(tmp_path)}
    who = "commit_log.writer_sync_bytes=0" if role == "flush" else "commit_log.writer_sync_slow_ms=60000"
    settings = (*SETTINGS, who)
    with start_node(tmp_path, *settings, **extra) as node, Producer(node.address, timeout_s=5) as producer:
        acked = []
        with pytest.raises(SendError) as failed:
            for number in range(2_000):
                producer.send("orders", b"%d " % number, queue=0)
                acked.append(number)
        assert failed.value.code == "FLUSH_DISK_TIMEOUT"
        assert failed.value.outcome is Outcome.UNKNOWN

        def refusal() -> SendError:
            with pytest.raises(SendError) as refused:
                producer.send("orders", b"no", queue=0, ack="memory")
            return refused.value

        assert refusal().outcome is Outcome.NOT_STORED
        assert "read-only" in refusal().message
        with Admin(node.address) as admin:
            assert admin.status()["positions"]["flush_errno"] == 5
        note = node.store / "commitmq" / ("flush_failed" if role == "flush" else "writer_sync_failed")
        assert note.exists()
        pid = node.pids()[role]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: node.healed(role, pid), f"{role} is back")
        assert "read-only" in refusal().message, f"a new {role} process forgot what the old one knew"
        assert numbers(node)[: len(acked)] == acked, "reads go on"

        assert node.stop().returncode != 0, "a store whose flush failed is not closed in order"
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        assert "read from the device" in node.log()
        assert not note.exists()
        assert numbers(node)[: len(acked)] == acked
        producer.send("orders", b"1000 ", queue=0)


@pytest.mark.slow
def test_errors_of_the_device_under_load(tmp_path: Path) -> None:
    number = seed()
    fired = tmp_path / "fired"
    fired.mkdir()
    points = ";".join(f"{name}={action}" for name, action in ERRORS.items())
    extra = {"COMMITMQ_FAILPOINTS": points, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, **extra) as node:
        with Traffic(node.address, number).running() as traffic:
            eventually(
                lambda: {one.name for one in fired.iterdir()} == set(ERRORS) or traffic.check(),  # type: ignore[func-returns-value]
                f"all of {points} err",
                timeout_s=60,
            )
            traffic.wait_for_sends(5)
        assert node.log().count("worker died") == 0, "an error of the device is no reason to die"
        # After the failed sync of a ConsumeQueue a stop is not in order, and the next start makes the units anew.
        assert "a sync of ConsumeQueues failed" in node.log()
        assert node.stop().returncode != 0
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        check_everything(node, traffic)


@pytest.mark.slow
def test_a_clock_that_jumps_leaves_store_times_in_order(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path / "clock")
    extra = clock.environment
    with start_node(tmp_path, *SETTINGS, **extra) as node, Producer(node.address, timeout_s=10) as producer:
        sent = 0

        def send() -> None:
            nonlocal sent
            for _ in range(20):
                producer.send("orders", b"%d " % sent, queue=0)
                sent += 1

        send()
        clock.set(3600)
        send()
        clock.set(-3600)
        send()
        for role in ("writer", "flush"):
            pid = node.pids()[role]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda role=role, pid=pid: node.healed(role, pid), f"{role} is back")  # type: ignore[misc]
            send()
        node.kill_all()
        ended = node.start(**extra)
        assert ended.returncode == 0, ended.stderr
        send()
        assert numbers(node) == list(range(sent))
        assert node.stop().returncode == 0
        log = CommitLog(StoreLayout(node.store).commit_log, 1 << 18)
        stamps = [record.store_timestamp for record in log.iter_records()]
        log.close()
        assert stamps == sorted(stamps)
        assert len(stamps) == sent
        assert stamps[-1] - stamps[0] >= 3_600_000, "the clock did not jump"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_each_worker_stands_still_for_ten_seconds(tmp_path: Path) -> None:
    number = seed()
    with start_node(tmp_path, *SETTINGS) as node:
        with Traffic(node.address, number).running() as traffic:
            traffic.wait_for_sends(10)
            for role in WORKERS:
                pid = node.pids()[role]
                os.kill(pid, signal.SIGSTOP)
                time.sleep(10)
                os.kill(pid, signal.SIGCONT)
                traffic.wait_for_sends(5)
        assert node.log().count("worker died") == 0
        check_everything(node, traffic)


def test_a_clock_that_was_far_ahead_decides_nothing_once_it_is_right_again(tmp_path: Path) -> None:
    """Store timestamps follow it back, that is told, and expiry and look-ups by time are right for what came later."""
    clock = WrongClock(tmp_path / "clock")
    extra = clock.environment
    ahead_s = 400 * 86_400
    with start_node(tmp_path, *SETTINGS, **extra) as node, Producer(node.address, timeout_s=10) as producer:
        sent = 0

        def send() -> None:
            nonlocal sent
            for _ in range(40):
                producer.send("orders", b"%d " % sent + bytes(20_000), queue=0)
                sent += 1

        send()
        clock.set(ahead_s)
        send()
        clock.right()
        right_again = time.time_ns() // 1_000_000
        send()
        assert "the clock was ahead" in node.log()
        assert abs(node.row("writer")["info"]["clock"]["was_ahead_ms"] - ahead_s * 1000) < 600_000
        node.kill_all()
        ended = node.start(**extra)
        assert ended.returncode == 0, ended.stderr
        send()
        with Admin(node.address) as admin:
            begin = admin.offsets("orders", right_again)[0][3]
            assert begin is not None
            assert begin <= 80, "a look-up by time may begin early, never late"
            # All that was stored before the clock was right again lies before what was stored then.
            eventually(
                lambda: admin.expire(before=time.time_ns() // 1_000_000)["min_offset"] > 80 * 20_000,
                "what is older than now goes, whatever its timestamp",
            )
        assert node.stop().returncode == 0
        log = CommitLog(StoreLayout(node.store).commit_log, 1 << 18)
        stamps = [record.store_timestamp for record in log.iter_records()]
        log.close()
        assert stamps == sorted(stamps)
        assert stamps[-1] < right_again + 600_000, "what was sent afterwards has the right time"
