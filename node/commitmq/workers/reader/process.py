"""reader-N: answers pulls, long polls, and look-ups of offsets and single messages.

Owns       nothing on disk.
Reads      CommitLog and ConsumeQueue files (of BatchCQ topics too); dispatcher(0, DISPATCHED), the upper bound of
           readable records; FLUSHED, up to which single messages are found by their place; MIN_OFFSET; the topic
           table; the files of memory topics (store.memory.memory_files), which have bounds of their own.
Advances   nothing; publishes in AWAITED_UNTIL_MS of its slot whether a pull waits here.
Sockets    ROUTER ``reader-N`` (ipc and tcp) for clients; SUB ``queues-changed`` (the ConsumeQueue dispatcher: which
           queues grew), SUB ``memory-changed`` (the memory dispatcher: the same), SUB ``topics`` (the coordinator:
           which topics changed). These are only hints to look: a sweep and a version in the control block cover
           lost ones. Rings flush and reput when the first pull begins to wait.
Exit       0 after ``stop``: parked pulls are answered empty first. 74 when topics or segments are unusable.

One loop (:meth:`Reader.turn`), never blocked by a client: requests are answered as they come (``pulls``, ``look_ups``),
and answers leave through ZeroMQ's own queues. The unread answers of one client, and of all clients, are bounded there
(SYSTEM_BUSY beyond).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

import zmq

from commitmq.control import WorkerWord
from commitmq.errors import ProtocolError
from commitmq.protocol import wire
from commitmq.workers.reader.look_ups import KeyQueries, LookUps
from commitmq.workers.reader.places import Places
from commitmq.workers.reader.pulls import PART_NS, Answers, ParkedPulls, Pulls
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments

ROLE = "reader"
_REQUESTS_A_TURN: Final = 256
_HEARTBEAT_MS: Final = 1_000
# A consumer pulls again when it has processed its messages. It is expected back for this long, and meanwhile the node
# does not slow down.
_EXPECTED_BACK_MS: Final = 100
_NO_END_MS: Final = 1 << 62
# Deleted ConsumeQueue files are looked for at this interval, for this long after the log's minimum grew.
_DROP_INTERVAL_MS: Final = 2_000
_EXPIRY_MS: Final = 60_000


def run(ctx: WorkerContext) -> None:
    """Serve until told to stop. Raises StoreError when the store's files cannot be used."""
    reader = Reader(ctx)
    ctx.ready(endpoints=reader.endpoints)
    try:
        while not ctx.stopping:
            reader.turn()
        reader.drain()
    finally:
        reader.close()


