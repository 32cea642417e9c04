"""A life of producers, consumers and a node whose processes die, with a ledger of what must become of each message.

Every message is one line of the ledger: its kind, what its sender was told, and when it is due. Consumers are programs of
their own. Each writes a line for every try of a message, so a program that is killed leaves what it did.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commitmq import Admin, HalfMessage, Producer, SendError, TransactionState
from commitmq.errors import CommitMQError
from delays import everything
from nodes import Node

WORK, ORDERED, SHARED, IN_LINE = "work", "ordered", "shared", "inline"
GROUPS = {WORK: "workers", ORDERED: "readers", SHARED: "sharers", IN_LINE: "liners"}
QUEUES = 4
MAX_RETRIES = 2
PRODUCERS = 5
# Programs by topic: eight in all. Those of IN_LINE share queues in order.
MEMBERS = {WORK: 2, ORDERED: 2, SHARED: 2, IN_LINE: 2}
MOST_PROPERTIES = 32_767
"""Bytes of a record's properties (RocketMQ's int16 length)."""
PAUSE_S = 0.3
"""A sender's longest pause between two steps: a life must be longer than what befalls the node."""
REFUSED_S = 0.4
"""A sender's pause after a refused send."""

PROGRAM = """
import json, os, sys, threading, time
import signal

import commitmq

node, topic, group, retries = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
seen = set()
lock = threading.Lock()


def tell(word, told, message):
    line = [word, told["id"], message.reconsume_times, time.time(), told.get("key"), told.get("number")]
    with lock:
        os.write(1, json.dumps(line).encode() + b"\\n")


def handle(message):
    told = json.loads(message.body)
    first = told["id"] not in seen
    seen.add(told["id"])
    fails = told["fails"]
    # An ordered or shared consumer counts tries itself; a message that comes from the retry topic brings the number, and so
    # does one of a queue that is shared in order.
    if fails < 0 or (fails and (message.reconsume_times < fails if topic in ("work", "inline") else first)):
        tell("fail", told, message)
        raise ValueError("as the message wants it")
    tell("ok", told, message)


if topic in ("shared", "inline"):
    ordered = topic == "inline"
    consumer = commitmq.ShareConsumer(topic, group=group, node=node, invisible_s=3, ordered=ordered, timeout_s=60)
    options = {"backoff": 1}
else:
    consumer = commitmq.Consumer(topic, group=group, node=node, timeout_s=60)
    options = {"ordered": topic == "ordered", "max_retries": retries, "backoff": 1}
signal.signal(signal.SIGTERM, lambda *_: consumer.close())
consumer.run(handle, workers=3, on_error=lambda message, error: None, **options)
"""


@dataclass
class Entry:
    """One message. ``outcome``: stored, maybe (its sender does not know), or never."""

    id: int
    topic: str
    kind: str
    fails: int = 0
    outcome: str = "maybe"
    due_s: float = 0.0
    sent_s: float = field(default_factory=time.time)
    key: str | None = None
    number: int | None = None

    def body(self) -> bytes:
        told = {"id": self.id, "fails": self.fails, "key": self.key, "number": self.number}
        return json.dumps(told).encode()


@dataclass
class Ledger:
    """Entries by id."""

    entries: dict[int, Entry] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def new(self, topic: str, kind: str, **fields: Any) -> Entry:
        with self.lock:
            entry = Entry(len(self.entries), topic, kind, **fields)
            self.entries[entry.id] = entry
            return entry

    def of(self, *outcomes: str) -> list[Entry]:
        return [one for one in self.entries.values() if one.outcome in outcomes]


