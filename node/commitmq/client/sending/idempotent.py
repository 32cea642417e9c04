"""Idempotent sending: messages are numbered, so that one whose fate is not known can simply be sent again.

Each message gets the next sequence of its queue (:mod:`commitmq.store.producers.producer_table`). The node stores each once
and answers a repetition with where it lies. So a run whose answer did not come is not failed as *unknown*: it is repeated
on the next connection, with the same numbers and the same bytes, until it is answered or the time of its messages is over.

While something is being repeated nothing new is sent, because the node takes a queue's numbers in their order:

    lost       runs in flight when the connection ended; repeated one by one, in the order in which they were first sent
    refused    certainly not stored, and with them what came behind them in the same queue: their numbers are a gap

A gap is closed when nothing is in flight any more. A producer that made its own id leaves it behind with a new epoch, in
which every queue begins at 0: also where a run's fate stayed unknown, because the node refuses the old epoch from then on,
so that nothing of it can come in late. A producer whose id was given must not do that, because another attempt with the
same id and epoch counts on the numbers: it uses the free ones again, and where the fate of some is not known, or the node
does not agree about them, it refuses every further send and has to be made anew.
"""

from __future__ import annotations

import secrets
import time
from bisect import insort
from collections import deque
from typing import Any, Final

import orjson

from commitmq.client.routes import not_stored, unknown
from commitmq.client.sending.run_encoder import encode_messages
from commitmq.client.sending.send_core import LEAST_WINDOW, InFlight, SendCore
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import NodeUnavailableError, Outcome, SendError
from commitmq.format.producer_mark import MAX_EPOCH, MAX_ID_CHARACTERS, is_producer_id, mark_prefix
from commitmq.protocol import wire
from commitmq.protocol.connection import Channel
from commitmq.store.log.unique_ids import UniqueIds

FENCED: Final = "PRODUCER_FENCED"
OUT_OF_ORDER: Final = "OUT_OF_ORDER_SEQUENCE"
UNKNOWN_PRODUCER: Final = "UNKNOWN_PRODUCER_ID"
# A repetition refused with one of these may do better a moment later; what it repeats may be stored all the same.
LATER: Final = frozenset(("SERVICE_NOT_AVAILABLE", "SYSTEM_BUSY", "CREATE_MAPPED_FILE_FAILED", "NODE_UNAVAILABLE"))
PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0


class Sequences:
    """The numbers of one producer. Used by the owner of the connection only."""

    def __init__(self, producer_id: str | None, epoch: int) -> None:
        """Without an id the producer makes its own. Raises ValueError."""
        if producer_id is not None and not is_producer_id(producer_id):
            raise ValueError(
                f"producer_id must be 1 to {MAX_ID_CHARACTERS} letters, digits and ._-/@+=, not {producer_id!r}"
            )
        if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH:
            raise ValueError(f"producer_epoch must be an integer from 0 to {MAX_EPOCH}, not {epoch!r}")
        self.is_own = producer_id is None
        self.producer_id = producer_id or secrets.token_urlsafe(12)
        self.epoch = epoch
        self.problem: SendError | None = None
        self._next: dict[tuple[str, int], int] = {}

    @property
    def mark(self) -> bytes:
        """What records carry, without the sequence."""
        return mark_prefix(self.producer_id, self.epoch)

    def take(self, topic: str, queue: int, count: int) -> int:
        """The first of ``count`` sequences for messages to a queue."""
        first = self._next.get((topic, queue), 0)
        self._next[topic, queue] = first + count
        return first

    def rewind(self, topic: str, queue: int, first: int) -> None:
        """Sequences from ``first`` on are not stored: they are given out again."""
        self._next[topic, queue] = min(first, self._next.get((topic, queue), 0))

    def new_epoch(self) -> None:
        """All queues begin at 0; nothing of the old epoch may be in flight."""
        self.epoch += 1
        self._next.clear()

    def check(self) -> None:
        """Raise SendError (not stored) when this producer can send nothing any more."""
        if self.problem is not None:
            raise not_stored(
                self.problem.code,
                f"this idempotent producer cannot go on, make a new one: {self.problem.message}",
            )

    def sign(self, header: dict[str, Any], sequence: int) -> dict[str, Any]:
        """``header`` with the fields of an idempotent send."""
        header.update(producer_id=self.producer_id, producer_epoch=self.epoch, sequence=sequence)
        return header


class NumberedRun(InFlight):
    """A run with its numbers, kept as it was sent."""

    __slots__ = ("data", "fields", "group", "in_doubt", "order", "refused_sequence", "sequence")

    def __init__(
        self,
        group: tuple[str, int, str],
        queue: int,
        futures: list[SendFuture],
        sizes: list[int],
        unique: tuple[bytes, int],
        sequence: int,
        fields: dict[str, Any],
        data: bytes,
        order: int,
    ) -> None:
        """``order``: of the first sending of runs."""
        super().__init__(group[0], queue, group[2], futures, sizes, unique)
        self.group = group
        self.sequence = sequence
        self.fields = fields
        self.data = data
        self.order = order
        self.in_doubt = False  # it was handed over once and not answered
        self.refused_sequence = False  # the node refused its numbers, not its messages


