"""Goal: a group goes on within seconds, with the settings that a node has by default: after `kill -9` of a consumer, while a
handler takes minutes, and when very many members join at once.

Method: a real node with its defaults for groups, real consumers in programs of their own and in this one. Times count from the
event to the message, as a user sees them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Consumer, Producer
from commitmq.errors import GroupNotFoundError
from nodes import Node, eventually, start_node

AGAIN_S = 5.0
SETTLED_S = 10.0
MEMBERS, PROGRAMS = 200, 10

PROGRAM = """
import os, sys
from commitmq import Consumer

with Consumer("killed", group="killed", node=sys.argv[1]) as consumer:
    while True:
        for message in consumer.poll(1.0):
            os.write(1, message.body + b"\\n")
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with start_node(tmp_path, "topics.default_queues=8") as made:
        yield made


def break_connections(name: str) -> int:
    """End this process's connections to the node's process ``name``; returns how many there were."""
    broken = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue  # the one of the listing
        try:
            one = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # no socket; a pipe must not stay open at this end
            continue
        with contextlib.suppress(OSError), one:
            if one.family == socket.AF_UNIX and name in str(one.getpeername()):
                one.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def test_queues_of_a_killed_consumer_are_read_again_soon(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send("killed", b"first", queue=0)
        with subprocess.Popen([sys.executable, "-c", PROGRAM, node.address], stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == b"first\n"
            with Consumer("killed", group="killed", node=node.address) as other:
                eventually(lambda: len(other.poll(0.1)) or len(other.assignment) == 4, "the two share the queues", 30)
                program.kill()
                killed = time.monotonic()
                for queue in range(8):
                    producer.send("killed", b"later", queue=queue)
                seen: set[int] = set()
                while len(seen) < 8 and time.monotonic() < killed + 60:
                    seen |= {message.queue_id for message in other.poll(0.1) if message.body == b"later"}
                took_s = time.monotonic() - killed
    assert seen == set(range(8))
    assert took_s < AGAIN_S


def test_a_consumer_whose_connection_breaks_keeps_its_queues(node: Node) -> None:
    lost: list[object] = []
    with Producer(node.address) as producer:
        producer.send("broken", b"1")
    with (
        Consumer("broken", group="broken", node=node.address, on_revoke=lost.append) as consumer,
        Admin(node.address) as admin,
    ):
        eventually(lambda: len(consumer.poll(0.1)) < 0 or len(consumer.assignment) == 8, "it has all queues", 30)
        assert break_connections("coordinator") > 0
        broken = time.monotonic()
        while time.monotonic() < broken + 4:
            consumer.poll(0.2)
        assert len(consumer.assignment) == 8
        assert lost == []
        assert "session ended" not in node.log()
        assert len(admin.group("broken")["members"]) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_handler_of_five_minutes_keeps_its_membership(node: Node) -> None:
    handled: list[float] = []
    with Producer(node.address) as producer:
        producer.send("slow", b"1", queue=0)
        producer.send("slow", b"2", queue=0)
    consumer = Consumer("slow", group="slow", node=node.address)

    def handle(_message: object) -> None:
        if not handled:
            time.sleep(300)
        handled.append(time.monotonic())
        if len(handled) == 2:
            consumer.close()

    consumer.run(handle, workers=1)
    assert len(handled) == 2
    assert "session ended" not in node.log()


CROWD = """
import sys, threading, time
from commitmq import Consumer

node, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
over = threading.Event()

def work(number):
    with Consumer("crowd", group="crowd", node=node, member=f"m{number:03}") as consumer:
        while not over.is_set():
            consumer.poll(0.2)

threads = [threading.Thread(target=work, args=[first + number]) for number in range(count)]
print("here", flush=True)
sys.stdin.readline()
for thread in threads:
    thread.start()
sys.stdin.readline()
over.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_two_hundred_members_settle_soon_with_each_queue_owned_once(tmp_path: Path) -> None:
    programs: list[subprocess.Popen[bytes]] = []
    with start_node(tmp_path, f"topics.default_queues={MEMBERS}") as node, Admin(node.address) as admin:
        with Producer(node.address) as producer:
            producer.send("crowd", b"1")
        try:
            for first in range(0, MEMBERS, MEMBERS // PROGRAMS):
                command = [sys.executable, "-c", CROWD, node.address, str(first), str(MEMBERS // PROGRAMS)]
                programs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert [program.stdout.readline() for program in programs if program.stdout] == [b"here\n"] * PROGRAMS
            tell(programs)
            began = time.monotonic()
            owners: list[list[tuple[str, int]]] = []
            while time.monotonic() < began + 120:
                with contextlib.suppress(GroupNotFoundError):
                    members = admin.group("crowd")["members"]
                    owners = [[tuple(queue) for queue in member["queues"]] for member in members]
                if len(owners) == MEMBERS and all(len(mine) == 1 for mine in owners):
                    break
                time.sleep(0.1)
            took_s = time.monotonic() - began
            assert Counter(queue for mine in owners for queue in mine) == {("crowd", n): 1 for n in range(MEMBERS)}
            tell(programs)
            assert [program.wait(60) for program in programs] == [0] * PROGRAMS
        finally:
            for program in programs:
                program.kill()
                program.communicate()
    assert took_s < SETTLED_S


def tell(programs: list[subprocess.Popen[bytes]]) -> None:
    """Let the programs go on."""
    for program in programs:
        assert program.stdin is not None
        program.stdin.write(b"\n")
        program.stdin.flush()
