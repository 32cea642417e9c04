"""Pulls: the messages that a pull finds, its answer, and the pulls that wait for messages.

SUB ``queues-changed`` (the ConsumeQueue dispatcher: which queues grew) and ``memory-changed`` (the memory dispatcher:
the same) wake parked pulls. A sweep covers lost wake-ups.
"""

from __future__ import annotations

import contextlib
from time import monotonic_ns
from typing import Any, Final

import orjson
import zmq

from commitmq.config import NodeConfig
from commitmq.control import Word
from commitmq.errors import OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.protocol import wire
from commitmq.store.queues.pull_result import NO_UNITS, PullResult, PullStatus
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.queues.record_filter import RecordFilter
from commitmq.store.recovery.cut_history import NO_CUT
from commitmq.workers.reader.answers import Answers
from commitmq.workers.reader.filters import ExpressionFilter, Filters
from commitmq.workers.reader.parked_pulls import ParkedPulls, Pull, QueueKey, parse_pull
from commitmq.workers.reader.places import Place, Places, subscribe
from commitmq.workers.reader.pull_counts import PullCounts
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.flow import Flow, FlowRefusedError
from commitmq.workers.runtime.subscription_view import BitMapFilter, SubscriptionView

_CHANGES_A_TURN: Final = 256
# A turn gives this time each to requests, to woken pulls and to pulls whose time is up. So none of them waits for many
# of the others, and the supervisor sees the loop turn.
PART_NS: Final = 5_000_000
_SWEEP_QUEUES: Final = 2_000
_EVICTION_RETRIES: Final = 3
_JUDGED: Final = -1
_NO_QUEUE: Final = (PullStatus.NO_MATCHED_LOGIC_QUEUE, PullStatus.NO_MESSAGE_IN_QUEUE)


