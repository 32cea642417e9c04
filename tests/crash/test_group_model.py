"""Goal: whatever happens to topics, members and the node's processes, a group handles every message of every topic that it
could read, at least once; it commits nothing behind a queue's end or of a topic that is gone, nobody undoes a reset, and no
queue is committed by two members in turn without having changed hands.

Method: one seeded actor sends, deletes topics and makes them anew, lets them grow and shrink, kills the coordinator and the
readers, and resets the group by hand. Members are threads that join, leave, die without a word, sleep for longer than their
session, and get exceptions from outside in the midst of polls. What they handled is compared with what was acknowledged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from commitmq import Admin, CommitMQError, Consumer, MessageBatch, Producer, ProtocolError, RequestError
from commitmq.client.receiving.assignment import Queue, QueueState
from commitmq.client.receiving.membership import CommitProgress, Committer
from commitmq.client.receiving.puller import Puller
from interrupts import logging_survives
from nodes import Node, eventually, start_node
from shares import shared

# Who is interrupted while it opens a connection leaves the socket to the garbage collector, which complains.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

# A consumer imports it when it is made; an import that is interrupted fails in every thread that waits for it.
assert Puller.__name__ == "Puller"

# A thread that is being started has its starter's id for a moment, and would get the exception in its place.
STARTING = threading.RLock()

SESSION_S = 1.5
QUEUES = 4
SETTLED_S = 60


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("model"),
        "reader.count=2",
        "groups.heartbeat_interval_ms=200",
        f"groups.session_timeout_ms={int(SESSION_S * 1000)}",
    ) as made:
        yield made


class Interrupted(BaseException):
    """What comes from outside into a member's thread."""


class Commit(NamedTuple):
    """One that was stored: when, by whom, what was known before, and how far it says the group is."""

    began: float
    ended: float
    state: QueueState
    known: int
    offset: int


