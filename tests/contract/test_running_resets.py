"""Goal: a reset moves a group whose members run: each goes on at the new offset at once, and no older commit undoes it.

Method: real nodes and consumers that poll, handle and commit while an administrator resets; requests of a member at the
level of the protocol; a coordinator that is killed around resets of several topics.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Consumer, FencedError, Message, Producer, RequestError
from nodes import Node, commitmq, eventually, start_node

pytestmark = pytest.mark.timeout(120)
SETTINGS = ("groups.heartbeat_interval_ms=200", "topics.default_queues=1", "supervisor.restart_backoff_max_ms=300")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("resets"), *SETTINGS) as made:
        yield made


@pytest.fixture
def admin(node: Node) -> Iterator[Admin]:
    with Admin(node.address) as made:
        yield made


def fill(node: Node, admin: Admin, topic: str, count: int, queues: int = 1) -> None:
    admin.topic_create(topic, queues)
    with Producer(node.address) as producer:
        for queue in range(queues):
            producer.send_batch(topic, [b"%d" % number for number in range(count)], queue=queue)
    eventually(lambda: all(one.max == count for one in admin.offsets(topic)), "all can be read")


def drain(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += list(consumer.poll(0.1))
    return found


def committed(admin: Admin, group: str) -> dict[tuple[str, int], int]:
    return {(topic, queue): offset for topic, queue, offset in admin.group(group)["offsets"]}


def test_a_member_that_reads_goes_back_at_once(node: Node, admin: Admin) -> None:
    fill(node, admin, "back", 100)
    with Consumer("back", group="back", node=node.address, auto_commit=False) as consumer:
        assert len(drain(consumer, 100)) == 100
        consumer.commit()
        with pytest.raises(FencedError):
            admin.reset_offsets("back", "back", 30)
        assert admin.reset_offsets("back", "back", 30, running=True) == [("back", 0, 30)]
        again = drain(consumer, 70)
        assert [one.queue_offset for one in again] == list(range(30, 100))
        consumer.commit()
        assert committed(admin, "back") == {("back", 0): 100}


def test_a_member_that_reads_jumps_ahead(node: Node, admin: Admin) -> None:
    fill(node, admin, "ahead", 5_000)
    with Consumer("ahead", group="ahead", node=node.address, auto_commit_interval_s=0) as consumer:
        consumer.poll(5, max_messages=10)
        admin.reset_offsets("ahead", "ahead", "latest", running=True)
        time.sleep(0.6)  # three heartbeats
        consumer.poll(0.1, max_messages=10)
        assert not list(consumer.poll(0.3, max_messages=10))
        with Producer(node.address) as producer:
            producer.send("ahead", b"new", queue=0)
        assert [one.queue_offset for one in drain(consumer, 1)] == [5_000]
    assert committed(admin, "ahead") == {("ahead", 0): 5_001}


def test_handlers_go_back_too_and_their_late_results_do_not_count(node: Node, admin: Admin) -> None:
    fill(node, admin, "handled", 20)
    seen: list[int] = []
    hold, held = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        seen.append(message.queue_offset)
        if message.queue_offset == 19 and not held.is_set():
            held.set()
            hold.wait(20)

    with Consumer("handled", group="handled", node=node.address, auto_commit_interval_s=0.1) as consumer:
        running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 2})
        running.start()
        try:
            assert held.wait(20)
            admin.reset_offsets("handled", None, "earliest", running=True)
            eventually(lambda: seen.count(0) == 2, "the group begins again while a handler of before still runs")
            hold.set()
            eventually(lambda: committed(admin, "handled").get(("handled", 0)) == 20, "all is committed")
        finally:
            hold.set()
            consumer.close()
            running.join(20)
    assert all(seen.count(number) == 2 for number in range(20))


def test_a_commit_under_way_does_not_undo_a_reset_ahead_or_back(node: Node, admin: Admin) -> None:
    fill(node, admin, "late", 100)

    def ask(op: str, **fields: Any) -> dict[str, Any]:
        return admin._ask("coordinator", op, {"group": "late", "member": "m", **fields})

    joined = ask("group.join", topics=["late"])
    ask("offset.commit", offsets=[["late", 0, 50]], generation=joined["generation"])
    admin.reset_offsets("late", "late", 10, running=True)
    with pytest.raises(FencedError):
        ask("offset.commit", offsets=[["late", 0, 60]], generation=joined["generation"])
    owned = [["late", 0]]
    told = ask("group.heartbeat", generation=joined["generation"], owned=owned)
    assert (told["anew"], told["assigned"]) == (owned, owned)
    # The answer was lost: it comes again, also to a join; once it was read it comes no more.
    assert ask("group.heartbeat", generation=joined["generation"], owned=owned)["anew"] == owned
    assert ask("group.join", topics=["late"], owned=owned, generation=joined["generation"])["anew"] == owned
    assert "anew" not in ask("group.heartbeat", generation=told["generation"], owned=owned)
    assert ask("offset.commit", offsets=[["late", 0, 11]], generation=told["generation"])["stored"] == [["late", 0, 11]]
    ask("group.leave")


def test_several_topics_and_a_dry_run_on_the_command_line(node: Node, admin: Admin) -> None:
    fill(node, admin, "one", 10)
    fill(node, admin, "two", 10, queues=2)

    def run(*words: str) -> str:
        done = commitmq("group", "reset", "both", *words, "--node", node.address)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    with Consumer(["one", "two"], group="both", node=node.address, auto_commit=False) as consumer:
        drain(consumer, 30)
        consumer.commit()
        before = committed(admin, "both")
        planned = json.loads(run("--to", "4", "--dry-run", "--json"))
        assert planned["offsets"] == [["one", 0, 4], ["two", 0, 4], ["two", 1, 4]]
        assert planned["before"] == [10, 10, 10]
        assert committed(admin, "both") == before
        assert "WOULD BE" in run("one", "--to", "latest", "--dry-run")
        run("two", "--to", "4")
        assert committed(admin, "both") == {("one", 0): 10, ("two", 0): 4, ("two", 1): 4}
        assert len(drain(consumer, 12)) == 12
        run("--to", "earliest")
        assert len(drain(consumer, 30)) == 30


@pytest.mark.slow
def test_a_killed_coordinator_resets_all_topics_or_none(tmp_path: Path) -> None:
    """What was acknowledged stays; the members of before come back and do not undo it."""
    chance = random.Random(7)
    with start_node(tmp_path, *SETTINGS, "groups.session_timeout_ms=1000") as node, Admin(node.address) as admin:
        for topic in ("a", "b", "c"):
            fill(node, admin, topic, 50)
        with Consumer(["a", "b", "c"], group="g", node=node.address, auto_commit_interval_s=0) as consumer:
            drain(consumer, 150)
            for turn in range(4):
                to = 10 + turn
                pid = node.pids()["coordinator"]
                killer = threading.Timer(chance.random() * 0.01, os.kill, (pid, signal.SIGKILL))
                killer.start()
                acknowledged = False
                with contextlib.suppress(RequestError), Admin(node.address, timeout_s=0.3) as hasty:
                    acknowledged = bool(hasty.reset_offsets("g", None, to, running=True))
                killer.join()
                eventually(partial(node.healed, "coordinator", pid), "the coordinator is back")
                found = set(committed(admin, "g").values())
                assert len(found) == 1 or not acknowledged
                seen = {one.queue_offset for one in drain(consumer, 3 * (50 - to) if acknowledged else 0)}
                if acknowledged:
                    assert seen >= set(range(to, 50))
                drain(consumer, 0)
                eventually(
                    lambda: not consumer.poll(0.05) and set(committed(admin, "g").values()) == {50}, "all is committed"
                )