class Pulls:
    """The operation ``pull`` of one reader."""

    def __init__(self, ctx: WorkerContext, places: Places, parked: ParkedPulls, answers: Answers) -> None:
        self._ctx = ctx
        self._places, self._parked, self._answers = places, parked, answers
        self._limits = ctx.config.reader
        self._flow = Flow.of_pulls(ctx)
        ctx.on_settings(self._take_settings)
        self.counts = PullCounts.of(ctx, parked)
        self._subscriptions = SubscriptionView(ctx.layout, ctx.control)
        self._filters = Filters(ctx.params.get("filters", ()), limit=ctx.config.filter.max_compiled)
        self.changes = subscribe(ctx, "queues-changed", *(("memory-changed",) if ctx.config.memory.enable else ()))
        self._is_listening = True
        self._sweep: list[QueueKey] = []
        self._sweep_bound = (-1, -1)

    def _take_settings(self, _config: NodeConfig) -> None:
        self._flow = Flow.of_pulls(self._ctx, self._flow)

    def close(self) -> None:
        if self._is_listening:
            self._ctx.unregister(self.changes)
        self.changes.close()

    def pull(self, client: bytes, header: dict[str, Any]) -> None:
        """Answer a pull, or park it until a message comes."""
        is_local = "client" in header and self._answers.is_local(client)
        pull = parse_pull(client, header, self._limits, self._filters, is_local=is_local)
        if self._flow is not None:
            # A pull that waits for messages passes now; what it gets is taken from its rates when it is answered.
            if self._flow.bounds_users:
                pull.user = self._answers.user_of(header)
            try:
                self._flow.admit(pull.owner, pull.topic, pull.group, pull.user)
            except FlowRefusedError as refusal:
                raise ProtocolError(refusal.code, refusal.sentence, retry_after_ms=refusal.retry_after_ms) from refusal
        result = self._read(pull)
        if pull.wait_ms and not self._ctx.stopping and self._is_nothing_yet(pull, result):
            if not self._parked.has_room(pull):
                raise ProtocolError("SYSTEM_BUSY", "too many pulls wait for messages already", retry_after_ms=1_000)
            pull.offset = result.next_offset
            self._parked.add(pull, monotonic_ms())
            if not self._is_listening:
                self._listen()
                self._answers.guarded(client, pull.request, self._retry, pull)
            return
        self._answer(pull, result)

    def _read(self, pull: Pull) -> PullResult:
        topic = self._places.topic(pull.topic, pull.incarnation)
        if not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {pull.topic!r} may not be read")
        self._places.check_queue(pull.topic, topic, pull.queue)
        if not topic.is_memory and not self._places.topics.is_cleared(pull.topic):
            # The units there belong to a deleted topic. The new topic has no messages there yet.
            return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, pull.offset, 0, pull.offset, NO_UNITS)
        place = self._places.place(pull.topic, topic)
        if (
            pull.log_generation not in (None, _JUDGED, self._places.cuts.generation)
            and (moved := self._judge(pull, place)) is not None
        ):
            return moved
        result = place.queues.read(
            pull.topic,
            pull.queue,
            pull.offset,
            bound=place.bound,
            floor=place.floor,
            max_messages=pull.max_messages,
            max_bytes=pull.max_bytes,
            wanted=self._wanted(pull),
        )
        pull.in_memory = place.in_memory
        if place.in_memory:
            if result.status is PullStatus.OFFSET_OVERFLOW_BADLY:
                # Only a node that was started anew has fewer messages than a consumer has seen: begin with the first
                # message.
                result.next_offset = result.min_offset
        elif pull.offset > result.max_offset and place.bound < self._end_of_log(pull):
            # The dispatcher has to catch up with the log: after a crash, or behind a message that was just acknowledged.
            # The queue may grow to this offset. Sending the consumer back to the queue's end would make it read messages
            # twice, or messages that it has passed over.
            result.status = PullStatus.OFFSET_OVERFLOW_ONE
            result.next_offset = pull.offset
        return result

    def _judge(self, pull: Pull, place: Place) -> PullResult | None:
        """The answer to a pull whose offset lies behind the queue's end at a cut of the log since the client learnt it; None
        for any other.

        The messages that the client has seen there are gone, and those that are there now it has not seen.
        """
        cuts = self._places.cuts
        assert pull.log_generation is not None
        cut = cuts.end_since(pull.log_generation)
        if cut != NO_CUT and not place.in_memory:
            if place.bound < min(cut, self._ctx.control.get(Word.RECOVERED_END)):
                # The dispatcher has to catch up with what recovery found.
                return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, pull.offset, 0, pull.offset, NO_UNITS)
            queue: dict[str, Any] = {
                "topic": pull.topic,
                "queue": pull.queue,
                "bound": place.bound,
                "floor": place.floor,
            }
            end, bounds = place.queues.offset_at(physical=cut, **queue), place.queues.bounds(**queue)
            if end is not None and bounds is not None and end < pull.offset:
                pull.log_generation = _JUDGED
                return PullResult(PullStatus.OFFSET_OVERFLOW_BADLY, end, *bounds, NO_UNITS)
        pull.log_generation = _JUDGED
        return None

    def _generation(self, pull: Pull) -> dict[str, int]:
        """The generation of the log that the answer's offsets belong to, for a client that asked."""
        known = pull.log_generation
        return {} if known is None else {"log_generation": self._places.cuts.generation if known == _JUDGED else known}

    def _end_of_log(self, pull: Pull) -> int:
        """The end of the log when the pull came: beyond it no message can be that its client knows of.

        A pull that does not wait is judged by what recovery found, so that it gets its verdict at once.
        """
        if not pull.log_end:
            control = self._ctx.control
            written = control.get(Word.WRITTEN) if pull.wait_ms else 0
            pull.log_end = max(written, control.get(Word.RECOVERED_END))
        return pull.log_end

    def _wanted(self, pull: Pull) -> RecordFilter | None:
        """The pull's filter, with bit maps if its group is known for exactly this expression.

        Call it after the bound was taken: see :mod:`commitmq.coordination.subscriptions`.
        """
        wanted = pull.wanted
        if pull.group is None or not isinstance(wanted, ExpressionFilter):
            return wanted
        self._subscriptions.refresh()
        known = self._subscriptions.of_group(pull.topic, pull.group)
        if known is None or (known.kind, known.expression) != (wanted.kind, wanted.expression):
            return wanted
        return BitMapFilter(wanted, known)

    def _is_nothing_yet(self, pull: Pull, result: PullResult) -> bool:
        """Whether only a new message can change the answer."""
        if result.status is PullStatus.OFFSET_OVERFLOW_ONE:
            return True
        if result.status in _NO_QUEUE:
            return pull.offset == 0
        return result.status is PullStatus.NO_MATCHED_MESSAGE and result.next_offset >= result.max_offset

    def _answer(self, pull: Pull, result: PullResult) -> None:
        frames: list[Any] = []
        if result.count:
            if pull.in_memory:
                result, frames = self._memory_frames(pull, result)
            elif pull.ranges:
                frames = [result.units.tobytes()]
            else:
                try:
                    frames = self._places.queues.frames(result.units)
                except OffsetOutOfRangeError:
                    # The segment was deleted between the look at the units and now. The minimum grew before that, so
                    # another look skips exactly the deleted records.
                    result = self._read(pull)
                    try:
                        frames = self._places.queues.frames(result.units) if result.count else []
                    except OffsetOutOfRangeError:
                        result.status, result.units = PullStatus.MESSAGE_WAS_REMOVING, result.units[:0]
        if not result.count and result.status is PullStatus.OFFSET_OVERFLOW_ONE and pull.offset > pull.asked:
            result.status = PullStatus.NO_MATCHED_MESSAGE
        if self._flow is not None and result.count:
            size_bytes = int(result.units["size"].sum())
            self._flow.take(result.count, size_bytes, pull.owner, pull.topic, pull.group, pull.user)
        if self.counts is not None:
            self.counts.answered(pull, result)
        header = wire.ok(
            pull.request,
            status=result.status,
            next_offset=result.next_offset,
            min_offset=result.min_offset,
            max_offset=result.max_offset,
            count=result.count,
            **self._generation(pull),
            **({"mode": "bytes"} if pull.in_memory and pull.ranges else {}),
        )
        self._answers.send(pull.client, header, frames)

    def _memory_frames(self, pull: Pull, result: PullResult) -> tuple[PullResult, list[Any]]:
        """The records of ``result``. When they are evicted during the read, the records that are there now."""
        for _ in range(_EVICTION_RETRIES):
            place = self._places.place(pull.topic, self._places.topic(pull.topic))
            assert isinstance(place.queues, QueueReader)  # a memory topic has plain queues
            try:
                return result, place.queues.frames(result.units) if result.count else []
            except StoreError:
                result = self._read(pull)
        result.status, result.units = PullStatus.MESSAGE_WAS_REMOVING, result.units[:0]
        result.next_offset = max(result.min_offset, pull.offset)
        return result, []

    def _retry(self, pull: Pull) -> None:
        """Answer a parked pull if it has a result now."""
        try:
            result = self._read(pull)
        except BaseException:
            self._parked.remove(pull)
            raise
        if self._is_nothing_yet(pull, result):
            pull.offset = result.next_offset
            return
        self._parked.remove(pull)
        if self._answers.unsent.is_over(pull.client):
            result.status, result.units = PullStatus.NO_MATCHED_MESSAGE, result.units[:0]
            result.next_offset = pull.offset
        self._answer(pull, result)

    def time_up(self, pull: Pull) -> None:
        """Answer a pull that was parked until now."""
        self._answer(pull, self._read(pull))

    def look_again(self) -> None:
        """Answer woken pulls. Those that this turn has no time for come first in the next one."""
        woken = self._parked.woken
        end_ns = monotonic_ns() + PART_NS
        while woken:
            pull = woken.popleft()
            pull.is_woken = False
            if not pull.done:
                self._answers.guarded(pull.client, pull.request, self._retry, pull)
                if monotonic_ns() >= end_ns:
                    return

    # ------------------------------------------------------------ changes

    def _listen(self) -> None:
        """Listen for wake-ups again, and discard those that came while no pull waited. Look at the queue afterwards."""
        self._ctx.register(self.changes)
        self._is_listening = True
        with contextlib.suppress(zmq.Again):
            while True:
                self.changes.recv_multipart(zmq.NOBLOCK)

    def hear_changes(self) -> None:
        """Wake the pulls that wait for a queue that grew."""
        for _ in range(_CHANGES_A_TURN):
            try:
                frames = self.changes.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not len(self._parked):
                continue  # no pull waits: the next pull will see the change
            for topic, queue in orjson.loads(frames[-1]):
                self._parked.wake((topic, queue))

    def sweep_some(self) -> None:
        """Look at parked queues as if a wake-up had come, some of them in each sweep."""
        if not self._sweep:
            bounds = self._places.bound(), self._places.memory.stored()
            if bounds == self._sweep_bound:
                return
            self._sweep_bound = bounds
            self._sweep = self._parked.queues()
        part, self._sweep = self._sweep[:_SWEEP_QUEUES], self._sweep[_SWEEP_QUEUES:]
        for key in part:
            self._parked.wake(key)

    def rest(self) -> None:
        """Listen no more until a pull waits: producers without waiting consumers must not wake this process for every
        batch.
        """
        if self._is_listening and not self._parked.was_used():
            self._ctx.unregister(self.changes)
            self._is_listening = False