class Book:
    """What was acknowledged, handled and committed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted: set[bytes] = set()
        self.handled: set[bytes] = set()
        self.commits: dict[tuple[Queue, int], list[Commit]] = {}

    def missing(self) -> set[bytes]:
        with self.lock:
            return self.wanted - self.handled

    def forget(self, prefix: bytes) -> None:
        """Messages of a topic that is about to be deleted: whoever has not read them by now cannot."""
        with self.lock:
            self.wanted = {one for one in self.wanted if not one.startswith(prefix)}

    def again(self, prefix: bytes, before: set[bytes]) -> None:
        """The group was set back in one queue: what was handled ``before`` of it has to be handled once more."""
        with self.lock:
            self.handled -= {one for one in before if one.startswith(prefix)}

    def committed(
        self, began: float, progress: CommitProgress, states: dict[Queue, QueueState], stored: set[Queue]
    ) -> None:
        ended = time.monotonic()
        with self.lock:
            for key in stored & states.keys():
                state = states[key]
                commit = Commit(began, ended, state, progress.known.get(key, -1), progress.offsets[key])
                self.commits.setdefault((key, state.incarnation), []).append(commit)

    def check_owners(self) -> None:
        """A member that committed, and then another one did, does not commit by what it knew before.

        A queue may come back to who had it; then what it knows is what the other one left.
        """
        for (key, _), commits in self.commits.items():
            last: dict[int, float] = {}  # state -> the latest end of one of its commits
            others: dict[int, tuple[float, set[int]]] = {}  # state -> when others committed behind it, and what
            for one in sorted(commits, key=lambda one: one.ended):
                since, left = others.pop(id(one.state), (one.began, set()))
                assert one.began <= since or one.known in left, f"two members committed {key} in turn: {commits}"
                for other, at in last.items():
                    if other != id(one.state) and at < one.began:
                        others.setdefault(other, (one.ended, set()))[1].add(one.offset)
                last[id(one.state)] = one.ended


class Member:
    """A member of the group, and its thread."""

    def __init__(self, node: Node, group: str, topics: list[str], book: Book, rng: random.Random) -> None:
        self.asleep = threading.Event()
        self._book = book
        self._end: str | None = None
        self._sleep_s = 0.0
        self._rng = random.Random(rng.random())
        self._consumer: Consumer | None = None
        self._batch: MessageBatch | None = None  # what poll returned and is not handled yet
        self._done = False
        self._make: Callable[[], Consumer] = lambda: Consumer(
            topics, group=group, node=node.address, auto_commit_interval_s=rng.choice((0.0, 0.1)), timeout_s=30
        )
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def interrupt(self) -> None:
        ident = self._thread.ident
        with STARTING:
            if ident is None or not self._thread.is_alive():
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupted))

    def sleep(self, seconds: float) -> None:
        self.asleep.clear()
        self._sleep_s = seconds

    def end(self, how: str) -> None:
        self._end = how
        self._thread.join(60)
        assert not self._thread.is_alive(), "".join(
            traceback.format_stack(sys._current_frames()[self._thread.ident or 0])
        )

    def _run(self) -> None:
        """:meth:`_work` until it is done. An exception from outside may come at any place, also between two attempts."""
        while not self._done:
            try:
                while not self._done:
                    with contextlib.suppress(Interrupted):
                        self._work()
            except Interrupted:
                continue

    def _work(self) -> None:
        while self._end is None or self._batch is not None:
            if self._consumer is None:
                self._consumer = self._make()
            consumer = self._consumer
            if self._batch is not None:
                bodies = [one.body for one in self._batch]
                with self._book.lock:
                    self._book.handled.update(bodies)
                self._batch = None
                continue
            if self._sleep_s:
                self._nap(consumer)
            try:
                self._batch = consumer.poll(0.1, self._rng.choice((1, 7, 100, 10_000)))
            except CommitMQError as error:
                if not isinstance(error, ProtocolError) or error.code in ("INVALID_PARAMETER", "FENCED"):
                    self.errors.append(error)
                    self._end = "die"
        if self._consumer is not None:
            if self._end == "die" and self._consumer._member is not None:
                self._consumer._member._is_member = False  # so that it does not say good-bye
            self._consumer.close(commit=self._end == "leave")
        self._done = True

    def _nap(self, consumer: Consumer) -> None:
        """The whole process stands still: neither polls nor heartbeats."""
        member = consumer._member
        assert member is not None
        turn = member._turn
        member._turn = lambda: 0.05  # type: ignore[method-assign]
        try:
            seconds, self._sleep_s = self._sleep_s, 0.0
            self.asleep.set()
            time.sleep(seconds)
        finally:
            member._turn = turn  # type: ignore[method-assign]


class World:
    """The actor."""

    def __init__(self, node: Node, seed: int, steps: int) -> None:
        self.node, self.seed, self.steps = node, seed, steps
        self.rng = random.Random(seed)
        self.group = f"model{seed}"
        self.names = [f"model{seed}-{one}" for one in "ab"]
        self.lives = dict.fromkeys(self.names, 0)  # which incarnation, counted here
        self.queues: dict[str, int] = {}
        self.book = Book()
        self.members: list[Member] = []
        self.number = 0

    def run(self) -> None:
        with (
            Admin(self.node.address, timeout_s=30) as self.admin,
            Producer(self.node.address, timeout_s=30) as self.producer,
        ):
            for name in self.names:
                self.make(name)
            self.join()
            try:
                for _ in range(self.steps):
                    self.step()
                self.settle()
            finally:
                for member in self.members:
                    member.end("leave")
            self.check_offsets()
        for member in self.members:
            assert not member.errors, member.errors
        self.book.check_owners()

    def step(self) -> None:
        actions: list[tuple[int, Any]] = [
            (6, self.send),
            (3, self.interrupt),
            (2, self.join),
            (2, self.part),
            (1, self.nap),
            (1, self.reset),
            (2, self.delete),
            (2, self.resize),
            (1, self.kill),
            (1, self.check_offsets),
        ]
        action = self.rng.choices([one for _, one in actions], [weight for weight, _ in actions])[0]
        action()
        time.sleep(self.rng.choice((0.0, 0.02, 0.2)))

    # ------------------------------------------------------------ topics

    def make(self, name: str) -> None:
        self.lives[name] += 1
        self.queues[name] = self.rng.randint(1, QUEUES)
        self.admin.topic_create(name, self.queues[name])

    def prefix(self, name: str) -> bytes:
        return f"{name}/{self.lives[name]}/".encode()

    def send(self) -> None:
        for name in self.names:
            count, queue = self.rng.randint(1, 40), self.rng.randrange(self.queues[name])
            bodies = [self.prefix(name) + b"%d/%d" % (queue, self.number + one) for one in range(count)]
            self.number += len(bodies)
            self.producer.send_batch(name, bodies, queue=queue)
            with self.book.lock:
                self.book.wanted.update(bodies)

    def delete(self) -> None:
        name = self.rng.choice(self.names)
        if self.rng.random() < 0.5:
            self.settle()
        self.book.forget(self.prefix(name))
        self.admin.topic_delete(name)
        if self.rng.random() < 0.3:
            time.sleep(0.5)
        self.make(name)

    def resize(self, name: str = "", queues: int = 0) -> None:
        name = name or self.rng.choice(self.names)
        queues = queues or self.rng.randint(1, QUEUES)
        self.admin.topic_update(name, queues, force=True)
        self.queues[name] = queues

    # ------------------------------------------------------------ members

    def join(self) -> None:
        if len(self.members) < 4:
            self.members.append(Member(self.node, self.group, self.names, self.book, random.Random(self.rng.random())))

    def part(self) -> None:
        if len(self.members) > 1:
            member = self.members.pop(self.rng.randrange(len(self.members)))
            member.end(self.rng.choice(("leave", "die")))
            assert not member.errors, member.errors

    def interrupt(self) -> None:
        for _ in range(self.rng.randint(1, 10)):
            self.rng.choice(self.members).interrupt()
            time.sleep(self.rng.uniform(0, 0.02))

    def nap(self) -> None:
        self.rng.choice(self.members).sleep(SESSION_S * self.rng.uniform(0.5, 1.7))

    def reset(self) -> None:
        """By hand, while everybody is away; those who wake up must not go on where they were."""
        for member in self.members:
            member.sleep(3 * SESSION_S)
        for member in self.members:
            member.asleep.wait(20)
        deadline = time.monotonic() + 2 * SESSION_S
        name = self.rng.choice(self.names)
        while time.monotonic() < deadline:
            with self.book.lock:
                before = set(self.book.handled)
            try:
                reset = self.admin.reset_offsets(self.group, name, "earliest")
            except RequestError:
                time.sleep(0.05)
                continue
            # A queue that the topic has lost for now is not reset: it goes on where it was when it comes again.
            for _, queue, _ in reset:
                self.book.again(self.prefix(name) + b"%d/" % queue, before)
            return

    # ------------------------------------------------------------ the node

    def kill(self) -> None:
        role = self.rng.choice(("coordinator", "reader-0", "reader-1"))
        pid = self.node.pids().get(role)
        if pid is None:
            return  # it has been killed a moment ago
        os.kill(pid, signal.SIGKILL)
        if self.rng.random() < 0.7:
            eventually(lambda: self.node.healed(role, pid), f"{role} is back", 60)

    # ------------------------------------------------------------ what must hold

    def story(self) -> str:
        """What the group and its members know."""
        found = [f"{self.group}: {self.admin.group(self.group)}"]
        for member in self.members:
            consumer = member._consumer
            if consumer is not None and consumer._member is not None:
                owned = [str(state) for state in consumer._assignment.owned.values()]
                found.append(
                    f"{consumer._member.member} alive={member._thread.is_alive()} {owned} {consumer._member.error}"
                )
        return "\n".join(found)

    def settle(self) -> None:
        """All that was acknowledged is handled, once every queue can be read."""
        for name in self.names:
            self.resize(name, QUEUES)
        deadline = time.monotonic() + SETTLED_S
        while missing := self.book.missing():
            assert time.monotonic() < deadline, (
                f"{len(missing)} messages were skipped: {sorted(missing)[:5]}; {self.story()}"
            )
            time.sleep(0.05)

    def check_offsets(self) -> None:
        """No commit lies behind its queue's end. (A reader may hear a little late of a topic that was made anew.)"""

        def is_sound() -> bool:
            try:
                return not [row for row in self.admin.group_lag(self.group) if row.problem]
            except RequestError as error:
                return error.code == "GROUP_NOT_EXIST"

        eventually(is_sound, "no commit lies behind an end", 20)


def run(node: Node, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.stdout.write(f"seed {seed}, {steps} steps\n")
    world = World(node, seed, steps)
    original = Committer._commit

    def commit(one: Committer, progress: CommitProgress, deadline: float, *, partial: bool) -> dict[Queue, int]:
        began = time.monotonic()
        with one._assignment.lock:
            states = dict(one._assignment.owned)
        stored = original(one, progress, deadline, partial=partial)
        world.book.committed(began, progress, states, set(stored))
        return stored

    start = threading.Thread.start

    def start_alone(thread: threading.Thread) -> None:
        with STARTING:
            start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_alone)
    monkeypatch.setattr(Committer, "_commit", commit)
    with logging_survives():
        world.run()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_few_steps(node: Node, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(node, seed, 15, monkeypatch)


@pytest.mark.parametrize("seed", shared(range(10, 14), 1))
def test_more_steps(node: Node, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(node, seed, 40, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_steps(node: Node, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(node, seed, 80, monkeypatch)
