"""The lanes of one producer: the writer's lane, and the lane of the memory process from the first send to a memory topic on.

The coordinator tells which topics are memory topics. A topic can be deleted and made again as the other kind, and the producer
does not know at once. The process that gets such a send refuses it as WRONG_ENDPOINT, and the topic changes lanes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from commitmq.client.routes import Routes
from commitmq.client.sending.delivery import AtMostOnce
from commitmq.client.sending.lane import WRONG_ENDPOINT
from commitmq.client.sending.node_watch import NodeWatch
from commitmq.client.sending.outbox import Waiters
from commitmq.client.sending.pump import Pump
from commitmq.errors import Outcome, SendError
from commitmq.format.unique_ids import UniqueIds

_ROUTE_S: Final = 1.0


class Lanes:
    """See the module. ``writer`` is the pump of the writer's lane; all topics use it but those in ``pump_of_topic``."""

    def __init__(
        self,
        node: str | None,
        *,
        timeout_s: float,
        max_pending: int,
        max_pending_bytes: int,
        linger_s: float = 0.0,
        ids: UniqueIds | None = None,
        delivery: AtMostOnce | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.routes = Routes(node)
        self.ids = ids or UniqueIds()
        self.waiters = Waiters()
        self.pump_of_topic: dict[str, Pump] = {}
        """The pump of each topic that uses another lane than the writer's; lock held to change."""
        self._node = node
        self._timeout_s = timeout_s
        self._limits: dict[str, Any] = {
            "max_pending": max_pending,
            "max_pending_bytes": max_pending_bytes,
            "linger_s": linger_s,
        }
        self._memory: Pump | None = None
        self._watched: Callable[[], NodeWatch] | None = None
        self._is_closed = False
        # An idempotent producer numbers the messages of one lane, so it has the writer's only, which refuses memory topics.
        self._is_numbered = delivery is not None and delivery.in_submission_order
        self.writer = self._pump(
            "writer", delivery or AtMostOnce(), redirects=self._redirected, misled=lambda _topic: None
        )
        self.routes.told = self._look

    def _pump(
        self,
        role: str,
        delivery: AtMostOnce,
        *,
        redirects: Callable[[str, float], bool],
        misled: Callable[[str], None],
    ) -> Pump:
        pump = Pump(
            self._node,
            role,
            self.waiters,
            pid=self.pid,
            in_pump=self.in_pump,
            redirects=redirects,
            pump_of_topic=self.pump_of_topic,
            routes=self.routes,
            ids=self.ids,
            delivery=delivery,
            misled=misled,
            **self._limits,
        )
        if self._watched is not None:
            pump.lane.watch = self._watched()
        return pump

    def watch(self, made: Callable[[], NodeWatch]) -> None:
        """The producer has further nodes: give each lane a watch, made by ``made``. Before the first send."""
        self._watched = made
        self.writer.lane.watch = made()

    @property
    def lock(self) -> threading.RLock:
        """The lock of all outboxes."""
        return self.waiters.lock

    def of(self, topic: str, deadline: float) -> Pump:
        """The pump of the lane of ``topic``. Asks the coordinator the first time."""
        found = self.pump_of_topic.get(topic)
        if found is None and self._redirected(topic, min(deadline, time.monotonic() + _ROUTE_S)):
            found = self.pump_of_topic[topic]
        return found or self.writer

    def corrected(self, topic: str, error: SendError, via: Pump) -> bool:
        """Whether the lane of ``via`` refused a send with ``error`` because it is the wrong lane: then send it again."""
        if error.code != WRONG_ENDPOINT or error.outcome is not Outcome.NOT_STORED or self._is_numbered:
            return False
        if via is not self.writer:
            self._restore(topic)
        else:
            self.routes.forget(topic)
            self._redirect(topic)
        return True

    def _redirected(self, topic: str, deadline: float) -> bool:
        """Whether ``topic`` is a memory topic. If so, its pending messages move to the memory lane, in their order."""
        if self._is_numbered or not self.routes.is_memory(topic, deadline):
            return False
        self._redirect(topic)
        return True

    def _look(self, _topic: str) -> None:
        for pump in self._pumps():
            pump.look()

    def _redirect(self, topic: str) -> None:
        with self.lock:
            if self._memory is None:
                self._memory = self._pump(
                    "memory", AtMostOnce(), redirects=lambda _topic, _deadline: False, misled=self._restore
                )
            self.pump_of_topic[topic] = self._memory
            self.writer.outbox.move(topic, self._memory.outbox)

    def _restore(self, topic: str) -> None:
        with self.lock:
            self.pump_of_topic.pop(topic, None)
        self.routes.forget(topic)

    # ------------------------------------------------------------ all lanes

    def _pumps(self) -> list[Pump]:
        return [self.writer] if self._memory is None else [self.writer, self._memory]

    def all_in_flight(self) -> int:
        """Messages pending or in flight in all lanes."""
        return sum(pump.outbox.outstanding for pump in self._pumps())

    def in_pump(self) -> bool:
        """True in a pump's own thread. A wait for a send would never end there."""
        me = threading.current_thread()
        memory = self._memory
        return self.writer.thread is me or (memory is not None and memory.thread is me)

    def flush(self, deadline: float) -> bool:
        """Wait until nothing is pending or in flight; False when ``deadline`` passed before that."""
        return self.waiters.wait_until(lambda: not self.all_in_flight(), deadline)

    def disown(self) -> None:
        """In a forked child: the sockets are the parent's."""
        for pump in self._pumps():
            pump.lane.disown()

    def close(self, deadline: float) -> None:
        """Send pending messages until ``deadline``, fail the rest, end the threads, close every socket."""
        if self.pid != os.getpid():
            for pump in self._pumps():
                pump.outbox.closed = True  # the sockets are the parent's
            return
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
        if not self.in_pump():
            self.flush(deadline)
        for pump in reversed(self._pumps()):
            pump.close(self._timeout_s)
        self.routes.close()
