"""The topic of CommitMQ's driver, the messages that a consumer could read there, and the times up to that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from bench.drivers.common import Job, Result
from commitmq import Admin
from commitmq.errors import CommitMQError
from commitmq.protocol import directory

QUEUES_OF_A_TOPIC = 4096
_POLL_S = 0.0005


def words(job: Job) -> list[str]:
    """The words of the job's mode."""
    return job.mode.split()


def connect_as_from_elsewhere() -> None:
    """From now on this process finds no token of the node on its own host: it connects by tcp and maps no files."""
    directory.token_matches = lambda store, token: False


class Times:
    """From the first send to the last ack, until all is visible to consumers, and until it is indexed."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def begin(self) -> None:
        self._at["begin"] = time.perf_counter()

    def acked(self) -> None:
        self._at["seconds"] = time.perf_counter()

    def visible(self) -> None:
        self._at["visible_seconds"] = time.perf_counter()

    def indexed(self) -> None:
        self._at["indexed_seconds"] = time.perf_counter()

    def result(self) -> Result:
        return {name: at - self._at["begin"] for name, at in self._at.items() if name != "begin"}


class Target:
    """The job's topic, made if it does not exist; of more queues than a topic can have, several topics.

    The job's first message goes into each of them before a clock starts.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.address = job.address
        self.topics = self.names(job)
        self.admin = Admin(job.address, timeout_s=job.timeout_s)

    @staticmethod
    def names(job: Job) -> list[str]:
        count = -(-job.queues // QUEUES_OF_A_TOPIC)
        return [job.topic, *(f"{job.topic}-{number}" for number in range(1, count))]

    def __enter__(self) -> Self:
        try:
            there = {topic.name for topic in self.admin.topics()}
            each = -(-self.job.queues // len(self.topics))
            for name in self.topics:
                if name not in there:
                    self.admin.topic_create(name, each)
        except BaseException:
            self.admin.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.admin.close()

    @contextlib.contextmanager
    def timed(self) -> Iterator[Times]:
        yield Times()

    def visible(self) -> int:
        """Messages that consumers could have read so far."""
        return sum(high for name in self.topics for _, _, high, _ in self.admin.offsets(name))

    def wait_visible(self, count: int) -> None:
        """Return when :meth:`visible` has reached ``count``."""
        deadline = time.monotonic() + self.job.timeout_s
        while self.visible() < count:
            if time.monotonic() > deadline:
                raise CommitMQError(f"{count} messages were acknowledged, consumers see {self.visible()}")
            time.sleep(_POLL_S)

    def wait_visible_all(self) -> int:
        """Return :meth:`visible` when all messages acknowledged before are visible: dispatching follows the log's
        order.
        """
        self._wait_dispatched("consume_queue")
        return self.visible()

    def wait_indexed(self) -> None:
        """Return when the index has all messages acknowledged before."""
        self._wait_dispatched("index")

    def _wait_dispatched(self, dispatcher: str) -> None:
        deadline = time.monotonic() + self.job.timeout_s
        written = self.admin.status()["positions"]["written"]
        while next(one for one in self.admin.dispatchers() if one["name"] == dispatcher)["position"] < written:
            if time.monotonic() > deadline:
                raise CommitMQError(f"the dispatcher {dispatcher} does not catch up")
            time.sleep(_POLL_S)
