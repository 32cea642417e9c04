"""Senders, a group's consumer and an auditor of its offsets, which go on while a node is killed under them; and the checks
of what the node said against what is in its files afterwards.

Every body is sent once and is unlike every other, so it names its message for good. The journal keeps what the node said
of each: acknowledged with its place, or failed with an outcome. Afterwards

* what was acknowledged is in the log exactly once, at that place; what failed as ``stored`` is there too; what failed as
  ``not_stored`` is not; what is ``unknown`` is there at most once;
* queue offsets are 0, 1, 2 … along the log, and each record has its ConsumeQueue unit, each unit its record;
* whatever a consumer ever saw is in the log at that offset; committed offsets only ever grew.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from commitmq import Admin, Consumer, Producer, Reader, SendResult
from commitmq.client.results import BatchSendError
from commitmq.errors import NodeUnavailableError, Outcome, ProtocolError, SendError
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import list_queues

TOPICS = ("orders", "audit")
GROUP = "watchers"
_TAGS = (None, "red", "green")
_MAX_BODY_BYTES = 2_000
_BATCH = 60
_PATIENCE_S = 8.0


class Place(NamedTuple):
    """Where the node said a message is."""

    topic: str
    queue: int
    queue_offset: int
    physical_offset: int


@dataclass
class Journal:
    """What the node said of each body. Its dicts are only added to, each by the threads that own the bodies."""

    acked: dict[bytes, Place] = field(default_factory=dict)
    failed: dict[bytes, Outcome] = field(default_factory=dict)
    acks_by_sender: Counter[str] = field(default_factory=Counter)

    def acknowledge(self, sender: str, body: bytes, result: SendResult) -> None:
        self.acked[body] = Place(result.topic, result.queue, result.queue_offset, result.physical_offset)
        self.acks_by_sender[sender] += 1


def seed() -> int:
    """COMMITMQ_SEED if it is set, else a new one; printed, so that a failure shows how to repeat it."""
    value = int(os.environ.get("COMMITMQ_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"COMMITMQ_SEED={value}")  # noqa: T201 - pytest shows it with a failure
    return value


class Traffic:
    """The threads. ``trouble`` collects what none of them may meet."""

    def __init__(self, address: str, number: int) -> None:
        """``number`` seeds sizes, tags and bodies."""
        self.address = address
        self.journal = Journal()
        self.seen: dict[tuple[str, int, int], bytes] = {}
        self.committed: dict[tuple[str, int], int] = {}
        self.trouble: list[str] = []
        self._seed = number
        self._stop_sending = threading.Event()
        self._stop_reading = threading.Event()
        self.senders: dict[str, Callable[[str], None]] = {
            "flushed": lambda name: self._send_singles(name, "flushed"),
            "memory": lambda name: self._send_singles(name, "memory"),
            "batch": self._send_batches,
            "async": self._send_async,
        }
        self._sending = [
            threading.Thread(target=self._guarded, args=(name, work)) for name, work in self.senders.items()
        ]
        self._reading = [
            threading.Thread(target=self._guarded, args=("consumer", lambda _: self._consume())),
            threading.Thread(target=self._guarded, args=("auditor", lambda _: self._audit())),
        ]

    @contextmanager
    def running(self) -> Iterator[Traffic]:
        """Senders and readers run inside; the senders first end when it is left."""
        for thread in (*self._sending, *self._reading):
            thread.start()
        try:
            yield self
            self.stop_sending()
            self.wait_until_read()
        finally:
            self._stop_sending.set()
            self._stop_reading.set()
            for thread in (*self._sending, *self._reading):
                thread.join(60)
        self.check()

    def check(self) -> None:
        assert not self.trouble, "\n".join(self.trouble)

    def stop_sending(self) -> None:
        self._stop_sending.set()
        for thread in self._sending:
            thread.join(60)
            assert not thread.is_alive(), f"a sender hangs: {thread.name}"

    def wait_for_sends(self, count: int = 5, timeout_s: float = 30.0) -> None:
        """Until every sender got ``count`` more acknowledgements, or meets trouble."""
        before = Counter(self.journal.acks_by_sender)
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            late = [name for name in self.senders if self.journal.acks_by_sender[name] - before[name] < count]
            if not late:
                return
            assert time.monotonic() < deadline, f"senders {late} are not acknowledged any more"
            time.sleep(0.02)

    def wait_until_read(self, timeout_s: float = 30.0) -> None:
        """Until the group has seen every acknowledged message."""
        deadline = time.monotonic() + timeout_s
        wanted = {(place.topic, place.queue, place.queue_offset) for place in self.journal.acked.values()}
        while not wanted <= self.seen.keys():
            self.check()
            missing = sorted(wanted - self.seen.keys())
            assert time.monotonic() < deadline, f"{len(missing)} messages were not delivered, first {missing[:5]}"
            time.sleep(0.05)

    # ------------------------------------------------------------ threads

    def _guarded(self, name: str, work: Callable[[str], None]) -> None:
        try:
            work(name)
        except BaseException as error:
            self.trouble.append(f"{name}: {error!r}")

    def _bodies(self, sender: str) -> Iterator[tuple[random.Random, bytes]]:
        chance = random.Random(f"{self._seed}/{sender}")
        for number in range(1 << 30):
            yield chance, f"{sender} {number} ".encode() + chance.randbytes(chance.randrange(_MAX_BODY_BYTES))

    def _send_singles(self, name: str, ack: str) -> None:
        with Producer(self.address, ack=ack, timeout_s=_PATIENCE_S) as producer:
            for chance, body in self._bodies(name):
                if self._stop_sending.is_set():
                    return
                try:
                    result = producer.send(chance.choice(TOPICS), body, tags=chance.choice(_TAGS))
                    self.journal.acknowledge(name, body, result)
                except SendError as error:
                    self.journal.failed[body] = error.outcome
                time.sleep(0.002)

    def _send_batches(self, name: str) -> None:
        bodies = self._bodies(name)
        with Producer(self.address, timeout_s=_PATIENCE_S) as producer:
            while not self._stop_sending.is_set():
                chance, first = next(bodies)
                batch = [first, *(next(bodies)[1] for _ in range(chance.randrange(_BATCH)))]
                ack = chance.choice(("flushed", "memory"))
                try:
                    results = producer.send_batch(chance.choice(TOPICS), batch, ack=ack, tags=chance.choice(_TAGS))
                    for body, result in zip(batch, results, strict=True):
                        self.journal.acknowledge(name, body, result)
                except BatchSendError as error:
                    # Which of them are stored is known by number only, but for the whole.
                    for body in batch:
                        known = error.outcome if error.outcome is not Outcome.STORED else Outcome.UNKNOWN
                        self.journal.failed[body] = known
                    stored = error.stored_prefix
                    results_of = [ack.result(at) for ack in error.acks for at in range(ack.count)][:stored]
                    for body, result in zip(batch[:stored], results_of, strict=True):
                        del self.journal.failed[body]
                        self.journal.acknowledge(name, body, result)
                except SendError as error:
                    self.journal.failed.update(dict.fromkeys(batch, error.outcome))
                time.sleep(0.02)

    def _send_async(self, name: str) -> None:
        bodies = self._bodies(name)
        with Producer(self.address, timeout_s=_PATIENCE_S) as producer:
            while not self._stop_sending.is_set():
                futures = []
                for _ in range(20):
                    chance, body = next(bodies)
                    futures.append((body, producer.send_async(chance.choice(TOPICS), body, ack="memory")))
                for body, future in futures:
                    try:
                        self.journal.acknowledge(name, body, future.result(_PATIENCE_S + 5))
                    except SendError as error:
                        self.journal.failed[body] = error.outcome
                time.sleep(0.01)

    def _consume(self) -> None:
        with Consumer(TOPICS, group=GROUP, node=self.address, auto_commit=False, timeout_s=30) as consumer:
            while not self._stop_reading.is_set():
                batch = consumer.poll(0.2)
                for message in batch:
                    key = (message.topic, message.queue_id, message.queue_offset)
                    if self.seen.setdefault(key, message.body) != message.body:
                        self.trouble.append(f"{key} was read twice, with different bodies")
                for queue, offset in consumer.commit().items():
                    if offset < self.committed.get(queue, 0):
                        self.trouble.append(f"{queue} is committed at {offset} after {self.committed[queue]}")
                    self.committed[queue] = offset

    def _audit(self) -> None:
        """Committed offsets as the node tells them: never below what it told before, or had acknowledged before."""
        told: dict[tuple[str, int], int] = {}
        with Admin(self.address, timeout_s=1) as admin:
            while not self._stop_reading.is_set():
                acknowledged = dict(self.committed)
                try:
                    now = {(topic, queue): offset for topic, queue, offset in admin.group(GROUP)["offsets"]}
                except NodeUnavailableError:
                    continue
                except ProtocolError as error:
                    if error.code not in ("GROUP_NOT_EXIST", "SERVICE_NOT_AVAILABLE"):
                        raise
                    now = {}
                    if error.code == "SERVICE_NOT_AVAILABLE":
                        continue
                for queue in {*told, *acknowledged}:
                    least = max(told.get(queue, 0), acknowledged.get(queue, 0))
                    if now.get(queue, -1) < least:
                        self.trouble.append(f"the group's offset in {queue} went from {least} to {now.get(queue)}")
                told = now
                time.sleep(0.1)


# ---------------------------------------------------------------- what is in the files


def check_store(store: Path, traffic: Traffic, *, segment_bytes: int, file_bytes: int) -> list[Record]:
    """Hold the journal and what consumers saw against the files of a node that does not run; returns the records."""
    layout = StoreLayout(store)
    log = CommitLog(layout.commit_log, segment_bytes)
    records = list(log.iter_records())
    log.close()
    by_queue: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        queue = by_queue.setdefault((record.topic, record.queue_id), [])
        assert record.queue_offset == len(queue), f"{record.topic}/{record.queue_id}: a gap or a double in the log"
        queue.append(record)
    check_queues(layout, by_queue, file_bytes)

    places: dict[bytes, Place] = {}
    for one in records:
        assert one.body not in places, (
            f"stored twice: {one.body[:20]!r} at {one.physical_offset} and {places[one.body]}"
        )
        places[one.body] = Place(one.topic, one.queue_id, one.queue_offset, one.physical_offset)
    journal = traffic.journal
    wrong = {body[:20]: (said, places.get(body)) for body, said in journal.acked.items() if places.get(body) != said}
    assert not wrong, (
        f"{len(wrong)} acknowledged messages are not where they were said to be: {list(wrong.items())[:5]}"
    )
    lost = [body[:20] for body, said in journal.failed.items() if said is Outcome.STORED and body not in places]
    assert not lost, f"said to be stored, but are not: {lost[:5]}"
    ghosts = [body[:20] for body, said in journal.failed.items() if said is Outcome.NOT_STORED and body in places]
    assert not ghosts, f"said not to be stored, but are: {ghosts[:5]}"
    for (topic, queue_id, offset), body in traffic.seen.items():
        stored = by_queue[topic, queue_id]
        assert offset < len(stored), f"a consumer saw {topic}/{queue_id}@{offset}, which is gone"
        assert stored[offset].body == body, f"a consumer saw another body at {topic}/{queue_id}@{offset}"
    return records


def check_queues(layout: StoreLayout, by_queue: dict[tuple[str, int], list[Record]], file_bytes: int) -> None:
    """Every record has exactly one unit, in the order of the log from offset 0 on, and there are no others."""
    found = {(topic, queue_id): folder for topic, queue_id, folder in list_queues(layout.consume_queue)}
    assert {key for key, records in by_queue.items() if records} == set(found)
    for key, records in by_queue.items():
        queue = ConsumeQueue(found[key], file_bytes)
        queue.refresh()
        assert (queue.min_offset, queue.max_offset) == (0, len(records)), key
        units = b""
        while len(units) < 20 * len(records):
            units += queue.read_units(len(units) // 20, len(records))
        expected = b"".join(
            one.physical_offset.to_bytes(8, "big")
            + one.total_size.to_bytes(4, "big")
            + tags_code(one).to_bytes(8, "big", signed=True)
            for one in records
        )
        assert units == expected, f"{key}: units and records differ"


def tags_code(record: Record) -> int:
    """The third field of a unit: Java's hash of the tag, 0 without one."""
    tag = record.properties.get("TAGS")
    return java_string_hash(tag) if tag else 0


def check_reads(address: str, traffic: Traffic) -> None:
    """Read everything back through a running node: every acknowledged message once, at its offset, with its bytes."""
    journal = traffic.journal
    wanted = {place[:3]: (body, place) for body, place in journal.acked.items()}
    found: dict[tuple[str, int, int], bytes] = {}
    with Admin(address) as admin:
        ends = {(topic, queue): high for topic in TOPICS for queue, _, high, _ in admin.offsets(topic)}
    with Reader(TOPICS, node=address) as consumer:
        deadline = time.monotonic() + 30
        while any(consumer.positions.get(queue, 0) < end for queue, end in ends.items()):
            assert time.monotonic() < deadline, f"read up to {consumer.positions} of {ends}"
            for message in consumer.poll(1.0):
                key = (message.topic, message.queue_id, message.queue_offset)
                assert key not in found, f"{key} came twice in one pass"
                found[key] = message.body
                if key in wanted:
                    assert (message.body, message.physical_offset) == (wanted[key][0], wanted[key][1].physical_offset)
    missing = wanted.keys() - found.keys()
    assert not missing, f"{len(missing)} acknowledged messages cannot be read, first {sorted(missing)[:5]}"
