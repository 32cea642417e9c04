"""A batch that the producer's thread sends: its runs travel among those of other batches, and its future gets the result.

Batches begin in the order in which they were submitted, each once all runs of the one before it were handed over, so two
batches to one queue are stored in that order unless the first one fails. A run that a connection did not take is sent on
the next one; a batch of which a run was lost sends no further one, like a synchronous batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from commitmq.client.results import BatchResult
from commitmq.client.sending.batch_plan import BatchPlan, PlannedRun
from commitmq.client.sending.batch_sender import BatchSender
from commitmq.client.sending.send_core import SendCore
from commitmq.errors import SendError
from commitmq.protocol.connection import Channel
from commitmq.store.log.unique_ids import UniqueIds

_log = logging.getLogger("commitmq.client")


class NotYet(Exception):
    """The topic's queues are not known, because the node does not answer: to be tried again until the batch is late."""


class BatchFuture(Future[BatchResult]):
    """Gives the batch's room back once it is done or cancelled, and before its callbacks, which may send the next one."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle

    def _invoke_callbacks(self) -> None:
        self._settle()
        super()._invoke_callbacks()  # type: ignore[misc]


class PendingBatch(BatchSender):
    """See the module. Everything but ``future`` belongs to the owner of the connection once it is submitted."""

    def __init__(
        self,
        core: SendCore,
        plan: BatchPlan,
        ids: UniqueIds,
        *,
        ack: str,
        limit_s: float,
        inner: bool,
        queue: int | None,
    ) -> None:
        super().__init__(core, plan, ids, ack=ack, limit_s=limit_s, inner=inner)
        self.future: Future[BatchResult] = BatchFuture(lambda: core.settle_batch(self))
        self.settled = False
        """Its room is given back; the core's condition is held to read and to set it."""
        self._count = len(plan)
        self.size_bytes = int(plan.body_sizes.sum())
        self.deadline = self._deadline()
        """Seconds of ``time.monotonic()`` until which something must happen: its first run sent, or an answer come."""
        self._queue = queue
        self._left: deque[PlannedRun] | None = None  # None until it is planned
        self._refusal: Exception | None = None
        self._is_running: bool | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def topic(self) -> str:
        return self._plan.topic

    @property
    def in_flight(self) -> bool:
        """Whether a run of it was handed over and not answered."""
        return bool(self._flying)

    @property
    def more(self) -> bool:
        """Whether a run of it is to be sent yet."""
        return self._problem is None and self._refusal is None and (self._left is None or bool(self._left))

    def send_next(self, channel: Channel, put_deadline: float) -> int | None:
        """Hand over the next run; returns its request's id, None when there turned out to be none.

        Raises NodeUnavailableError when ``channel`` does not take it by ``put_deadline``: it is the next one again then;
        NotYet when nobody says which queues there are. What is wrong with the batch itself is its own end only.
        """
        try:
            if self._left is None and not self._begin(put_deadline):
                return None
            if not self._left:
                return None
            run = self._left[0]
            queue = run.queue
            if queue < 0:
                queue = self._core.routes.next_queue(self._plan.topic, put_deadline)
            encoded = self._encoded(queue, run)
            identity = channel.next_id()
            header = self._header(identity, queue, run, encoded)
        except SendError as error:
            if error.code == "NODE_UNAVAILABLE":
                raise NotYet(error.message) from error
            self._problem = error
            return None
        except Exception as error:
            self._refusal = error
            return None
        channel.put([header, encoded.data], put_deadline)
        self._flying[identity] = (len(self._planned), encoded)
        self._planned.append(run)
        self._left.popleft()
        self.deadline = self._deadline()
        return identity

    def _begin(self, deadline: float) -> bool:
        """Plan the runs for this connection; False when it was cancelled. Raises SendError and InvalidMessageError."""
        if not self._run():
            self._left = deque()
            return False
        self._plan.check_sizes(self._core.max_message_bytes, inner=self._inner)
        self._left = deque(self._runs(self._queue, deadline))
        return True

    def _run(self) -> bool:
        """From now on it cannot be cancelled; False when it was."""
        if self._is_running is None:
            self._is_running = self.future.set_running_or_notify_cancel()
        return self._is_running

    def answered(self, identity: int, answer: dict[str, object]) -> None:
        """The node's answer to one of its runs."""
        self._answered(identity, answer)
        self.deadline = self._deadline()

    def lose(self, error: SendError) -> None:
        """Nobody will answer the runs in flight, or send what is left."""
        self._lose(error)

    def finish(self) -> None:
        """Resolve the future: nothing is in flight, and nothing more will be sent. Runs the future's callbacks."""
        if not self._run() or self.future.done():
            return
        result: BatchResult | None = None
        error = self._refusal
        if error is None:
            try:
                result = self._result()
            except SendError as refusal:
                error = refusal
        try:
            if result is None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        except BaseException:  # of a callback; the other batches must have their outcomes too
            _log.exception("a callback of a batch failed", extra={"fields": {}})