class Sender(threading.Thread):
    """One producer. It sends until ``steps`` are done; its transactions may end in the hands of another producer."""

    def __init__(self, node: Node, ledger: Ledger, kinds: Iterable[str], number: int, seed: int, steps: int) -> None:
        super().__init__(daemon=True)  # a failed test must not wait for it
        self._address, self._ledger, self._kinds, self._steps = node.address, ledger, list(kinds), steps
        self._chance = random.Random(f"{seed}-{number}")
        self._name = f"p{number}"
        self._numbers: Counter[str] = Counter()
        self.trouble: list[BaseException] = []

    def run(self) -> None:
        try:
            with Producer(self._address, timeout_s=30, **self._options()) as producer:
                for _ in range(self._steps):
                    getattr(self, f"_{self._chance.choice(self._kinds)}")(producer)
                    time.sleep(self._chance.random() * PAUSE_S)
        except BaseException as error:  # shown by the test
            self.trouble.append(error)

    def _options(self) -> dict[str, Any]:
        return {"group": "senders", "transaction_listener": self._check} if "transaction" in self._kinds else {}

    def _check(self, message: HalfMessage) -> TransactionState:
        """A check: a transaction whose end was lost. The ledger says what its sender wanted."""
        entry = self._ledger.entries[json.loads(message.body)["id"]]
        return TransactionState.COMMIT if entry.kind == "transaction" else TransactionState.ROLLBACK

    def _fails(self) -> int:
        return self._chance.choice([0, 0, 0, 0, 1, 1, -1])

    def _send(self, producer: Producer, entries: list[Entry], **options: Any) -> None:
        try:
            if len(entries) == 1:
                producer.send(entries[0].topic, entries[0].body(), **options)
            else:
                producer.send_batch(entries[0].topic, [one.body() for one in entries], **options)
        except SendError as error:
            known = {"stored": "stored", "not_stored": "never"}.get(str(error.outcome), "maybe")
            for one in entries:
                one.outcome = known if len(entries) == 1 else "maybe"
            time.sleep(REFUSED_S)
            return
        for one in entries:
            one.outcome = "stored"

    def _plain(self, producer: Producer) -> None:
        self._send(producer, [self._ledger.new(WORK, "plain", fails=self._fails())])

    def _full(self, producer: Producer) -> None:
        """Properties that leave its movers between nothing and 2,000 bytes for theirs."""
        topic = self._chance.choice([WORK, SHARED, IN_LINE])
        key = f"{topic}-{self._name}-full" if topic == IN_LINE else None
        entry = self._ledger.new(topic, "full", fails=self._chance.choice([0, 1, -1]) if key is None else 0, key=key)
        if key is not None:
            entry.number = self._numbers[key]
            self._numbers[key] += 1
        padding = MOST_PROPERTIES - self._chance.randrange(200, 2_000)
        options = {} if key is None else {"sharding_key": key}
        self._send(producer, [entry], properties={"padding": "p" * padding}, **options)

    def _batch(self, producer: Producer) -> None:
        self._send(producer, [self._ledger.new(WORK, "batch") for _ in range(6)])

    def _shared(self, producer: Producer) -> None:
        self._send(
            producer, [self._ledger.new(SHARED, "shared", fails=self._chance.choice([0, 0, 1])) for _ in range(3)]
        )

    def _ordered(self, producer: Producer) -> None:
        self._keyed(producer, ORDERED, "ordered")

    def _in_line(self, producer: Producer) -> None:
        self._keyed(producer, IN_LINE, "in_line")

    def _keyed(self, producer: Producer, topic: str, kind: str) -> None:
        key = f"{topic}-{self._name}-{self._chance.randrange(3)}"
        entry = self._ledger.new(topic, kind, fails=self._chance.choice([0, 0, 0, 1]), key=key)
        entry.number = self._numbers[key]
        self._numbers[key] += 1
        self._send(producer, [entry], sharding_key=key)

    def _level(self, producer: Producer) -> None:
        entries = [self._ledger.new(WORK, "level", due_s=time.time() + 1.0) for _ in range(3)]
        self._send(producer, entries, delay_level=1)

    def _timer(self, producer: Producer) -> None:
        due_ms = int(time.time() * 1000) + self._chance.randrange(100, 4_000)
        entry = self._ledger.new(WORK, "timer", due_s=due_ms / 1000, fails=self._fails())
        self._send(producer, [entry], deliver_at=due_ms)

    def _transaction(self, producer: Producer) -> None:
        entry = self._ledger.new(WORK, "transaction")
        try:
            with producer.transaction(WORK, entry.body()):
                pass
        except CommitMQError:
            return  # a lost commit is found by a check-back; a half message that was not stored is none
        entry.outcome = "stored"

    def _rollback(self, producer: Producer) -> None:
        entry = self._ledger.new(WORK, "rollback", outcome="never")
        with contextlib.suppress(CommitMQError, ZeroDivisionError), producer.transaction(WORK, entry.body()):
            raise ZeroDivisionError


