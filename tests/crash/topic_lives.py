"""Topics that are deleted and made anew under senders of every kind and a group, and what must hold of each of their lives.

A *life* of a topic begins with the answer to the deletion of the one before. Every body is sent once and is unlike every
other. Of what was sent after a life began, and acknowledged, all must be

* at the place that the acknowledgement named, for a consumer that reads the topic from its beginning;
* seen by the group, whose members run on through all lives;

and the queue offsets that such a consumer finds are 0, 1, 2 … without a gap. Senders pause while a life is looked at, and
not while it ends. Memory topics keep a life as long as the node is not killed as a whole.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from commitmq import Admin, Consumer, ExactlyOnce, Producer, Reader, SendResult
from commitmq.errors import CommitMQError, ProtocolError
from nodes import Node

PATIENCE_S = 60.0
_PAUSE_S = 0.002
_RETRIED = ("SERVICE_NOT_AVAILABLE", "SYSTEM_BUSY", "NODE_UNAVAILABLE")


@dataclass
class Acked:
    """One acknowledged message; ``began``: when its send did (time.monotonic())."""

    began: float
    queue: int
    queue_offset: int
    body: bytes


@dataclass
class Topic:
    """A name, how it is sent to, and its present life."""

    name: str
    kind: str  # single, batch, async, idempotent, memory, batch_cq
    acked: list[Acked] = field(default_factory=list)
    began: float = 0.0  # its present life
    wiped: bool = False  # a memory topic that lost what it had, with its node
    go: threading.Event = field(default_factory=threading.Event)
    idle: threading.Event = field(default_factory=threading.Event)

    def attributes(self) -> dict[str, str] | None:
        return {"memory": {"storage.type": "memory"}, "batch_cq": {"queue.type": "BatchCQ"}}.get(self.kind)

    def of_this_life(self) -> dict[tuple[int, int], bytes]:
        return {(one.queue, one.queue_offset): one.body for one in self.acked if one.began >= self.began}


class Lives:
    """The threads: a sender for each topic, a group's consumer. Use as a context."""

    def __init__(self, node: Node, number: int, topics: list[Topic]) -> None:
        self.node = node
        self.topics = {topic.name: topic for topic in topics}
        self.chance = random.Random(number)
        self.seen: set[bytes] = set()
        self.trouble: list[str] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Lives:
        for topic in self.topics.values():
            self.make(topic)
            self._begin(lambda topic=topic: self._send(topic))  # type: ignore[misc]
        self._begin(self._consume)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for topic in self.topics.values():
            topic.go.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def _begin(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.trouble.append(f"{type(error).__name__}: {error}")
                raise

        thread = threading.Thread(target=guarded)
        self._threads.append(thread)
        thread.start()

    # ------------------------------------------------------------ the senders

    def _send(self, topic: Topic) -> None:
        number = 0
        producer: Producer | None = None
        while not self._stop.is_set():
            if not topic.go.is_set():
                topic.idle.set()
                topic.go.wait()
                continue
            topic.idle.clear()
            bodies = [f"{topic.name}/{number + one}".encode() for one in range(20)]
            number += len(bodies)
            try:
                if producer is None:
                    producer = Producer(
                        node=self.node.address,
                        timeout_s=5,
                        delivery=ExactlyOnce() if topic.kind == "idempotent" else None,
                    )
                self._send_some(topic, producer, bodies)
            except (CommitMQError, TimeoutError, OSError):  # OSError: there is no node whose address could be read
                # An idempotent producer whose numbers a deletion made worthless begins anew; so do all, it is no harm.
                if producer is not None:
                    producer.close(timeout_s=1)
                producer = None
                time.sleep(0.02)
            time.sleep(_PAUSE_S)
        if producer is not None:
            producer.close(timeout_s=1)

    def _send_some(self, topic: Topic, producer: Producer, bodies: list[bytes]) -> None:
        began = time.monotonic()
        if topic.kind in ("batch", "batch_cq"):
            for result, body in zip(producer.send_batch(topic.name, bodies), bodies, strict=True):
                self._note(topic, began, result, body)
        elif topic.kind == "async":
            futures = [(body, producer.send_async(topic.name, body)) for body in bodies]
            producer.flush()
            for body, future in futures:
                if future.exception() is None:
                    self._note(topic, began, future.result(), body)
        else:
            for body in bodies[:5]:
                began = time.monotonic()
                self._note(topic, began, producer.send(topic.name, body), body)

    def _note(self, topic: Topic, began: float, result: SendResult, body: bytes) -> None:
        topic.acked.append(Acked(began, result.queue, result.queue_offset, body))

    # ------------------------------------------------------------ the group

    def _consume(self) -> None:
        consumer: Consumer | None = None
        while not self._stop.is_set():
            try:
                if consumer is None:
                    consumer = Consumer(
                        list(self.topics), group="watchers", node=self.node.address, auto_commit_interval_s=0.05
                    )
                for message in consumer.poll(timeout_s=0.2):
                    self.seen.add(message.body)
            except ProtocolError as error:
                if error.code not in (*_RETRIED, "TOPIC_NOT_EXIST"):
                    raise
            except (CommitMQError, OSError):
                time.sleep(0.1)
        if consumer is not None:
            consumer.close()

    # ------------------------------------------------------------ lives

    def retried(self, ask: Callable[[Admin], object]) -> None:
        """An admin's request, repeated until the node, which may be about to die, has done it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with Admin(node=self.node.address, timeout_s=10) as admin:
                    ask(admin)
                return
            except (CommitMQError, OSError) as error:
                code = error.code if isinstance(error, ProtocolError) else "NODE_UNAVAILABLE"
                if code not in _RETRIED or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def make(self, topic: Topic) -> None:
        queues = self.chance.randint(1, 4)

        def ask(admin: Admin) -> None:
            try:
                admin.topic_create(topic.name, queues, attributes=topic.attributes())
            except ProtocolError as error:
                if error.code != "INVALID_PARAMETER" or topic.attributes():
                    raise  # else a sender was faster, and made it with another number of queues

        self.retried(ask)

    def end(self, topic: Topic) -> None:
        """Delete the topic, in the middle of sends, and begin its next life."""

        def ask(admin: Admin) -> None:
            try:
                admin.topic_delete(topic.name)
            except ProtocolError as error:
                if error.code != "TOPIC_NOT_EXIST":
                    raise  # else it was gone already: a former attempt did it

        if topic.attributes():
            # A sender would make it anew as an ordinary topic.
            self.pause(topic)
        self.retried(ask)
        topic.began = time.monotonic()
        topic.wiped = False
        if topic.attributes():
            self.make(topic)
            topic.go.set()

    def pause(self, topic: Topic) -> None:
        topic.idle.clear()
        topic.go.clear()
        assert topic.idle.wait(PATIENCE_S), f"the sender of {topic.name} does not come to rest"

    def send_until(self, topic: Topic, count: int) -> None:
        """Let the sender go on until ``count`` more messages of this life are acknowledged."""
        topic.go.set()
        wanted = len(topic.acked) + count
        deadline = time.monotonic() + PATIENCE_S
        while len(topic.acked) < wanted:
            assert time.monotonic() < deadline, f"the sender of {topic.name} does not get on: {self.trouble}"
            time.sleep(0.01)

    def check(self, topic: Topic) -> None:
        """What must hold of the present life; its sender pauses meanwhile."""
        was_sending = topic.go.is_set()
        self.pause(topic)
        wanted = {} if topic.wiped else topic.of_this_life()
        found = self._read(topic, wanted)
        missing = {key: body for key, body in wanted.items() if found.get(key) != body}
        assert not missing, f"{topic.name}: acknowledged in this life and not there: {list(missing.items())[:3]}"
        if not topic.wiped:
            for queue in {queue for queue, _ in found}:
                offsets = sorted(offset for one, offset in found if one == queue)
                assert offsets == list(range(len(offsets))), f"{topic.name} queue {queue} is not 0, 1, 2 …"
            if topic.kind == "idempotent":
                assert len(set(found.values())) == len(found), "stored twice"
        deadline = time.monotonic() + PATIENCE_S
        unseen = set(wanted.values()) - self.seen
        while unseen:
            assert time.monotonic() < deadline, (
                f"{topic.name}: the group never saw {sorted(unseen)[:3]}; {self.trouble}"
            )
            time.sleep(0.05)
            unseen -= self.seen
        if was_sending:
            topic.go.set()

    def _read(self, topic: Topic, wanted: dict[tuple[int, int], bytes]) -> dict[tuple[int, int], bytes]:
        found: dict[tuple[int, int], bytes] = {}
        deadline = time.monotonic() + PATIENCE_S
        with Reader([topic.name], node=self.node.address, timeout_s=PATIENCE_S) as consumer:
            while not wanted.keys() <= found.keys() and time.monotonic() < deadline:
                for message in consumer.poll(timeout_s=0.5):
                    key = (message.queue_id, message.queue_offset)
                    assert key not in found, f"{topic.name} delivered {key} twice"
                    found[key] = message.body
        return found
