"""Sending a planned batch: runs pipelined over the producer's connection, and the account of what happened to each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import orjson

from commitmq.client.heap import keep_freed_memory
from commitmq.client.results import BatchResult, BatchSendError, RunAck
from commitmq.client.routes import not_stored, unknown
from commitmq.client.sending.batch_plan import BatchPlan, PlannedRun
from commitmq.client.sending.inner_batch import encode_batch
from commitmq.client.sending.run_encoder import EncodedRun, encode_run
from commitmq.client.sending.send_core import SendCore
from commitmq.errors import NodeUnavailableError, Outcome, ProtocolError, SendError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.protocol import wire
from commitmq.protocol.connection import ConnectionLost
from commitmq.store.log.unique_ids import UniqueIds


def shard(sharding_key: str, queues: int) -> int:
    """The queue for a sharding key: as RocketMQ's hash selector, so that programs of both kinds agree."""
    return abs(java_string_hash(sharding_key)) % queues


class BatchSender:
    """One batch on its way. The producer's connection must be owned (``SendCore.in_turn``) while it lives.

    ``inner``: the topic's queues count batches, so messages travel and are stored as inner batches instead of runs.
    """

    def __init__(
        self, core: SendCore, plan: BatchPlan, ids: UniqueIds, *, ack: str, limit_s: float, inner: bool = False
    ) -> None:
        self._inner = inner
        self._core = core
        self._plan = plan
        self._ids = ids
        self._ack = ack
        self._limit_s = limit_s
        self._born = time.time_ns() // 1_000_000
        self._flying: dict[int, tuple[int, EncodedRun]] = {}  # request id -> number and data of the run
        self._planned: list[PlannedRun] = []
        self._acks: dict[int, RunAck] = {}
        self._stored = 0
        self._unknown = 0
        self._problem: SendError | None = None

    def send(self, queue: int | None) -> BatchResult:
        """Send all runs; ``queue`` None lets sharding keys or the turn decide. Raises BatchSendError."""
        for run in self._runs(queue, self._deadline()):
            try:
                self._send_run(len(self._planned), run)
            except SendError as error:
                self._problem = self._problem or error
            self._planned.append(run)
            while len(self._flying) >= self._core.window:
                self._take_answer()
            if self._problem is not None:
                break
        while self._flying:
            self._take_answer()
        return self._result()

    def _runs(self, queue: int | None, deadline: float) -> Iterator[PlannedRun]:
        """The batch in runs, each of one queue and of a size that the node takes. Connected already. Raises SendError."""
        keep_freed_memory()
        core, plan = self._core, self._plan
        groups = [(-1 if queue is None else queue, 0, len(plan))]
        if queue is None and plan.sharding_keys is not None:
            count = core.routes.queues(plan.topic, deadline)
            groups = plan.sort_by_queue([shard(key, count) if key else -1 for key in plan.sharding_keys])
        if self._inner:
            return iter(plan.inner_batches(groups, core.max_message_bytes))
        return iter(plan.runs(core.layout(plan.topic), groups, int(core.hello["max_run_bytes"])))

    def _result(self) -> BatchResult:
        """What the caller is told, when nothing is in flight any more. Raises BatchSendError."""
        if self._problem is not None:
            raise self._error(self._problem)
        return BatchResult([self._acks[number] for number in range(len(self._planned))], self._order())

    def _deadline(self) -> float:
        return time.monotonic() + self._limit_s

    def _send_run(self, number: int, run: PlannedRun) -> None:
        """Encode and hand over one run. Raises SendError: then it was not sent, or not stored."""
        core, plan = self._core, self._plan
        deadline = self._deadline()
        queue = run.queue if run.queue >= 0 else core.routes.next_queue(plan.topic, deadline)
        encoded: EncodedRun | None = None
        while True:
            channel = core.channel
            if channel is None or not self._flying:
                if self._flying or self._problem:
                    return
                before = channel
                channel = core.connected(deadline)
                if channel is not before:
                    encoded = None  # another connection may want another layout
            if encoded is None:
                encoded = self._encoded(queue, run)
            identity = channel.next_id()
            try:
                channel.put([self._header(identity, queue, run, encoded), encoded.data], deadline)
            except NodeUnavailableError as error:
                # This run was not taken; with the connection went the answers to those before it.
                core.disconnect()
                if self._flying:
                    self._lose(unknown(error.message))
                    raise not_stored(error.code, error.message) from error
                if time.monotonic() >= deadline:
                    raise not_stored(error.code, error.message) from error
                continue
            except BaseException:
                core.disconnect()
                raise
            self._flying[identity] = (number, encoded)
            return

    def _header(self, identity: int, queue: int, run: PlannedRun, encoded: EncodedRun) -> bytes:
        header: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "op": "batch" if self._inner else "append",
            "id": identity,
            "topic": self._plan.topic,
            "queue": queue,
            "count": encoded.count,
            "ack": self._ack,
        }
        if self._inner:
            header.update(born=self._born, properties=self._record_properties(run))
        return orjson.dumps(header)

    def _encoded(self, queue: int, run: PlannedRun) -> EncodedRun:
        core, plan = self._core, self._plan
        if not self._inner:
            return encode_run(core.layout(plan.topic), queue, unique_ids=self._ids, born=self._born, **plan.slice(run))
        part = plan.slice(run)
        del part["sys_flags"]  # a batch says nothing about single bodies, so they are not compressed
        data, unique = encode_batch(unique_ids=self._ids, **part)
        # They share one record, so the way from one to the next is 0 bytes.
        return EncodedRun(plan.topic, queue, data, [0] * (run.stop - run.start), unique)

    def _record_properties(self, run: PlannedRun) -> dict[str, str]:
        """What the record itself has: an id, and the tag of its messages if that is one, for the node's tag filter."""
        tag = self._plan.common_tag(run)
        return {Property.UNIQUE_KEY: self._ids.next(), **({Property.TAGS: tag} if tag else {})}

    def _take_answer(self) -> None:
        """The next answer; a refusal or a loss becomes the batch's problem, and no further run is sent."""
        channel = self._core.channel
        assert channel is not None
        deadline = self._deadline()
        try:
            while True:
                answer = wire.parse_answer(channel.wait(deadline))
                identity = answer.get("id")
                if identity is None or identity in self._flying:
                    break
        except ConnectionLost as error:
            self._core.disconnect()
            self._lose(unknown(error.message))
            return
        except ProtocolError as error:
            self._core.disconnect()
            self._lose(unknown(error.message, error.code))
            return
        except BaseException:
            # Interrupted: answers on their way must not meet a later request.
            self._core.disconnect()
            raise
        if identity is None:
            self._core.disconnect()
            self._lose(unknown(str(answer.get("error")), str(answer.get("code"))))
            return
        self._answered(identity, answer)

    def _answered(self, identity: int, answer: dict[str, Any]) -> None:
        number, run = self._flying.pop(identity)
        if answer["ok"]:
            self._acks[number] = run.acknowledged(self._ack, answer)
            self._stored += run.count
            return
        refusal = wire.send_refusal(answer)
        self._problem = self._problem or refusal
        self._refused(number, refusal)
        if refusal.outcome is Outcome.STORED:
            self._stored += run.count
            if "queue_offset" in answer:
                self._acks[number] = run.acknowledged("memory", answer)
        elif refusal.outcome is Outcome.UNKNOWN:
            self._unknown += run.count
        self._core.routes.forget(self._plan.topic)

    def _refused(self, number: int, refusal: SendError) -> None:
        """Run ``number`` was not acknowledged, but answered."""

    def _lose(self, error: SendError) -> None:
        self._unknown += sum(run.count for _, run in self._flying.values())
        self._flying.clear()
        self._problem = self._problem or error

    def _order(self) -> list[tuple[int, int]] | None:
        """(run, index within it) of each message of the caller, where sharding sorted them; else None."""
        places = self._plan.order
        if places is None:
            return None
        order: list[tuple[int, int]] = [(0, 0)] * len(places)
        for number, run in enumerate(self._planned):
            for within, at in enumerate(range(run.start, run.stop)):
                order[places[at]] = (number, within)
        return order

    def _error(self, problem: SendError) -> BatchSendError:
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
