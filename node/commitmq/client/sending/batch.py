"""A batch: the messages of one call, their runs, and the outcome of each run.

The pump sends batches in the order of their submission. It begins a batch after it has handed over all runs of the one before.
So two batches to one queue are stored in that order unless the first one fails. A run that a connection did not take goes on
the next connection. After the loss of a run its batch sends no further run.

The outcome goes to a :class:`BatchFuture` for an asynchronous send, and to a :class:`commitmq.client.sending.wait.Wait` for a
thread that waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from commitmq.client.results import BatchResult, BatchSendError, RunAck
from commitmq.client.sending.batch_plan import BatchPlan, PlannedRun
from commitmq.client.sending.inner_batch import encode_batch
from commitmq.client.sending.options import shard
from commitmq.client.sending.run import NEVER_S, MakeError, NotYet, Run
from commitmq.client.sending.run_encoder import EncodedRun, encode_run
from commitmq.client.sending.wait import Wait
from commitmq.errors import Outcome, SendError
from commitmq.format.constants import Property
from commitmq.protocol import wire

if TYPE_CHECKING:
    from commitmq.client.sending.pump import Pump

_log = logging.getLogger("commitmq.client")


class BatchFuture(Future[BatchResult]):
    """The outcome of an asynchronous batch. The outbox has its room back before the callbacks run: they may send more."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._batch = batch

    def _invoke_callbacks(self) -> None:
        self._batch.settle()
        super()._invoke_callbacks()  # type: ignore[misc]

    def start(self) -> bool:
        """The batch's first run is about to be sent; False when the batch was cancelled."""
        return self.set_running_or_notify_cancel()

    def done_with(self, result: BatchResult | None, error: Exception | None) -> None:
        """Tell the outcome: exactly one of both is not None."""
        try:
            if result is None:
                self.set_exception(error)
            else:
                self.set_result(result)
        except BaseException:  # raised by a callback; the other batches must have their outcomes too
            _log.exception("a callback of a batch failed", extra={"fields": {}})


class BatchRun(Run):
    """One run of a batch; ``number`` is its place in the batch."""

    __slots__ = ("batch", "encoded", "is_open", "number", "planned")

    def __init__(
        self, batch: Batch, number: int, planned: PlannedRun, encoded: EncodedRun, fields: dict[str, Any]
    ) -> None:
        super().__init__(encoded.topic, encoded.queue, encoded.count, fields, encoded.data)
        self.batch = batch
        self.number = number
        self.planned = planned
        self.encoded = encoded
        self.is_open = True

    def stored(self, answer: dict[str, Any]) -> None:
        if self._close():
            self.batch.note_stored(self, answer)

    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        if self._close():
            self.batch.note_failed(self, make_error(), answer)

    def expire(self, now: float, make_error: MakeError) -> float:
        if self.is_open and self.batch.deadline <= now:
            self.failed(make_error)
        return self.batch.deadline if self.is_open else NEVER_S

    def give_back(self) -> None:
        if self._close():
            self.batch.take_back(self)

    def _close(self) -> bool:
        was_open, self.is_open = self.is_open, False
        return was_open


