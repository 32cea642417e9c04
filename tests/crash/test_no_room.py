"""Goal: without room on the disk no process ends by itself, whatever file it writes at that moment, and whenever it begins:
each waits, says why, and goes on with everything when there is room.

Method: a node in which messages wait for timers and delay levels, groups share queues, in order too, and commit. Its store is
on a small file system that a filler takes, and processes are killed meanwhile, so that they begin there. And without a full
disk: at each place that writes a file, a failpoint says for a few calls that there is no room.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from traffic import seed

from commitmq import Admin, Consumer, Producer, Reader, ShareConsumer
from commitmq.errors import CommitMQError, Outcome, SendError
from delays import everything
from nodes import Node, eventually, start_node
from small_disk import fill, small_disk

pytestmark = pytest.mark.timeout(400)
LATE, SHARED, ORDERED = "late", "shared", "ordered"
SETTINGS = (
    "disk.warning_ratio=1.0",
    "retention.clean_forcibly=false",
    "memory.enable=false",
    "commit_log.segment_bytes=4194304",
    "consume_queue.file_bytes=2000",
    "timer.persist_interval_ms=50",
    "timer.log_file_bytes=1040",
    "schedule.persist_interval_ms=50",
    "pop.persist_interval_ms=50",
    "pop.commit_interval_ms=50",
    "groups.offsets_interval_ms=200",
    "supervisor.restart_backoff_max_ms=300",
)
ROLES = (
    "coordinator", "dispatcher-consume_queue", "dispatcher-index", "reput", "flush", "allocate", "reader-0", "cleanup",
    "writer", "schedule", "timer", "pop",
)  # fmt: skip
# The place, and between which of its hits the errors begin.
PLACES = {
    "timer/timerlog.write": (3, 6),
    "timer/timerwheel.write": (2, 4),
    "timer/timercheck.write": (2, 5),
    "timer/json.write": (3, 6),
    "schedule/json.write": (3, 6),
    "pop/json.write": (2, 4),
    "pop/orders.append": (3, 9),
    "coordinator/journal.append": (4, 9),
    "coordinator/json.write": (4, 7),
    "dispatcher-consume_queue/queue.append": (20, 60),
    "dispatcher-consume_queue/queue.before_create": (4, 8),
    "dispatcher-index/dispatcher_state.write": (1, 2),
    "flush/checkpoint.write": (2, 3),
    "flush/sidecar.write": (2, 3),
}


class Traffic:
    """Sends and receives in its own threads, until :meth:`end`. ``taken``: bodies that the node has acknowledged, by topic."""

    def __init__(self, node: Node) -> None:
        self.address = node.address
        self.taken: dict[str, set[bytes]] = {LATE: set(), SHARED: set(), ORDERED: set()}
        self.unknown: set[bytes] = set()
        self.acked: Counter[bytes] = Counter()
        """Messages of the shared topics whose ack the node has taken."""
        self.seen: set[bytes] = set()
        self._stop = threading.Event()
        works: list[Callable[[], None]] = [self._send, self._commit]
        works += [lambda topic=topic: self._share(topic) for topic in (SHARED, ORDERED)]  # type: ignore[misc]
        self._threads = [threading.Thread(target=self._patiently, args=(work,), daemon=True) for work in works]
        with Admin(self.address) as admin:
            for topic in self.taken:
                admin.topic_create(topic, 1)
        for thread in self._threads:
            thread.start()

    def _patiently(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(CommitMQError):
                work()
            time.sleep(0.1)

    def _send(self) -> None:
        with Producer(self.address, timeout_s=3) as producer:
            for number in range(1_000_000):
                if self._stop.is_set():
                    return
                for topic, delay in ((LATE, {"delay": 1.0}), (LATE, {"delay_level": 1}), (SHARED, {}), (ORDERED, {})):
                    body = f"{topic} {delay} {time.monotonic_ns()} {number}".encode()
                    try:
                        producer.send(topic, body, **delay)
                    except SendError as error:
                        if error.outcome is not Outcome.NOT_STORED:
                            self.unknown.add(body)
                        time.sleep(0.05)
                    else:
                        self.taken[topic].add(body)
                time.sleep(0.03)

    def _share(self, topic: str) -> None:
        with ShareConsumer(topic, group=f"of-{topic}", node=self.address, ordered=topic == ORDERED) as consumer:
            while not self._stop.is_set():
                for message in consumer.receive(wait_s=0.3):
                    self.seen.add(bytes(message.body))  # (an ack without an answer may be stored)
                    consumer.ack(message)
                    self.acked[bytes(message.body)] += 1

    def _commit(self) -> None:
        with Consumer(SHARED, group="commits", node=self.address) as consumer:
            while not self._stop.is_set():
                consumer.poll(0.2)
                consumer.commit()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def check(self, node: Node) -> None:
        """Everything was delivered, late messages once; the groups of the shared topics get what they lack."""
        for topic, bodies in self.taken.items():
            found: Counter[bytes] = Counter()

            def whole(topic: str = topic, bodies: set[bytes] = bodies, found: Counter[bytes] = found) -> bool:
                found.clear()
                found.update(one.body for one in everything(node, topic))
                return found.keys() >= bodies

            eventually(whole, f"{len(bodies)} messages of {topic} are delivered", timeout_s=60)
            assert [body for body, times in found.items() if times > 1] == []
            assert found.keys() <= bodies | self.unknown
        for topic in (SHARED, ORDERED):
            left = self.taken[topic] - self.seen
            with ShareConsumer(topic, group=f"of-{topic}", node=node.address, ordered=topic == ORDERED) as consumer:
                deadline = time.monotonic() + 90
                while left and time.monotonic() < deadline:
                    for message in consumer.receive(wait_s=0.3):
                        consumer.ack(message)
                        left.discard(bytes(message.body))
            assert left == set(), f"{len(left)} messages of {topic} never came"


@contextlib.contextmanager
def traffic(node: Node) -> Iterator[Traffic]:
    running = Traffic(node)
    try:
        yield running
    finally:
        running.end()


def all_flow(running: Traffic, node: Node) -> None:
    """Wait until each kind of message has come through."""
    eventually(lambda: len(running.taken[ORDERED]) > 20 and len(running.acked) > 20, "messages flow", timeout_s=60)
    with Reader(LATE, node=node.address, start="earliest") as reader:
        eventually(lambda: len(reader.poll(timeout_s=0.2)), "late messages come", timeout_s=60)


def restarts(node: Node) -> dict[str, int]:
    return {row["role"]: row["restarts"] for row in node.report()["processes"]}


def is_whole(node: Node) -> bool:
    return {row["state"] for row in node.report()["processes"]} <= {"ready", "done", "idle"}


def live(folder: Path, victims: list[str]) -> None:
    """Kill ``victims``, one after the other, while the disk is full."""
    with small_disk(folder / "disk", "48m") as disk, start_node(disk, *SETTINGS) as node:
        with traffic(node) as running:
            all_flow(running, node)
            fill(disk)
            eventually(lambda: node.report()["disk_warnings"], "the node says that there is no room")
            time.sleep(1.0)
            for role in victims:
                old = node.pids()[role]
                os.kill(old, signal.SIGKILL)
                eventually(lambda role=role, old=old: node.row(role)["pid"] not in (old, None), f"{role} runs again")  # type: ignore[misc]
                time.sleep(1.0)
            warnings = node.report()["disk_warnings"]
            assert any("waits for room on the disk" in one for one in warnings), warnings
            assert restarts(node) == {role: victims.count(role) for role in restarts(node)}, "nobody else has died"
            (disk / "filler").unlink()
            eventually(lambda: is_whole(node), "the node is whole", timeout_s=60)
            before = len(running.acked)
            eventually(lambda: len(running.acked) > before + 20, "messages flow again", timeout_s=60)
        eventually(lambda: not node.report()["disk_warnings"], "nobody waits any more")
        running.check(node)
        assert sum(restarts(node).values()) == len(victims)


def test_processes_begin_on_a_full_disk_and_wait_there(tmp_path: Path) -> None:
    live(tmp_path, random.Random(seed()).sample(ROLES, 3))


@pytest.mark.long
@pytest.mark.parametrize("first", range(3))
def test_every_process_begins_on_a_full_disk_and_waits_there(tmp_path: Path, first: int) -> None:
    victims = list(ROLES[first::3])
    random.Random(seed()).shuffle(victims)
    live(tmp_path, victims)


def err(tmp_path: Path, places: list[str], number: int) -> None:
    """Each of ``places`` has no room for a few calls."""
    chance = random.Random(number)
    fired = tmp_path / "fired"
    fired.mkdir()
    points = []
    for place in places:
        begin = chance.randint(*PLACES[place])
        points.append(f"{place}=errno:ENOSPC@{begin}-{begin + chance.randint(0, 4)}")
    extra = {"COMMITMQ_FAILPOINTS": ";".join(points), "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, **extra) as node:
        with traffic(node) as running:
            wanted = {place.replace("/", "%") for place in places}
            deadline = time.monotonic() + 60
            while missing := wanted - {one.name for one in fired.iterdir()}:
                assert time.monotonic() < deadline, f"not met: {sorted(missing)}"
                time.sleep(0.2)
            all_flow(running, node)
        running.check(node)
        assert sum(restarts(node).values()) == 0
        assert not [line for line in node.log().splitlines() if "worker died" in line]
        eventually(lambda: not node.report()["disk_warnings"], "nobody waits any more")


def test_a_file_without_room_is_waited_for(tmp_path: Path) -> None:
    """Half of the places, by the seed."""
    number = seed()
    err(tmp_path, random.Random(number).sample(sorted(PLACES), len(PLACES) // 2), number)


@pytest.mark.long
@pytest.mark.parametrize("place", sorted(PLACES))
def test_each_file_without_room_is_waited_for(tmp_path: Path, place: str) -> None:
    err(tmp_path, [place], seed())


def test_a_process_that_cannot_wait_itself_runs_again_in_a_moment(tmp_path: Path) -> None:
    """Whatever its part was that found no room. That is no death."""
    fired = tmp_path / "fired"
    fired.mkdir()
    extra = {"COMMITMQ_FAILPOINTS": "schedule.begin=errno:ENOSPC@1", "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, **extra) as node, Producer(node.address) as producer:
        producer.send(LATE, b"delayed", delay_level=1)
        eventually(lambda: [one.body for one in everything(node, LATE)], "it is delivered")
        assert sum(restarts(node).values()) == 0
        said = [line for line in node.log().splitlines() if "waits for room on the disk" in line]
        assert len(said) == 1
        assert "role=schedule" in said[0]
        assert "No space left on device" in said[0]
