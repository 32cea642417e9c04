"""Goal: memory topics lose nothing by the death of any process of a living node, and all of it with the node, cleanly.

Method: a real node, senders of every kind while its processes are killed one after the other; then every process at one
moment, and a start; then an ordered stop. Bodies name their messages; choices come from one seed, which is printed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from traffic import seed

from commitmq import Admin, Consumer, Message, Producer
from commitmq.client.results import BatchSendError
from commitmq.errors import Outcome, SendError
from commitmq.store.layout import StoreLayout
from commitmq.store.shared_memory import memory_folder
from nodes import Node, eventually, free_ports, start_node

TOPIC = "cache"
GROUP = "readers"
# Between batches, so that a fast machine does not reach the budget.
_PAUSE_S = 0.03
IN_MEMORY = {"storage.type": "memory"}
# The budget is never reached, so everything acknowledged must still be there.
SETTINGS = (
    "memory.budget_bytes=536870912",
    "memory.segment_bytes=262144",
    "supervisor.restart_backoff_max_ms=400",
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    # It is killed and must come back where its clients look for it.
    with start_node(tmp_path_factory.mktemp("memory-kill"), *SETTINGS, f"network.port={free_ports()}") as made:
        with Admin(made.address) as admin:
            admin.topic_create(TOPIC, 2, attributes=IN_MEMORY)
        yield made


class Senders:
    """Threads that send and remember what they were told."""

    def __init__(self, address: str, number: int) -> None:
        self.address = address
        self.acked: dict[bytes, tuple[int, int]] = {}
        self.not_stored: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self.trouble: list[str] = []
        self._seed = number
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, number))
            for number, work in enumerate((self._singles, self._singles, self._batches, self._pipelined))
        ]

    def __enter__(self) -> Senders:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for one in self._threads:
            one.join(60)
        assert not self.trouble, self.trouble

    def _guarded(self, work: object, number: int) -> None:
        try:
            work(number)  # type: ignore[operator]
        except BaseException as error:
            self.trouble.append(repr(error))
            raise

    def _bodies(self, name: int) -> Iterator[bytes]:
        rng = random.Random(self._seed + name)
        count = 0
        while not self._stop.is_set():
            count += 1
            yield b"%d/%d/" % (name, count) + bytes(rng.randrange(1_500))

    def _failed(self, bodies: list[bytes], outcome: Outcome) -> None:
        (self.not_stored if outcome is Outcome.NOT_STORED else self.unknown).update(bodies)
        time.sleep(0.02)

    def _singles(self, name: int) -> None:
        with Producer(self.address, timeout_s=8) as producer:
            for body in self._bodies(name):
                try:
                    result = producer.send(TOPIC, body)
                    self.acked[body] = (result.queue, result.queue_offset)
                except SendError as error:
                    self._failed([body], error.outcome)

    def _batches(self, name: int) -> None:
        with Producer(self.address, timeout_s=8) as producer:
            stream = self._bodies(name)
            while bodies := [body for body, _ in zip(stream, range(200), strict=False)]:
                try:
                    for body, result in zip(bodies, producer.send_batch(TOPIC, bodies), strict=True):
                        self.acked[body] = (result.queue, result.queue_offset)
                    time.sleep(_PAUSE_S)
                except BatchSendError as error:
                    self._failed(bodies, Outcome.UNKNOWN if error.outcome is not Outcome.NOT_STORED else error.outcome)

    def _pipelined(self, name: int) -> None:
        with Producer(self.address, timeout_s=8) as producer:
            stream = self._bodies(name)
            while bodies := [body for body, _ in zip(stream, range(100), strict=False)]:
                futures = [producer.send_async(TOPIC, body) for body in bodies]
                for body, future in zip(bodies, futures, strict=True):
                    try:
                        result = future.result(20)
                        self.acked[body] = (result.queue, result.queue_offset)
                    except SendError as error:
                        self._failed([body], error.outcome)
                time.sleep(_PAUSE_S)


def read_all(node: Node, count: int) -> dict[tuple[int, int], bytes]:
    """Everything in the topic, by queue and queue offset."""
    found: dict[tuple[int, int], bytes] = {}
    deadline = time.monotonic() + 30
    with Consumer(TOPIC, group=f"audit-{time.monotonic_ns()}", node=node.address, start="earliest") as consumer:
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.poll(timeout_s=1):
                found[message.queue_id, message.queue_offset] = message.body
    return found


def messages(node: Node) -> int:
    with Admin(node.address) as admin:
        return sum(high - low for _, low, high, _ in admin.offsets(TOPIC))


@pytest.mark.slow
def test_the_death_of_any_process_loses_nothing_acknowledged(node: Node) -> None:
    number = seed()
    rng = random.Random(number)
    victims = ["dispatcher-memory", "dispatcher-memory", "reader-0", "coordinator", "supervisor", "dispatcher-memory"]
    with Senders(node.address, number) as senders:
        for role in victims:
            before = len(senders.acked)
            eventually(lambda before=before: len(senders.acked) > before + 100, f"sends go on before {role} is killed")  # type: ignore[misc]
            time.sleep(rng.random() * 0.1)
            pid = node.pids()[role]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda role=role, pid=pid: node.healed(role, pid), f"{role} is back")  # type: ignore[misc]
        eventually(node.is_ready, "everything is back")
    stored = read_all(node, messages(node))
    for queue in (0, 1):
        offsets = sorted(offset for one, offset in stored if one == queue)
        assert offsets == list(range(len(offsets))), f"queue {queue} has a gap"
    for body, place in senders.acked.items():
        assert stored.get(place) == body, place
    bodies = list(stored.values())
    assert len(set(bodies)) == len(bodies), "a message is there twice"
    assert not senders.not_stored & set(bodies)
    assert set(bodies) <= senders.acked.keys() | senders.unknown
    assert len(senders.acked) > 1_000


def test_a_node_that_is_killed_as_a_whole_begins_anew_and_groups_miss_nothing(node: Node) -> None:
    """Offsets begin at 0. A group that had an offset reads every message of the new life, and so does a consumer that
    lived through it, however much farther it had come before.
    """
    folder = memory_folder(StoreLayout(node.store))
    with Producer(node.address) as producer:
        producer.send_batch(TOPIC, [b"before"] * 50, queue=0)
    with Consumer(TOPIC, group=GROUP, node=node.address, start="earliest") as consumer:
        while len(consumer.poll(timeout_s=1)):
            pass
    address = node.address
    survivor = Consumer(TOPIC, group="survivor", node=address, start="latest")
    survivor.poll(timeout_s=0.5)
    node.kill_all()
    assert folder.exists()
    ended = node.start()
    assert ended.returncode == 0, ended.stderr
    assert messages(node) == 0
    with Producer(node.address) as producer:
        results = producer.send_batch(TOPIC, [b"after/%d" % index for index in range(20)], queue=0)
        assert results[0].queue_offset == 0
    with Admin(node.address) as admin:
        assert {offset for topic, _, offset in admin.group(GROUP)["offsets"] if topic == TOPIC} == {0}
    found: list[Message] = []
    with Consumer(TOPIC, group=GROUP, node=node.address, start="latest") as consumer:
        while batch := list(consumer.poll(timeout_s=2)):
            found += batch
    assert [one.body for one in found] == [b"after/%d" % index for index in range(20)]
    seen: list[Message] = []
    deadline = time.monotonic() + 20
    while len(seen) < 20 and time.monotonic() < deadline:
        seen += list(survivor.poll(timeout_s=1))
    survivor.close()
    assert [one.body for one in seen] == [one.body for one in found]
    with Admin(node.address) as admin:
        offsets = {queue: offset for topic, queue, offset in admin.group("survivor")["offsets"] if topic == TOPIC}
    assert offsets[0] == 20


def test_an_ordered_stop_leaves_nothing_in_memory(node: Node) -> None:
    folder = memory_folder(StoreLayout(node.store))
    assert (folder / "topics" / TOPIC).exists()
    assert node.stop().returncode == 0
    assert not folder.exists()