class Batch:
    """See the module. Only the owner of the connection uses a batch once it is submitted.

    ``inner``: the topic is a BatchCQ topic, so messages travel and are stored as inner batches instead of records.
    With ``queue`` None the sharding keys pick the queues, or the turn does. ``limit_s`` bounds the wait for each answer.
    """

    def __init__(
        self,
        pump: Pump,
        plan: BatchPlan,
        *,
        ack: str,
        limit_s: float,
        inner: bool,
        queue: int | None,
        is_async: bool = False,
    ) -> None:
        self._sink: BatchFuture | Wait[BatchResult] = BatchFuture(self) if is_async else Wait(self.settle)
        self.is_counted = False
        """Whether it takes room in the outbox; the outbox's lock is held to read and to set it."""
        self.size_bytes = int(plan.body_sizes.sum())
        self.in_flight = 0
        """Runs that were handed over and have no outcome yet."""
        self.pump = pump
        self._lane = pump.lane
        self._outbox = pump.outbox
        self._plan = plan
        self._ack = ack
        self._limit_s = limit_s
        self._inner = inner
        self._queue = queue
        self._is_free = queue is None and plan.sharding_keys is None
        self._born = time.time_ns() // 1_000_000
        self._planned: list[PlannedRun] = []
        self._left: deque[int] | None = None  # numbers of runs to be sent; None until it is planned
        self._acks: dict[int, RunAck] = {}
        self._stored = 0
        self._unknown = 0
        self._problem: SendError | None = None
        self._refusal: Exception | None = None
        self._is_running: bool | None = None
        self._is_told = False
        self.deadline = 0.0
        """In seconds of ``time.monotonic()``. Before it the first run has to be sent, later the next answer has to come."""
        self._extend()

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def topic(self) -> str:
        return self._plan.topic

    @property
    def future(self) -> BatchFuture:
        """The outcome of an asynchronous batch."""
        assert isinstance(self._sink, BatchFuture)
        return self._sink

    def wait(self) -> BatchResult:
        """Wait for the outcome of a synchronous batch. Raises BatchSendError or InvalidMessageError."""
        assert isinstance(self._sink, Wait)
        return self._sink.wait()

    @property
    def more(self) -> bool:
        """Whether the batch has another run to send."""
        return self._problem is None and self._refusal is None and (self._left is None or bool(self._left))

    @property
    def may_move(self) -> bool:
        """Whether another node may take all of it."""
        untouched = not (self.in_flight or self._acks or self._stored or self._unknown)
        return self._is_free and untouched

    def settle(self) -> None:
        """Give the batch's room back."""
        self._outbox.settle_batch(self)

    # ------------------------------------------------------------ its runs

    def next_run(self, put_deadline: float, *, only: bool = False) -> BatchRun | None:
        """The next run, encoded for this connection; None when there is none, or ``only`` is set and it is not the only one.

        Raises NotYet while the node does not name the topic's queues. A fault of the batch itself ends this batch only.
        """
        try:
            if self._left is None and not self._begin(put_deadline):
                return None
            if not self._left or (only and len(self._left) > 1):
                return None
            number = self._left[0]
            run = self._encoded(number, put_deadline)
        except SendError as error:
            if error.code == "NODE_UNAVAILABLE":
                raise NotYet(error.message) from error
            self._problem = error
            return None
        except Exception as error:
            self._refusal = error
            return None
        self._left.popleft()
        self.in_flight += 1
        self._extend()
        return run

    def take_back(self, run: BatchRun) -> None:
        """``run`` is certainly not stored. It is the next run again, unless the batch has failed meanwhile."""
        self.in_flight -= 1
        assert self._left is not None
        self._left.appendleft(run.number)
        if self.more:
            self._outbox.put_back_batch(self)
        else:
            self._outbox.finish_batch(self)

    def note_stored(self, run: BatchRun, answer: dict[str, Any]) -> None:
        """The node has stored ``run``."""
        self.in_flight -= 1
        self._acks[run.number] = run.encoded.acknowledged(self._ack, answer)
        self._stored += run.count
        self._extend()
        self._outbox.finish_batch(self)

    def note_failed(self, run: BatchRun, error: SendError, answer: dict[str, Any] | None) -> None:
        """``run`` has failed: the batch sends no further run."""
        self.in_flight -= 1
        self._problem = self._problem or error
        if error.outcome is Outcome.STORED:
            self._stored += run.count
            if answer is not None and "queue_offset" in answer:
                self._acks[run.number] = run.encoded.acknowledged("memory", answer)
        elif error.outcome is Outcome.UNKNOWN:
            self._unknown += run.count
        self._extend()
        self._outbox.finish_batch(self)

    def fail(self, error: SendError) -> None:
        """The batch sends no further run."""
        self._problem = self._problem or error

    def finish(self) -> None:
        """Tell the outcome: nothing is in flight, and no further run will be sent."""
        if not self._run() or self._is_told:
            return
        self._is_told = True
        result: BatchResult | None = None
        error = self._refusal
        if error is None and self._problem is not None:
            error = self._account(self._problem)
        if error is None:
            result = BatchResult([self._acks[number] for number in range(len(self._planned))], self._order())
        self._sink.done_with(result, error)

    # ------------------------------------------------------------ steps

    def _extend(self) -> None:
        self.deadline = time.monotonic() + self._limit_s

    def _run(self) -> bool:
        """Make the batch one that cannot be cancelled; False when it was cancelled before."""
        if self._is_running is None:
            self._is_running = self._sink.start()
            if not self._is_running:
                self.settle()
        return self._is_running

    def _begin(self, deadline: float) -> bool:
        """Plan the runs for this connection; False for a cancelled batch. Raises SendError and InvalidMessageError."""
        if not self._run():
            self._left = deque()
            return False
        self._plan.check_sizes(self._lane.max_message_bytes, inner=self._inner)
        self._planned = list(self._runs(deadline))
        self._left = deque(range(len(self._planned)))
        return True

    def _runs(self, deadline: float) -> Iterator[PlannedRun]:
        """The batch in runs, each of one queue and of a size that the node takes. Raises SendError."""
        lane, plan = self._lane, self._plan
        groups = [(-1 if self._queue is None else self._queue, 0, len(plan))]
        if self._queue is None and plan.sharding_keys is not None:
            count = lane.routes.queues(plan.topic, deadline)
            groups = plan.sort_by_queue([shard(key, count) if key else -1 for key in plan.sharding_keys])
        if self._inner:
            return plan.inner_batches(groups, lane.max_message_bytes)
        return plan.runs(lane.layout(plan.topic), groups, int(lane.hello["max_run_bytes"]))

    def _encoded(self, number: int, deadline: float) -> BatchRun:
        """Run ``number`` in the layout of this connection. Raises SendError without known queues, or without free numbers."""
        lane, topic, planned = self._lane, self._plan.topic, self._planned[number]
        queue = planned.queue if planned.queue >= 0 else lane.routes.next_queue(topic, deadline)
        part = self._plan.slice(planned)
        fields: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "op": "batch" if self._inner else "append",
            "topic": topic,
            "queue": queue,
            "count": planned.stop - planned.start,
            "ack": self._ack,
        }
        if self._inner:
            del part["sys_flags"]  # an inner batch has no flags for single bodies, so these are not compressed
            data, unique = encode_batch(unique_ids=lane.ids, **part)
            fields.update(born=self._born, properties=self._record_properties(planned))
            # The messages share one record, so the next one is 0 bytes away.
            encoded = EncodedRun(topic, queue, data, [0] * (planned.stop - planned.start), unique)
            return self._run_of(number, planned, encoded, fields)
        with lane.delivery.numbered(topic, queue, fields) as sequence:
            encoded = encode_run(
                lane.layout(topic), queue, unique_ids=lane.ids, born=self._born, sequence=sequence, **part
            )
        run = self._run_of(number, planned, encoded, fields)
        run.sequence = sequence
        return run

    def _run_of(self, number: int, planned: PlannedRun, encoded: EncodedRun, fields: dict[str, Any]) -> BatchRun:
        run = BatchRun(self, number, planned, encoded, fields)
        # (A batch goes to another node as a whole or not at all.)
        run.is_free = self._is_free and len(self._planned) == 1
        return run

    def _record_properties(self, planned: PlannedRun) -> dict[str, str]:
        """The properties of the record of an inner batch: an id, and the common tag of its messages for the tag filter."""
        tag = self._plan.common_tag(planned)
        return {Property.UNIQUE_KEY: self._lane.ids.next(), **({Property.TAGS: tag} if tag else {})}

    def _order(self) -> list[tuple[int, int]] | None:
        """(run, index in the run) of each message, in the caller's order; None where sharding did not sort the messages."""
        places = self._plan.order
        if places is None:
            return None
        order: list[tuple[int, int]] = [(0, 0)] * len(places)
        for number, run in enumerate(self._planned):
            for within, at in enumerate(range(run.start, run.stop)):
                order[places[at]] = (number, within)
        return order

    def _account(self, problem: SendError) -> BatchSendError:
        prefix = 0
        if self._plan.order is None:
            for number, run in enumerate(self._planned):
                if number not in self._acks:
                    break
                prefix = run.stop
        return BatchSendError(
            problem,
            acks=[self._acks[number] for number in sorted(self._acks)],
            stored=self._stored,
            unknown=self._unknown,
            total=len(self._plan),
            stored_prefix=prefix,
        )
