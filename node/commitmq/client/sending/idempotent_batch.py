"""Batches of an idempotent producer: runs whose answers did not come are repeated, one by one, until the time is over."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from commitmq.client.results import BatchResult, BatchSendError
from commitmq.client.routes import not_stored, unknown
from commitmq.client.sending.batch_plan import BatchPlan, PlannedRun
from commitmq.client.sending.batch_sender import BatchSender
from commitmq.client.sending.idempotent import LATER, OUT_OF_ORDER, PAUSE_S, UNKNOWN_PRODUCER, IdempotentCore
from commitmq.client.sending.run_encoder import EncodedRun, encode_run
from commitmq.errors import NodeUnavailableError, Outcome, SendError
from commitmq.protocol import wire
from commitmq.store.log.unique_ids import UniqueIds


@dataclass(slots=True)
class _Sent:
    """A run as it was sent. ``outcome`` None while its fate is open."""

    encoded: EncodedRun
    fields: dict[str, Any]
    outcome: Outcome | None = None
    refused_sequence: bool = False


class NumberedBatchSender(BatchSender):
    """As its base; the connection is an :class:`IdempotentCore`'s, on which nothing else is in flight or open."""

    def __init__(self, core: IdempotentCore, plan: BatchPlan, ids: UniqueIds, *, ack: str, limit_s: float) -> None:
        super().__init__(core, plan, ids, ack=ack, limit_s=limit_s)
        self._numbered = core
        self._sent: dict[int, _Sent] = {}

    def send(self, queue: int | None) -> BatchResult:
        try:
            return super().send(queue)
        except BatchSendError as error:
            self._close_gaps(error)
            raise
        except BaseException as error:
            # Interrupted: what had been sent may be stored.
            self._close_gaps(unknown(f"the batch was interrupted: {error!r}"))
            raise

    def _send_run(self, number: int, run: PlannedRun) -> None:
        core, plan = self._numbered, self._plan
        deadline = self._deadline()
        queue = run.queue if run.queue >= 0 else core.routes.next_queue(plan.topic, deadline)
        channel = core.channel
        if channel is None or not self._flying:
            channel = core.connected(deadline)
        layout = core.layout(plan.topic)
        first = core.sequences.take(plan.topic, queue, run.stop - run.start)
        try:
            encoded = encode_run(
                layout, queue, unique_ids=self._ids, born=self._born, sequence=first, **plan.slice(run)
            )
        except BaseException:
            core.sequences.rewind(plan.topic, queue, first)
            raise
        fields = {
            "v": wire.PROTOCOL_VERSION,
            "op": "append",
            "topic": plan.topic,
            "queue": queue,
            "count": encoded.count,
            "ack": self._ack,
        }
        self._sent[number] = _Sent(encoded, core.sequences.sign(fields, first))
        identity = channel.next_id()
        try:
            channel.put([orjson.dumps({**fields, "id": identity}), encoded.data], deadline)
        except NodeUnavailableError:
            # Not taken; what was in flight before it is repeated first, then this one is sent the same way.
            core.disconnect()
            before = self._take_flying()
            self._repeat([*before, number], in_doubt=len(before))
            return
        except BaseException:
            core.disconnect()
            raise
        self._flying[identity] = (number, encoded)

    def _lose(self, error: SendError) -> None:
        numbers = self._take_flying()
        self._repeat(numbers, in_doubt=len(numbers))

    def _take_flying(self) -> list[int]:
        numbers = [number for number, _ in self._flying.values()]
        self._flying.clear()
        return numbers

    def _repeat(self, numbers: list[int], in_doubt: int) -> None:
        """Send these runs again, each until it is answered; the first ``in_doubt`` of them may be stored already."""
        deadline = self._deadline()
        for at, number in enumerate(numbers):
            try:
                answer = self._asked_again(self._sent[number], at < in_doubt, deadline)
            except SendError as error:
                self._problem = self._problem or error
                self._count(number, error)
                continue
            self._acks[number] = self._sent[number].encoded.acknowledged(self._ack, answer)
            self._stored += self._sent[number].encoded.count

    def _asked_again(self, sent: _Sent, in_doubt: bool, deadline: float) -> dict[str, Any]:
        while True:
            try:
                return self._core.exchange(
                    lambda number: orjson.dumps({**sent.fields, "id": number}), sent.encoded.data, deadline
                )
            except SendError as error:
                if error.outcome is Outcome.STORED:
                    raise
                in_doubt |= error.outcome is Outcome.UNKNOWN
                if not in_doubt or error.code == OUT_OF_ORDER:
                    raise  # the node says that it is not stored
                late = time.monotonic() + PAUSE_S >= deadline
                if late or not (error.outcome is Outcome.UNKNOWN or error.code in LATER):
                    raise unknown(error.message, error.code) from error
                time.sleep(PAUSE_S)

    def _count(self, number: int, error: SendError) -> None:
        sent = self._sent[number]
        sent.outcome = error.outcome
        sent.refused_sequence = error.code in (OUT_OF_ORDER, UNKNOWN_PRODUCER)
        if error.outcome is Outcome.STORED:
            self._stored += sent.encoded.count
        elif error.outcome is Outcome.UNKNOWN:
            self._unknown += sent.encoded.count

    def _refused(self, number: int, error: SendError) -> None:
        sent = self._sent[number]
        sent.outcome = error.outcome
        sent.refused_sequence = error.code in (OUT_OF_ORDER, UNKNOWN_PRODUCER)

    def _close_gaps(self, error: SendError) -> None:
        """After a batch that failed: every run sent is acknowledged, certainly not stored, or of unknown fate."""
        gaps = []
        lost = False
        for number, sent in self._sent.items():
            if number in self._acks or sent.outcome is Outcome.STORED:
                continue
            if sent.outcome is Outcome.NOT_STORED:
                fields = sent.fields
                gaps.append((fields["topic"], fields["queue"], fields["sequence"], sent.refused_sequence))
            else:
                lost = True
        if gaps or lost:
            reason = self._problem or not_stored(error.code, error.message)
            self._numbered.close_gaps(gaps, lost=lost, reason=reason)