class Reader:
    """The process's state; :meth:`turn` is one round of its loop."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        config = ctx.config
        self._limits = config.reader
        self._parked = ParkedPulls(self._limits.max_parked_pulls, self._limits.max_parked_bytes)
        self._places = Places(ctx, self._parked.wake_topics)
        self._topics = self._places.topics
        self._key_queries = KeyQueries(config, ctx.layout.index, ctx.control, self._places.log, self._places.queues)
        self._expired = ExpiredSegments(ctx, self._places.log)
        self._expired.release()
        self._drop_files_until_ms = self._next_drop_ms = 0
        self._is_awaited = False
        # a pull that waited in the predecessor is sent again
        ctx.control.put_worker(ctx.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        self._ringers = [ctx.ringer("flush"), ctx.ringer("reput")]
        self._next_sweep_ms = 0
        self._router, self.endpoints = ctx.bind_router(ctx.role, only_answers=True)
        ctx.register(self._router)
        self._answers = Answers(self._router, ctx.log)
        self._pulls = Pulls(ctx, self._places, self._parked, self._answers)
        pull = self._pulls.pull if self._pulls.counts is None else self._pulls.counts.timed(self._pulls.pull)
        look_ups = LookUps(self._limits, ctx.control, self._places, self._key_queries, self._answers)
        self._operations: dict[str, Callable[[bytes, dict[str, Any]], None]] = {
            "pull": pull,
            "offsets": look_ups.offsets,
            "view": look_ups.view,
            "query": look_ups.query,
            "memory": look_ups.memory_use,
        }

    def close(self) -> None:
        # A subscription that no publisher has taken yet would delay the end for as long as answers may linger.
        self._ctx.control.put_worker(self._ctx.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        for ringer in self._ringers:
            ringer.close()
        self._pulls.close()
        self._places.close()

    # ------------------------------------------------------------ the loop

    def turn(self) -> None:
        """Wait for events, and handle them."""
        readable = self._ctx.wait(self._timeout_ms())
        if self._places.changes in readable:
            self._places.hear_topics()
        if self._topics.is_stale:
            self._places.reload_topics()
        if self._router in readable:
            self._serve()
        if self._pulls.changes in readable:
            self._pulls.hear_changes()
        now = monotonic_ms()
        self._let_go(now)
        end_ns = monotonic_ns() + PART_NS
        for pull in self._parked.due(now):
            self._answers.guarded(pull.client, pull.request, self._pulls.time_up, pull)
            if monotonic_ns() >= end_ns:
                break  # the next turn comes at once: the remaining pulls are due
        self._pulls.look_again()
        if now >= self._next_sweep_ms:
            self._next_sweep_ms = now + self._limits.sweep_interval_ms
            self._places.memory.release_evicted()
            self._pulls.sweep_some()
            self._pulls.rest()
        if self._parked.awaits_log is not self._is_awaited:
            self._publish_awaited(now)

    def _publish_awaited(self, now: int) -> None:
        """Publish that a pull begins to wait or that none waits any more. The first one ends the long pauses of flush
        and reput.

        It rings them even when everything written can be read: the next message, too, would be delayed until the pauses
        are over.
        """
        control, slot = self._ctx.control, self._ctx.slot
        self._is_awaited = self._parked.awaits_log
        if not self._is_awaited:
            control.put_worker(slot, WorkerWord.AWAITED_UNTIL_MS, now + _EXPECTED_BACK_MS)
            return
        is_first = control.worker(slot, WorkerWord.AWAITED_UNTIL_MS) <= now
        control.put_worker(slot, WorkerWord.AWAITED_UNTIL_MS, _NO_END_MS)
        if is_first:
            for ringer in self._ringers:
                ringer.ring()

    def _let_go(self, now: int) -> None:
        """Unmap and close expired files between two requests, so that no answer loses its data while it is built."""
        if self._expired.release():
            self._drop_files_until_ms = now + _EXPIRY_MS
        if self._next_drop_ms <= now < self._drop_files_until_ms:
            # ConsumeQueue files follow the log's minimum within seconds.
            self._next_drop_ms = now + _DROP_INTERVAL_MS
            self._places.drop_deleted_files()
            self._key_queries.drop_deleted_files()

    def drain(self) -> None:
        """Answer the requests that have arrived and the parked pulls, without waiting for messages."""
        self._router.line.stop_resting()
        self._serve()
        for key in self._parked.queues():
            for pull in self._parked.waiting(key):
                self._parked.remove(pull)
                self._answers.guarded(pull.client, pull.request, self._pulls.time_up, pull)

    def _timeout_ms(self) -> int:
        if self._parked.woken:
            return 0
        timeout = _HEARTBEAT_MS
        now = monotonic_ms()
        if len(self._parked):
            timeout = min(timeout, self._next_sweep_ms - now)
            deadline = self._parked.next_deadline_ms()
            if deadline is not None:
                timeout = min(timeout, deadline - now)
        return max(0, timeout)

    def _serve(self) -> None:
        end_ns = monotonic_ns() + PART_NS
        for _ in range(_REQUESTS_A_TURN):
            if monotonic_ns() >= end_ns:
                return
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = frames[0]
            if len(frames) < 2:
                self._answers.send(client, wire.error(None, "BAD_HEADER", "a request needs a header frame"))
                continue
            try:
                header = wire.parse_request(frames[1])
            except ProtocolError as error:
                self._answers.send(client, wire.error(wire.request_id(frames[1]), error.code, error.message))
                continue
            operation = self._operations.get(header["op"])
            if operation is None:
                sentence = f"a reader does not know the op {header['op']!r}"
                self._answers.send(client, wire.error(header["id"], "UNKNOWN_OP", sentence))
                continue
            if len(frames) > 2:
                sentence = f"{header['op']} takes no payload, but {len(frames) - 2} frames came"
                self._answers.send(client, wire.error(header["id"], "INVALID_PARAMETER", sentence))
                continue
            self._answers.guarded(client, header["id"], operation, client, header)
