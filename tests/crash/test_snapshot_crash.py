"""Goal: a snapshot of a running node has all that was acknowledged as flushed before it began, a node starts on it, and no
death, full disk or expiry leaves a wrong or a half one under its name.

Method: real nodes under load with many segments; the verb killed at each of its steps, and the node killed meanwhile; a disk
of a few megabytes (errno at the write); a node on the snapshot is asked for everything.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from commitmq import Admin, Consumer, Producer
from commitmq.security.access_file import AccessFile, AccessTable
from commitmq.security.policy import Secret, User
from commitmq.supervision.exit_codes import CliExit
from delays import everything
from expiring import (
    AGE_SETTING,
    SETTINGS,
    TOPIC,
    Stored,
    make_old,
    segments,
    wait_for_first_segment,
    wait_until_durable,
)
from nodes import Node, commitmq, environment, eventually, start_node, started

POINTS = (
    "snapshot.positions",
    "snapshot.chunk",
    "snapshot.log",
    "snapshot.taken",
    "snapshot.derived",
    "snapshot.before_name",
)


def taken(node: Node, target: Path, *words: str, code: int = 0, **extra: str) -> dict[str, object]:
    ended = commitmq("store", "snapshot", str(node.store), "--to", str(target), "--json", *words, **extra)
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout) if code == 0 else {"error": ended.stderr}


def test_a_node_on_the_snapshot_has_all_that_there_was(tmp_path: Path) -> None:
    due_ms = time.time_ns() // 1_000_000 + 15_000
    with start_node(tmp_path, *SETTINGS) as node:
        stored = Stored()
        with Producer(node.address) as producer:
            stored.send(producer, 300)
            producer.send("parcels", b"later", deliver_at=due_ms)
            producer.send("parcels", b"now")
            with Consumer([TOPIC], group="kitchen", node=node.address, start="earliest") as consumer:
                got = 0
                while got < 100:
                    got += len(consumer.poll(5, max_messages=100 - got))
                consumer.commit()
            committed = positions(node)
            assert sum(committed.values()) == 100
            # Load while the snapshot is taken: what comes meanwhile may be in it or not, but no offset without its message.
            stop, began = threading.Event(), threading.Event()
            load = threading.Thread(target=_send_until, args=(node.address, stop, began))
            load.start()
            try:
                assert began.wait(30)
                slow = "snapshot.positions=delay:500ms;snapshot.log=delay:1500ms"
                made = taken(node, tmp_path / "copy", COMMITMQ_FAILPOINTS=slow)
            finally:
                stop.set()
                load.join()
        assert (made["verified"], made["segments_copied"]) == (True, 1)
        linked = [one for one in (tmp_path / "copy" / "commitlog").iterdir() if one.stat().st_nlink == 2]
        assert len(linked) == made["segments_linked"]
        verified = commitmq("store", "verify", str(tmp_path / "copy"))
        assert verified.returncode == 0, verified.stdout
        assert not (tmp_path / ".copy.partial").exists()
    with started(Node(tmp_path / "copy", *SETTINGS)) as again:
        stored.check(again.address)
        assert positions(again) == committed
        with Admin(again.address) as admin:
            loaded = admin.group_lag("loaders")
            assert sum(one.committed or 0 for one in loaded) > 0
            assert [one for one in loaded if one.problem] == []
        with Producer(again.address) as producer:
            stored.send(producer, 50)
        stored.check(again.address)
        eventually(lambda: len(everything(again, "parcels")) >= 2, "the delayed message comes", timeout_s=40)
        assert sorted(bytes(one.body) for one in everything(again, "parcels")) == [b"later", b"now"]
        assert time.time_ns() // 1_000_000 >= due_ms


def _send_until(address: str, stop: threading.Event, began: threading.Event) -> None:
    """Send, receive and commit; ``began`` at the first commit."""
    with (
        Producer(address) as producer,
        Consumer(["load"], group="loaders", node=address, start="earliest") as consumer,
    ):
        while not stop.is_set():
            producer.send("load", b"x" * 500)
            if len(consumer.poll(0.2)):
                consumer.commit()
                began.set()


def positions(node: Node) -> dict[int, int]:
    with Admin(node.address) as admin:
        return {one.queue: one.committed or 0 for one in admin.group_lag("kitchen") if one.topic == TOPIC}


@pytest.mark.slow
def test_a_snapshot_that_dies_leaves_nothing_and_the_next_one_is_right(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        stored = Stored()
        with Producer(node.address) as producer:
            stored.send(producer, 150)
        for point in POINTS:
            ended = commitmq(
                "store",
                "snapshot",
                str(node.store),
                "--to",
                str(tmp_path / "copy"),
                COMMITMQ_FAILPOINTS=f"{point}=kill",
            )
            assert ended.returncode == -signal.SIGKILL, (point, ended.stderr)
            assert not (tmp_path / "copy").exists(), point
            assert (tmp_path / ".copy.partial").exists(), point
        full = {"COMMITMQ_FAILPOINTS": "snapshot.chunk=errno:ENOSPC@1"}
        assert "no space" in str(taken(node, tmp_path / "copy", code=CliExit.STORE_UNUSABLE, **full)["error"])
        assert sorted(one.name for one in tmp_path.iterdir() if "copy" in one.name) == []
        taken(node, tmp_path / "copy", "--copy")
        assert "exists already" in str(taken(node, tmp_path / "copy", code=CliExit.STORE_UNUSABLE)["error"])
        ended = commitmq(
            "store",
            "snapshot",
            str(node.store),
            "--to",
            str(tmp_path / "copy2"),
            COMMITMQ_FAILPOINTS="snapshot.named=kill",
        )
        assert ended.returncode == -signal.SIGKILL
        stored.check(node.address)
    for name in ("copy", "copy2"):
        assert all(one.stat().st_nlink == 1 for one in (tmp_path / "copy" / "commitlog").iterdir())
        with started(Node(tmp_path / name, *SETTINGS)) as again:
            stored.check(again.address)


@pytest.mark.slow
def test_a_node_that_dies_meanwhile_makes_the_snapshot_fail_and_loses_nothing(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        stored = Stored()
        with Producer(node.address) as producer:
            stored.send(producer, 150)
        verb = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "commitmq.cli.main",
                "store",
                "snapshot",
                str(node.store),
                "--to",
                str(tmp_path / "copy"),
            ],
            env=environment(COMMITMQ_FAILPOINTS="snapshot.positions=delay:6s"),
            stderr=subprocess.PIPE,
        )
        partial = tmp_path / ".copy.partial"
        eventually(
            lambda: (partial / "commitmq" / "store.json").exists() or (partial / "checkpoint").exists(), "it began"
        )
        node.kill_all()
        told = verb.communicate(timeout=60)[1]
        assert verb.returncode == CliExit.STORE_UNUSABLE, told
        assert b"repeat the snapshot" in told
        assert not (tmp_path / "copy").exists()
        assert not partial.exists()
        assert node.start().returncode == 0
        stored.check(node.address)
        made = taken(node, tmp_path / "copy")
        assert made["verified"]
    with started(Node(tmp_path / "copy", *SETTINGS)) as again:
        stored.check(again.address)


@pytest.mark.slow
def test_expiry_meanwhile_harms_neither_side(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS, AGE_SETTING) as node:
        stored = Stored()
        with Producer(node.address) as producer:
            stored.send(producer, 300)
        wait_until_durable(node)
        bases = segments(node)
        verb = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "commitmq.cli.main",
                "store",
                "snapshot",
                str(node.store),
                "--to",
                str(tmp_path / "copy"),
            ],
            env=environment(COMMITMQ_FAILPOINTS="snapshot.log=delay:4s@1"),
            stderr=subprocess.PIPE,
        )
        eventually(
            lambda: (tmp_path / ".copy.partial" / "commitlog" / f"{bases[0]:020d}").exists(), "the log was taken"
        )
        make_old(node, bases[:3])
        wait_for_first_segment(node, bases[3])
        told = verb.communicate(timeout=60)[1]
        assert verb.returncode == 0, told
        assert stored.check(node.address) == bases[3]
    with started(Node(tmp_path / "copy", *SETTINGS)) as again:
        assert stored.check(again.address) == bases[3], "it was taken again, without what expired"


def _add_user(table: AccessTable) -> None:
    table.users["ann"] = User("ann", Secret.make())


@pytest.mark.slow
def test_what_cannot_be_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:

        def refused(target: Path, message: str) -> None:
            assert message in str(taken(node, target, code=CliExit.STORE_UNUSABLE)["error"])

        refused(node.store / "copy", "cannot be in the store itself")
        refused(tmp_path / "absent" / "copy", "there is no such folder")
        (tmp_path / "file").write_text("x")
        refused(tmp_path / "file", "exists already")
        (tmp_path / "empty").mkdir()
        assert taken(node, tmp_path / "empty")["records"] == 0, "a store without a message"
        users = node.store / "config/security/acl.json"
        AccessFile(node.store).change(_add_user)
        whole = users.read_text()
        users.write_text("{")
        refused(tmp_path / "copy", "the file of users is damaged")
        users.unlink()
        refused(tmp_path / "copy", "the file of users is missing")
        assert not (tmp_path / "copy").exists()
        users.write_text(whole)
        assert taken(node, tmp_path / "copy")["records"] == 0
        assert node.stop().returncode == 0
        assert "no node runs" in str(taken(node, tmp_path / "other", code=CliExit.NODE_UNAVAILABLE)["error"])
    with started(Node(tmp_path / "empty")) as again, Producer(again.address) as producer:
        producer.send("t", b"x")