class Fleet:
    """The consumers. ``stir`` kills one, ends one, or starts one."""

    def __init__(self, node: Node, folder: Path, topics: Iterable[str], seed: int) -> None:
        # The node keeps its address; while its supervisor is dead nobody says it.
        self._address, self._folder = node.address, folder
        self._chance = random.Random(f"fleet-{seed}")
        self._wanted = [topic for topic in topics for _ in range(MEMBERS[topic])]
        self._living: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._count = 0
        for topic in self._wanted:
            self._start(topic)

    def _start(self, topic: str) -> None:
        self._count += 1
        with (
            (self._folder / f"{topic}-{self._count}.out").open("wb") as out,
            (self._folder / f"{topic}-{self._count}.err").open("wb") as errors,
        ):
            command = [sys.executable, "-c", PROGRAM, self._address, topic, GROUPS[topic], str(MAX_RETRIES)]
            self._living.append((topic, subprocess.Popen(command, stdout=out, stderr=errors)))

    def stir(self) -> None:
        """One event."""
        missing = Counter(self._wanted) - Counter(topic for topic, _ in self._living)
        if missing and (self._chance.random() < 0.7 or not self._living):
            self._start(self._chance.choice(sorted(missing.elements())))
            return
        _, program = self._living.pop(self._chance.randrange(len(self._living)))
        program.send_signal(self._chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        program.wait(60)

    def whole(self) -> None:
        """Start what is missing, or ended because the node was away for too long."""
        self._living = [(topic, program) for topic, program in self._living if program.poll() is None]
        for topic in (Counter(self._wanted) - Counter(topic for topic, _ in self._living)).elements():
            self._start(topic)

    def end(self) -> None:
        for _, program in self._living:
            program.send_signal(signal.SIGTERM)
        for _, program in self._living:
            try:
                program.wait(60)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

    def tries(self, topic: str) -> list[list[Any]]:
        """What consumers of ``topic`` wrote, in the order of time: word, id, number of tries, time, key, number."""
        lines = [
            json.loads(line)
            for path in self._folder.glob(f"{topic}-*.out")
            for line in path.read_bytes().split(b"\n")
            if line.endswith(b"]")
        ]
        return sorted(lines, key=lambda line: line[3])


def unfinished(node: Node, ledger: Ledger, fleet: Fleet, topics: Iterable[str]) -> set[int]:
    """Ids of stored messages that were neither handled nor became dead letters."""
    done = {line[1] for topic in topics for line in fleet.tries(topic) if line[0] == "ok"}
    for topic in topics:
        done |= dead_letters(node, topic)
    return {one.id for one in ledger.of("stored") if one.topic in topics} - done


def dead_letters(node: Node, topic: str) -> set[int]:
    name = f"%DLQ%{GROUPS[topic]}"
    with Admin(node.address, timeout_s=60) as admin:  # processes may die still
        if name not in {one.name for one in admin.topics()}:
            return set()
    return {json.loads(one.body)["id"] for one in everything(node, name)}


def check(
    node: Node,
    ledger: Ledger,
    fleet: Fleet,
    topics: Iterable[str],
    may_be_early: Callable[[float, float], bool] = lambda sent_s, came_s: False,
) -> None:
    """What must hold in the end; see the test's text. ``may_be_early``: whether the clock was wrong between two times."""
    never = {one.id for one in ledger.of("never")}
    for topic in topics:
        tries = fleet.tries(topic)
        dead = dead_letters(node, topic)
        told = {line[1] for line in tries}
        assert not told & never, f"{topic}: a message that must not exist was handled"
        assert not dead & never
        for line in tries:
            entry = ledger.entries[line[1]]
            assert line[3] >= entry.due_s or may_be_early(entry.sent_s, line[3]), f"early: {entry}, {line}"
        handled = {line[1] for line in tries if line[0] == "ok"}
        always = {one.id for one in ledger.entries.values() if one.fails < 0}
        assert not handled & always
        assert dead <= always, f"{topic}: {dead - always} became dead letters"
        assert {one.id for one in ledger.of("stored") if one.topic == topic} <= handled | dead
        copies = Counter(json.loads(one.body)["id"] for one in everything(node, topic))
        expected = {one.id: 1 for one in ledger.of("stored") if one.topic == topic}
        assert {number: copies[number] for number in expected} == expected, f"{topic}: appended not once"
        assert not set(copies) & never
        assert max(copies.values(), default=1) == 1
    for topic in {ORDERED, IN_LINE}.intersection(topics):
        assert_order(fleet.tries(topic))


def assert_order(tries: list[list[Any]]) -> None:
    """Of each key: a number is handled for the first time only after all smaller ones that were handled."""
    first: dict[str, list[int]] = defaultdict(list)
    for word, _, _, _, key, number in tries:
        if word == "ok" and number not in first[key]:
            first[key].append(number)
    for key, numbers in first.items():
        assert numbers == sorted(numbers), f"{key}: {numbers}"
