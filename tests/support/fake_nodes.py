"""A set of nodes without nodes: the producers of each do what a script says, and the clock is the test's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from commitmq.client.producer import TopicUnknownError
from commitmq.client.producing.choice import NodeSet
from commitmq.client.producing.fault_strategy import FaultStrategy
from commitmq.client.results import BatchResult, BatchSendError, RunAck, SendResult
from commitmq.client.sending.outbox import NoRoom
from commitmq.errors import Outcome, SendError, send_error


class FakeLanes:
    """What a set of nodes looks at in a producer."""

    def __init__(self) -> None:
        self.writer = SimpleNamespace(
            outbox=SimpleNamespace(is_full=False, lock=threading.RLock(), end_linger=lambda: None),
            lane=SimpleNamespace(delivery=SimpleNamespace(busy=SimpleNamespace(error=None))),
        )
        self.routes = SimpleNamespace(patience_s=None, away=None)
        self.watches: list[Any] = []

    def watch(self, made: Callable[[], Any]) -> None:
        self.watches.append(made())

    def in_pump(self) -> bool:
        return False


class FakeProducer:
    """``script`` has an error, a function or None (stored) for each send to come; without one every send is stored."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.address = address
        self.settings = settings
        self.script: deque[Any] = deque()
        self.sent: list[tuple[Any, dict[str, Any]]] = []
        self.futures: list[Future[Any]] = []
        self.is_closed = False
        self.holds = False
        """Leave asynchronous sends without an outcome."""
        self._lanes = FakeLanes()

        self.looked_up: list[str] = []
        self.tell_room: Callable[[], None] = lambda: None

    def _never_wait_for_room(self, tell: Callable[[], None]) -> None:
        self.tell_room = tell

    def _look_up(self, topic: str, body: Any, fields: dict[str, Any], deadline: float) -> None:
        self.looked_up.append(topic)

    def _send_at_once(self, topic: str, body: Any, fields: dict[str, Any]) -> Future[SendResult]:
        """The script's NoRoom and TopicUnknownError are raised here."""
        if self.script and isinstance(self.script[0], NoRoom | TopicUnknownError):
            raise self.script.popleft()
        return self.send_async(topic, body, **fields)

    def _next(self, what: Any, fields: dict[str, Any]) -> None:
        self.sent.append((what, fields))
        told = self.script.popleft() if self.script else None
        if callable(told):
            told = told()
        if told is not None:
            raise told

    def send(self, topic: str, body: Any, **fields: Any) -> SendResult:
        self._next(body, fields)
        return SendResult(topic, 0, len(self.sent), 0, 0, "", "", "flushed")

    def send_async(self, topic: str, body: Any, **fields: Any) -> Future[SendResult]:
        return self._future(lambda: self.send(topic, body, **fields))

    def send_batch_async(self, topic: str, messages: Any, **fields: Any) -> Future[BatchResult]:
        def stored() -> BatchResult:
            try:
                self._next(list(messages), fields)
            except SendError as error:
                raise BatchSendError(
                    error, acks=[], stored=0, unknown=0, total=len(messages), stored_prefix=0
                ) from error
            return BatchResult([ack(topic, len(messages))])

        return self._future(stored)

    def _future(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures.append(future)
        if self.holds:
            return future
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self, timeout_s: float | None = None) -> None:
        self.is_closed = True


def ack(topic: str, count: int) -> RunAck:
    answer = {"queue_offset": 0, "physical_offset": 0, "store_timestamp": 0, "msg_id": "0" * 32, "end_offset": 10}
    return RunAck(topic, 0, "flushed", [10] * count, [f"u{number}" for number in range(count)], answer)


def refused(code: str, outcome: Outcome = Outcome.NOT_STORED, retry_after_ms: int | None = None) -> SendError:
    return send_error(code, "as the test wants it", outcome, retry_after_ms)


def fake_set(count: int = 3, **settings: Any) -> NodeSet:
    """A set of ``count`` nodes ``n0``, ``n1``, …; the next choice without an affinity is ``n0``."""
    options: dict[str, Any] = {"retries": 2, "may_store_twice": False, "strategy": FaultStrategy(), **settings}
    nodes = NodeSet([f"n{number}" for number in range(count)], **options)
    for node in nodes.nodes:
        nodes.attach(node, FakeProducer(node.address))
    nodes._turn = count - 1
    nodes.detector.add = lambda node: None  # type: ignore[method-assign]
    return nodes