class IdempotentCore(SendCore):
    """The core of an idempotent producer; see the module. It sends to the writer only."""

    def __init__(
        self,
        node: str | None,
        sequences: Sequences,
        *,
        timeout_s: float,
        max_pending: int,
        max_pending_bytes: int,
        linger_s: float = 0.0,
        ids: UniqueIds | None = None,
    ) -> None:
        super().__init__(
            node,
            timeout_s=timeout_s,
            max_pending=max_pending,
            max_pending_bytes=max_pending_bytes,
            linger_s=linger_s,
            ids=ids,
        )
        # What is repeated is told where it lies only while the node remembers that many runs of the queue
        # (producers.window), and repetitions go one by one: more in flight is more to do after the death of a node.
        self.window = LEAST_WINDOW
        self.sequences = sequences
        self.mark = sequences.mark
        self._again: list[NumberedRun] = []  # in the order of their first sending
        self._runs_sent = 0
        self._refused: list[NumberedRun] = []  # certainly not stored, their futures failed or to be sent anew
        self._lost = False  # a run's fate stayed unknown
        self._reason: SendError | None = None
        self._pause_until = 0.0

    # ------------------------------------------------------------ topics of others

    def core_for(self, topic: str, deadline: float) -> SendCore:
        self.sequences.check()
        if self.routes.is_memory(topic, deadline):
            raise _no_memory_topic(topic)
        return self

    def corrected(self, topic: str, error: SendError) -> bool:
        return False

    def is_behind(self, error: SendError) -> bool:
        """Whether a batch of which nothing is stored can be sent once more, with the numbers of a new epoch."""
        behind = error.code in (OUT_OF_ORDER, UNKNOWN_PRODUCER) and error.outcome is Outcome.NOT_STORED
        return behind and self.sequences.is_own

    # ------------------------------------------------------------ epochs

    def new_epoch(self) -> None:
        """Leave what the node does not know, or nobody knows, behind (connection owned, nothing in flight)."""
        self.sequences.new_epoch()
        self.mark = self.sequences.mark
        self._layouts.clear()

    def close_gaps(self, gaps: list[tuple[str, int, int, bool]], *, lost: bool, reason: SendError) -> None:
        """Make sending possible again, or refuse it from now on (connection owned, nothing in flight).

        ``gaps``: (topic, queue, first sequence, whether the node refused the sequence itself) of runs that are certainly not
        stored, in the order in which they were sent. ``lost``: of some run it stayed unknown.
        """
        sequences = self.sequences
        if reason.code == FENCED:
            sequences.problem = reason
        if sequences.is_own:
            self.new_epoch()
            return
        gone: set[tuple[str, int]] = set()
        for topic, queue, first, out_of_order in gaps:
            if out_of_order and (topic, queue) not in gone:
                sequences.problem = sequences.problem or reason
            gone.add((topic, queue))
            sequences.rewind(topic, queue, first)
        if lost:
            sequences.problem = sequences.problem or reason

    # ------------------------------------------------------------ the pump (connection owned)

    def _fill(self) -> None:
        if self._again or self._refused or self._lost:
            if self._flying:
                return
            if self._again:
                self._send_again()
                return
            self._settle_refused()
        self._repeating = False
        if len(self.line) < 2:  # nobody waits for the connection
            super()._fill()

    def _send_run(
        self,
        channel: Channel,
        topic: str,
        queue: int,
        ack: str,
        group: tuple[str, int, str],
        futures: list[SendFuture],
    ) -> None:
        sequences = self.sequences
        if sequences.problem is not None:
            self._fail(futures, self._problem)
            return
        layout = self.layout(topic)
        first = sequences.take(topic, queue, len(futures))
        unique = self.ids.block(len(futures))
        try:
            sizes, data = encode_messages(layout, queue, futures, unique, first)
        except Exception as error:
            sequences.rewind(topic, queue, first)
            reason = f"the messages cannot be encoded: {error!r}"
            self._fail(futures, lambda: not_stored("CLIENT_ERROR", reason))
            return
        fields = {
            "v": wire.PROTOCOL_VERSION,
            "op": "append",
            "topic": topic,
            "queue": queue,
            "count": len(futures),
            "ack": ack,
        }
        self._runs_sent += 1
        sequences.sign(fields, first)
        run = NumberedRun(group, queue, futures, sizes, unique, first, fields, data, self._runs_sent)
        identity = channel.next_id()
        try:
            channel.put([orjson.dumps({**fields, "id": identity}), run.data], time.monotonic() + 0.5)
        except NodeUnavailableError as error:
            # Not taken, so it is nobody's; what was in flight is repeated first.
            sequences.rewind(topic, queue, first)
            self._requeue(run)
            self._lose(error.message)
            return
        self._flying[identity] = run

    def _send_again(self) -> None:
        """Repeat the oldest run that nobody answered; or give it up, when none of its messages has time left."""
        run = self._again[0]
        now = time.monotonic()
        if now >= self._earliest:
            self._expire()
        if not any(one._state == "RUNNING" for one in run.futures):
            del self._again[0]
            self._lost = True
            return
        if now < self._pause_until:
            time.sleep(min(self._pause_until - now, PAUSE_S))
            return
        try:
            channel = self.connected(now + 0.5)
            identity = channel.next_id()
            channel.put([orjson.dumps({**run.fields, "id": identity}), run.data], time.monotonic() + 0.5)
        except (SendError, NodeUnavailableError):
            self.disconnect()
            self._pause_until = time.monotonic() + PAUSE_S
            return
        del self._again[0]
        self._flying[identity] = run

    def _answered(self, run: InFlight, answer: dict[str, Any]) -> None:
        assert isinstance(run, NumberedRun)
        if answer["ok"]:
            super()._answered(run, answer)
            return
        error = wire.send_refusal(answer)
        if error.outcome is Outcome.STORED:
            super()._answered(run, answer)
            return
        self._repeating = True
        if error.outcome is Outcome.UNKNOWN or (run.in_doubt and error.code in LATER):
            run.in_doubt = True
            self._repeat(run)
            pause = PAUSE_S if error.retry_after_ms is None else error.retry_after_ms / 1000
            self._pause_until = time.monotonic() + min(pause, _MAX_PAUSE_S)
            return
        if error.code == OUT_OF_ORDER and any(
            one.topic == run.topic and one.queue == run.queue and one.order < run.order for one in self._again
        ):
            self._repeat(run)  # it is the next once the one before is stored
            return
        self._reason = error
        if error.code == OUT_OF_ORDER or (error.code == UNKNOWN_PRODUCER and not run.in_doubt):
            run.refused_sequence = True
            self._refused.append(run)
            return
        self.routes.forget(run.topic)
        if run.in_doubt:
            # Refused now for another reason; the first time it may have been stored.
            self._lost = True
            self._fail(run.futures, lambda: unknown(error.message, error.code))
        else:
            self._refused.append(run)
            self._fail(run.futures, lambda: wire.send_refusal(answer))

    def _settle_refused(self) -> None:
        """Nothing is in flight: close the gap, and send anew what only came behind it."""
        refused, self._refused = self._refused, []
        lost, self._lost = self._lost, False
        reason, self._reason = self._reason or unknown("no answer in time", "TIMEOUT"), None
        gaps = [(run.topic, run.queue, run.sequence, run.refused_sequence) for run in refused]
        self.close_gaps(gaps, lost=lost, reason=reason)
        for run in reversed(refused):
            if run.refused_sequence:
                if self.sequences.problem is None:
                    self._requeue(run)
                else:
                    self._fail(run.futures, self._problem)

    def _problem(self) -> SendError:
        try:
            self.sequences.check()
        except SendError as error:
            return error
        return not_stored("CLIENT_ERROR", "the producer cannot go on")

    def _requeue(self, run: NumberedRun) -> None:
        """Its messages wait again, before those that came after them."""
        with self.lock:
            waiting = self._groups.setdefault(run.group, deque())
            for one in reversed(run.futures):
                if one._state == "RUNNING":
                    one._state = "PENDING"
                    self._pending_bytes += one.size_bytes
                    self._earliest = min(self._earliest, one.deadline)
                    waiting.appendleft(one)
            if not waiting:
                del self._groups[run.group]

    def _lose(self, sentence: str) -> None:
        self.disconnect()
        flying, self._flying = self._flying, {}
        for run in flying.values():
            assert isinstance(run, NumberedRun)
            run.in_doubt = True
            self._repeat(run)
        self._repeating = bool(self._again or self._refused or self._lost)

    def _repeat(self, run: NumberedRun) -> None:
        insort(self._again, run, key=lambda one: one.order)

    def _give_up(self, sentence: str) -> None:
        self._lose(sentence)
        for run in (*self._again, *self._refused):
            self._fail(run.futures, lambda: unknown(sentence))
        self._lost |= bool(self._again)
        self._again.clear()

    def _expire(self) -> None:
        super()._expire()
        now = time.monotonic()
        for run in self._again:
            late = [one for one in run.futures if one._state == "RUNNING" and one.deadline <= now]
            self._fail(late, lambda: unknown("no answer in time", "TIMEOUT"))
            left = (one.deadline for one in run.futures if one._state == "RUNNING")
            with self.lock:
                self._earliest = min(self._earliest, min(left, default=self._earliest))


def _no_memory_topic(topic: str) -> SendError:
    return not_stored("MESSAGE_ILLEGAL", f"topic {topic!r} is kept in memory: memory topics take no idempotent sends")
