"""When the writer refuses sends because it is behind: the time limits of ``[flow]`` (spec 5.4).

Two limits, each off with 0. A refusal has the code SYSTEM_BUSY, the reason, and ``retry_after_ms``; nothing is stored.

``send_queue_wait_ms``: a request over ZeroMQ that waited longer is refused. The writer has no queue with times in it. The
gate's thread notes how many bytes of a connection had come at which time (:meth:`Connection.judge`), so a request that ends
below such a count has waited at least since then. That is proven by the node's own clock, with a resolution of some 25 ms. A
request over the local socket waits for one turn of the writer only, which the other limit covers.

``page_cache_busy_ms``: an append that took longer. The sends that came while it lasted are refused: those that are there when
it has ended, until the writer has caught up, for the time of the limit at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from commitmq.network.gate import Gate
from commitmq.store.log.append import Appended
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.flow import FlowRefusedError
from commitmq.workers.runtime.refusals import Refusals
from commitmq.workers.writer.local_sockets import Peer

Store = Callable[[Callable[[], Appended]], Appended]
_MOST_RETRY_MS: Final = 1_000


class BusySends:
    """See the module. ``gate`` guards the port of the writer."""

    def __init__(self, context: WorkerContext, gate: Gate) -> None:
        config = context.config.flow
        self._wait_ms = config.send_queue_wait_ms
        self._busy_s = config.page_cache_busy_ms / 1000
        self._peers = gate.peers
        self._refusals = Refusals(context.control, context.slot)
        self._took_s = 0.0
        """How long the slow append took; 0.0 while nothing is refused for one."""
        self._until = 0.0
        self._is_new = False
        if self._wait_ms:
            gate.limit_waits(self._wait_ms / 1000)

    @classmethod
    def of(cls, context: WorkerContext, gate: Gate) -> BusySends | None:
        """None where both limits are off."""
        config = context.config.flow
        return cls(context, gate) if config.send_queue_wait_ms or config.page_cache_busy_ms else None

    def admit(self, client: Peer) -> None:
        """Raise FlowRefusedError for a send of ``client`` that waited for too long."""
        if self._took_s:
            if time.monotonic() < self._until:
                self._refuse(
                    f"an append took {self._took_s * 1000:.0f} ms: the page cache or the disk is slower than the sends"
                    " (flow.page_cache_busy_ms)",
                    int(self._busy_s * 1000),
                )
            self._took_s = 0.0
        if self._wait_ms and not isinstance(client, int):
            connection = self._peers.get(client)
            if connection is not None and connection.is_late:
                self._refuse(
                    f"the send waited longer than {self._wait_ms} ms for the writer (flow.send_queue_wait_ms)",
                    self._wait_ms,
                )

    def timed(self, store: Store) -> Store:
        """``store``, which appends, with a look at its time; itself where that has no limit."""
        if not self._busy_s:
            return store

        def timed(append: Callable[[], Appended]) -> Appended:
            began = time.monotonic()
            try:
                return store(append)
            finally:
                now = time.monotonic()
                if now - began > self._busy_s:
                    self._took_s, self._until, self._is_new = now - began, now + self._busy_s, True

        return timed

    def end_turn(self, *, more: bool) -> None:
        """A turn of the writer has ended. ``more``: requests may be left that came before its end."""
        if self._is_new:  # what came over the local sockets meanwhile is in the next turn
            self._is_new = False
        elif not more:
            self._took_s = 0.0

    def _refuse(self, sentence: str, retry_ms: int) -> None:
        self._refusals.count()
        raise FlowRefusedError(sentence, min(retry_ms, _MOST_RETRY_MS))
