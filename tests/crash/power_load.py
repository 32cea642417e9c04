"""A short, seeded life of a real node whose disk is recorded, and what the node said meanwhile, with the time of each word.

The times are CLOCK_MONOTONIC as the recorder's are: what was acknowledged before an event happened before it. Bodies are
kept as hashes; each is sent once, so it names its message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from power_recorder import Recorder

from commitmq import Admin, Consumer, ExactlyOnce, Producer, SendResult, Sql
from commitmq.client.results import BatchSendError
from commitmq.errors import CommitMQError, SendError
from nodes import Node, environment

SEGMENT_BYTES = 1 << 17
QUEUE_FILE_BYTES = 1_600  # 80 units
SETTINGS = {
    "commit_log.segment_bytes": SEGMENT_BYTES,
    "consume_queue.file_bytes": QUEUE_FILE_BYTES,
    "commit_log.max_message_bytes": 16_384,
    "commit_log.writer_sync_slow_ms": 60_000,  # recording makes each sync slow
    "supervisor.restart_backoff_max_ms": 300,
    "consume_queue.flush_interval_ms": 200,
    "groups.offsets_interval_ms": 700,
    "producers.snapshot_interval_ms": 150,
    "producers.snapshot_bytes": 65_536,
    "index.hash_slots": 97,
    "index.max_items": 600,
    "timer.log_file_bytes": 4_096,
    "timer.persist_interval_ms": 100,
    "consume_queue.enable_ext": True,
    "consume_queue.enable_filter_bit_map": True,
    "consume_queue.ext_file_bytes": 4_096,
    "consume_queue.batch_file_bytes": 46 * 40,
    "consume_queue.enable_lmq": True,
    "consume_queue.enable_multi_dispatch": True,
}
TOPICS = ("orders", "audit")
BATCHES = "batches"  # of inner batches
LIGHT = ("%LMQ%a", "%LMQ%b", "%LMQ%c")
PASSING = "passing"
LATER = "later"  # due when the life is long over
GROUP = "watchers"
PASSERS = "passers-by"
RED = "red-ones"  # by an SQL filter: its bits are in the extensions
PATIENCE_S = 80.0  # a node that dies at one place of a start after the other is away for long
SHIM = Path(__file__).parent / "power_shim"


def digest(body: bytes) -> str:
    """What names a body."""
    return hashlib.blake2b(body, digest_size=12).hexdigest()


@dataclass
class Said:
    """What the node said, each with its time in ns. Lists are appended to by threads of their own each."""

    sent: dict[str, int] = field(default_factory=dict)  # digest -> when the send began
    acked: list[tuple[int, str, str, str, int, int, int]] = field(default_factory=list)
    # (time, ack, digest, topic, queue, queue offset, physical offset)
    seen: list[tuple[int, str, int, int, str]] = field(default_factory=list)  # (time, topic, queue, offset, digest)
    topics: list[tuple[int, str]] = field(default_factory=list)  # created and acknowledged
    deleting: list[tuple[int, str]] = field(default_factory=list)  # a deletion was asked for
    deleted: list[tuple[int, str]] = field(default_factory=list)  # … and acknowledged
    committing: list[tuple[int, str, int, int]] = field(default_factory=list)  # (time, topic, queue, offset) asked for
    committed: list[tuple[int, str, int, int]] = field(default_factory=list)  # … and acknowledged

    def new_body(self, chance: random.Random) -> tuple[bytes, str]:
        """A body that is sent now, and its digest."""
        size = chance.choice((0, 10, 100, 400, 1_000, 3_000, 7_000)) + chance.randrange(300)
        body = chance.randbytes(8) + chance.choice((b"\0" * size, b"x" * size, chance.randbytes(size)))
        name = digest(body)
        self.sent[name] = time.monotonic_ns()
        return body, name

    def acknowledge(self, name: str, result: SendResult) -> None:
        place = (result.topic, result.queue, result.queue_offset, result.physical_offset)
        self.acked.append((time.monotonic_ns(), result.ack, name, *place))


class Load:
    """Senders, a consumer and a maker of topics against the node at ``address``, until :meth:`end`."""

    def __init__(self, address: str, said: Said, seed: str, *, sees_unflushed: bool, deletes: bool = True) -> None:
        self._address = address
        self._said = said
        self._seed = seed
        self._sees_unflushed = sees_unflushed
        self._over = threading.Event()
        self.trouble: list[str] = []
        works: dict[str, Callable[[random.Random], None]] = {
            "flushed": lambda chance: self._send_singles(chance, "flushed", 0.012),
            "memory": lambda chance: self._send_singles(chance, "memory", 0.02),
            "batch": self._send_batches,
            "async": self._send_async,
            "consumer": self._consume,
            "passer-by": self._look_in,
            "topics": self._make_topics,
            "kinds": self._send_kinds,
            "later": self._send_later,
        }
        if not deletes:
            del works["topics"]
        self._threads = [threading.Thread(target=self._guarded, args=(name, work)) for name, work in works.items()]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
        assert not self.trouble, "\n".join(self.trouble)

    def _guarded(self, name: str, work: Callable[[random.Random], None]) -> None:
        try:
            work(random.Random(f"{self._seed}/{name}"))
        except BaseException as error:
            self.trouble.append(f"{name}: {error!r}")

    def _body(self, chance: random.Random) -> tuple[bytes, str]:
        return self._said.new_body(chance)

    def _producer(self, *, idempotent: bool = False) -> Producer:
        return Producer(self._address, timeout_s=4, delivery=ExactlyOnce() if idempotent else None)

    def _send_singles(self, chance: random.Random, ack: str, pause_s: float) -> None:
        with self._producer() as producer:
            while not self._over.is_set():
                # One right after the other: from the second on the writer may sync by itself.
                for _ in range(chance.choice((1, 1, 2, 4))):
                    body, name = self._body(chance)
                    with contextlib.suppress(SendError):
                        self._said.acknowledge(name, producer.send(chance.choice(TOPICS), body, ack=ack, tags="red"))
                self._over.wait(pause_s * chance.random() * 4)

    def _send_batches(self, chance: random.Random) -> None:
        with self._producer(idempotent=True) as producer:
            while not self._over.is_set():
                bodies = [self._body(chance) for _ in range(chance.randrange(1, 24))]
                topic, ack = chance.choice(TOPICS), chance.choice(("flushed", "memory"))
                results: Sequence[SendResult]
                try:
                    results = producer.send_batch(topic, [body for body, _ in bodies], ack=ack)
                except BatchSendError as error:
                    every = [one.result(at) for one in error.acks for at in range(one.count)]
                    results = every[: error.stored_prefix]
                    # Which promise a run of a failed batch got is not known here: take the weaker one.
                    results = [result._replace(ack="memory") for result in results]
                except SendError:
                    continue
                for (_, name), result in zip(bodies, results, strict=False):
                    self._said.acknowledge(name, result)
                self._over.wait(0.12 * chance.random())

    def _send_async(self, chance: random.Random) -> None:
        with self._producer(idempotent=True) as producer:
            while not self._over.is_set():
                futures = []
                for _ in range(chance.randrange(1, 8)):
                    body, name = self._body(chance)
                    ack = chance.choice(("flushed", "memory"))
                    futures.append((name, producer.send_async(chance.choice(TOPICS), body, ack=ack)))
                for name, future in futures:
                    with contextlib.suppress(SendError):
                        self._said.acknowledge(name, future.result(9))
                self._over.wait(0.15 * chance.random())

    def _send_kinds(self, chance: random.Random) -> None:
        """Inner batches, and messages for several light message queues; with keys."""
        with self._producer() as producer:
            while not self._over.is_set():
                bodies = [self._body(chance) for _ in range(chance.randrange(1, 9))]
                ack = chance.choice(("flushed", "memory"))
                with contextlib.suppress(SendError):
                    results = producer.send_batch(BATCHES, [body for body, _ in bodies], ack=ack, queue=0)
                    for (_, name), result in zip(bodies, results, strict=True):
                        self._said.acknowledge(name, result)
                body, name = self._body(chance)
                with contextlib.suppress(SendError):
                    queues = chance.sample(LIGHT, chance.randrange(1, 4))
                    keys = f"k{chance.randrange(20)}"
                    result = producer.send(TOPICS[0], body, ack=ack, tags="blue", keys=keys, multi_dispatch=queues)
                    self._said.acknowledge(name, result)
                self._over.wait(0.12 * chance.random())

    def _send_later(self, chance: random.Random) -> None:
        """Messages that wait in the timer wheel, some of them in one slot, and some that roll."""
        with self._producer() as producer:
            while not self._over.wait(0.2 * chance.random()):
                body, _ = self._body(chance)
                with contextlib.suppress(SendError):
                    producer.send(
                        LATER, body, delay=chance.choice((3_600, 7_200, 3_600 + chance.randrange(90), 200_000))
                    )

    def _consume(self, chance: random.Random) -> None:
        with (
            Consumer([TOPICS[0]], group=RED, node=self._address, filter=Sql("TAGS = 'red'"), timeout_s=PATIENCE_S),
            Consumer(
                [*TOPICS, BATCHES], group=GROUP, node=self._address, auto_commit=False, timeout_s=PATIENCE_S
            ) as consumer,
        ):
            while not self._over.is_set():
                for message in consumer.poll(0.1, max_messages=40):
                    place = (message.topic, message.queue_id, message.queue_offset)
                    if not self._sees_unflushed:
                        self._said.seen.append((time.monotonic_ns(), *place, digest(message.body)))
                now = time.monotonic_ns()
                self._said.committing += [(now, *queue, offset) for queue, offset in consumer.positions.items()]
                try:
                    held = consumer.commit()
                except CommitMQError:
                    if self._over.is_set():
                        return
                    raise
                now = time.monotonic_ns()
                self._said.committed += [(now, *queue, offset) for queue, offset in held.items()]

    def _look_in(self, chance: random.Random) -> None:
        """A member of another group comes and goes."""
        while not self._over.wait(0.5 + chance.random()):
            with (
                contextlib.suppress(CommitMQError),
                Consumer([PASSING], group=PASSERS, node=self._address, auto_commit=False, timeout_s=4) as consumer,
            ):
                consumer.poll(0.1)

    def _make_topics(self, chance: random.Random) -> None:
        """New topics, and one that is deleted and made again while it is sent to."""
        number = 0
        with Admin(self._address, timeout_s=4) as admin, self._producer() as producer:
            while not self._over.wait(0.2):
                with contextlib.suppress(CommitMQError):
                    number += 1
                    name = f"t-{self._seed.replace('/', '-')}-{number}"
                    admin.topic_create(name, 1)
                    self._said.topics.append((time.monotonic_ns(), name))
                    for _ in range(chance.randrange(1, 5)):
                        body, key = self._body(chance)
                        self._said.acknowledge(key, producer.send(PASSING, body, queue=0))
                    if chance.random() < 0.4:
                        self._said.deleting.append((time.monotonic_ns(), PASSING))
                        admin.topic_delete(PASSING)
                        self._said.deleted.append((time.monotonic_ns(), PASSING))


@dataclass
class Run:
    """A recorded life: the folder has ``record/`` and ``said.json``."""

    folder: Path
    said: Said
    settings: dict[str, Any]

    def save(self) -> None:
        data = {"said": asdict(self.said), "settings": self.settings}
        (self.folder / "said.json").write_text(json.dumps(data), encoding="ascii")

    @classmethod
    def load(cls, folder: Path) -> Run:
        data = json.loads((folder / "said.json").read_text(encoding="ascii"))
        return cls(folder, Said(**data["said"]), data["settings"])


def record_run(
    folder: Path, seed: int, *, scale: float = 1.0, deletes: bool = True, short: bool = False, **settings: Any
) -> Run:
    """One life of a node in ``folder``: load, processes killed, a clean stop, everything killed, twice recovered.

    ``scale`` stretches the parts; ``settings`` go over :data:`SETTINGS`. Without ``deletes`` no topic is deleted, which
    RocketMQ knows nothing of. A ``short`` life ends with the first death of everything. About 15 s at scale 1.
    """
    chance = random.Random(seed)
    store, record = folder / "store", folder / "record"
    folder.mkdir(parents=True, exist_ok=True)
    store.mkdir()
    recorder = Recorder(store, record)
    recorder.prepare()
    every = {**SETTINGS, **settings}
    run = Run(folder, Said(), every)
    node = Node(store, *(f"{name}={str(value).lower()}" for name, value in every.items()))
    paths = environment()["PYTHONPATH"]
    extra = {
        "PYTHONPATH": f"{SHIM}:{paths}",
        "COMMITMQ_POWER_STORE": str(store),
        "COMMITMQ_POWER_RECORD": str(record),
    }
    victims = ["dispatcher-consume_queue", "writer", "flush", "coordinator", "allocate"]
    chance.shuffle(victims)

    def kill_one() -> None:
        time.sleep(scale * (0.5 + chance.random()))
        pid = node.pids().get(victims[-1])
        victims.insert(0, victims.pop())
        with recorder.alone(), contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)

    def start() -> None:
        ended = node.start(**extra)
        assert ended.returncode == 0, ended.stderr

    try:
        start()
        with Admin(node.address) as admin:
            admin.topic_create(BATCHES, 1, attributes={"queue.type": "BatchCQ"})
        with loaded(node, run, f"{seed}/1", deletes):
            kill_one()
            if not short:
                kill_one()
            time.sleep(scale * 0.5)
        if not short:
            send_alone(node, run, f"{seed}/1")
            ended = node.stop()
            assert ended.returncode == 0, ended.stderr
            start()
            with loaded(node, run, f"{seed}/2", deletes):
                kill_one()
                time.sleep(scale * chance.random())
                node.pids()
                with recorder.alone():
                    node.kill_all(known=True)
                start()
                kill_one()
                kill_one()
                time.sleep(scale * 0.5)
            send_alone(node, run, f"{seed}/2")
        node.pids()
        with recorder.alone():
            node.kill_all(known=True)
            recorder.look()
    except BaseException as error:
        error.add_note(f"--- the end of node.log ---\n{node.log_tail()}")
        raise
    finally:
        node.end()
    run.save()
    return run


def send_alone(node: Node, run: Run, seed: str) -> None:
    """One sender that waits for the device, beside no other: then the writer syncs by itself, however busy the machine is."""
    chance = random.Random(f"{seed}/alone")
    with Producer(node.address, timeout_s=20) as producer:
        for _ in range(20):
            body, name = run.said.new_body(chance)
            with contextlib.suppress(SendError):
                run.said.acknowledge(name, producer.send(TOPICS[0], body, ack="flushed", tags="red"))


@contextlib.contextmanager
def loaded(node: Node, run: Run, seed: str, deletes: bool) -> Iterator[None]:
    """Load on ``node`` inside."""
    sees_unflushed = run.settings.get("commit_log.flush_mode") == "async"
    load = Load(node.address, run.said, seed, sees_unflushed=sees_unflushed, deletes=deletes)
    try:
        yield
    finally:
        load.end()
