"""Delivery policies: they decide about a run that the node refuses, or that gets no answer.

:class:`AtMostOnce` fails such a run, as not stored or with an unknown outcome. It sends the messages again that a busy
node refused (:mod:`commitmq.client.sending.delivery`).

:class:`IdempotentDelivery` is idempotent sending: each message gets the next sequence of its queue
(:mod:`commitmq.store.producers`). The node stores each once and answers a repetition with its place. So a
run without an answer is repeated on the next connection, with the same numbers and the same bytes, until it is answered
or the time of its messages is over.

The node takes a queue's numbers in their order, so the producer sends no new run while it repeats runs. It keeps two
lists:

    again      runs in flight when the connection ended; repeated one by one, in the order of their first sending
    refused    runs that are not stored, and runs behind them in the same queue: their numbers are a gap

The producer closes a gap when nothing is in flight any more. A producer with an id of its own begins a new epoch, in
which every queue begins at 0. It does so too where the outcome of a run stayed unknown: the node refuses the old epoch
from then on, so no run of it can come in late. A producer with a given id must not begin an epoch, because another
attempt with the same id and epoch relies on the numbers. It uses the free numbers again. Where the outcome of a run is
unknown, or the node does not agree with the numbers, it refuses every further send, and the program has to make a new
producer.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from commitmq.client.routes import Routes, not_stored, unknown
from commitmq.client.sending.line import Line
from commitmq.client.sending.run import NEVER_S, MakeError, SendRun
from commitmq.errors import NodeUnavailableError, Outcome, SendError
from commitmq.format.producer_mark import MAX_EPOCH, MAX_ID_CHARACTERS, is_producer_id, mark_prefix
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel

MAX_REST_S: Final = 1.0
_SLEEP_S: Final = 0.05
_TRY_S: Final = 0.2
_BUSY: Final = "SYSTEM_BUSY"


def is_busy(answer: dict[str, Any]) -> bool:
    """Whether a refusal is that of a busy node, which names the time to wait."""
    return (
        answer.get("code") == _BUSY
        and answer.get("outcome") == "not_stored"
        and type(answer.get("retry_after_ms")) is int
    )


def rest_s(answer: dict[str, Any]) -> float:
    """How long to rest after the refusal ``answer``."""
    return min(max(int(answer["retry_after_ms"]) / 1000, 0.0), MAX_REST_S)


class BusyRuns:
    """Runs that a busy node refused: not stored, and with the time after which the node may take them.

    The producer rests, and then sends their messages again, within their own time. It keeps the order of a queue: while
    earlier runs are in flight no new one goes, and a run that a later run of its queue has overtaken fails with its
    refusal. A message without the time for another try fails at once, so its outcome is certain. The rest is that of
    the whole lane, at most MAX_REST_S at once, so other topics of the producer wait with the busy one.

    Used by the owner of the connection only.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.error: SendError | None = None
        """Why the lane rests; None while it does not."""
        self._until = 0.0
        self._held: list[tuple[SendRun, SendError]] = []
        self._passed: set[tuple[str, int]] = set()
        self._clock, self._sleep = clock, sleep

    @property
    def left_s(self) -> float:
        """The time that a message needs at least from now on to be sent again and answered."""
        return max(0.0, self._until - self._clock()) + _TRY_S

    def note(self, answer: dict[str, Any]) -> SendError:
        """The node has refused a message; the lane rests."""
        error = self.error = wire.send_refusal(answer)
        self._until = max(self._until, self._clock() + rest_s(answer))
        return error

    def hold(self, run: SendRun, answer: dict[str, Any], *, alone: bool) -> None:
        """The node has refused ``run``. With ``alone`` nothing else is in flight, so its messages wait again at once."""
        self._held.append((run, self.note(answer)))
        if alone:
            self._let_go()

    def passed(self, run: SendRun) -> None:
        """The node has stored ``run`` while others are held."""
        self._passed.add((run.topic, run.queue))

    def is_over(self, *, in_flight: bool) -> bool:
        """Whether the lane may send; rests a moment where it may not, so that a loop may ask without a pause."""
        if in_flight:
            return False
        self._let_go()
        left_s = self._until - self._clock()
        if left_s > 0:
            self._sleep(min(left_s, _SLEEP_S))
            return False
        self.error = None
        return True

    def fail(self) -> None:
        """Fail the runs that are held, with their refusals."""
        held, self._held = self._held, []
        for run, error in held:
            run.failed(lambda error=error: error)  # type: ignore[misc]

    def expire(self, now: float) -> float:
        """Fail held messages that timed out; returns the next deadline."""
        ends = [run.expire(now, lambda error=error: error) for run, error in self._held]  # type: ignore[misc]
        return min(ends, default=NEVER_S)

    def _let_go(self) -> None:
        """Nothing is in flight: the messages of held runs wait again, in their order, or fail where others overtook them."""
        held, self._held = self._held, []
        passed, self._passed = self._passed, set()
        for run, error in reversed(held):
            if run.queue >= 0 and (run.topic, run.queue) in passed:
                run.failed(lambda error=error: error)  # type: ignore[misc]
            else:
                run.give_back()


WINDOW: Final = 16
LEAST_WINDOW: Final = 4
FENCED: Final = "PRODUCER_FENCED"
OUT_OF_ORDER: Final = "OUT_OF_ORDER_SEQUENCE"
UNKNOWN_PRODUCER: Final = "UNKNOWN_PRODUCER_ID"
# A repetition that is refused with one of these codes may succeed a moment later. The repeated run may be stored anyway.
LATER: Final = frozenset(("SERVICE_NOT_AVAILABLE", "SYSTEM_BUSY", "CREATE_MAPPED_FILE_FAILED", "NODE_UNAVAILABLE"))
PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0


class LaneProtocol(Protocol):
    """The part of a lane that a policy uses."""

    routes: Routes
    line: Line
    flying: dict[int, SendRun]

    @property
    def gives_back(self) -> bool: ...
    def connect(self, deadline: float) -> Channel: ...
    def put(self, channel: Channel, run: SendRun) -> None: ...
    def disconnect(self) -> None: ...
    def forget_layouts(self) -> None: ...
    def refuse(self, run: SendRun, answer: dict[str, Any]) -> None: ...


def no_answer() -> SendError:
    """The error of a run that timed out and whose outcome is unknown."""
    return unknown("no answer in time", "TIMEOUT")


class AtMostOnce:
    """Each run is passed on once. All methods belong to the owner of the connection."""

    window = WINDOW
    mark = b""
    in_submission_order = False
    """Whether single messages and batches leave in the order of the calls."""

    def __init__(self) -> None:
        self.busy = BusyRuns()

    @property
    def is_repeating(self) -> bool:
        """Whether runs are sent again, and no new one until they are answered."""
        return False

    @contextlib.contextmanager
    def numbered(self, topic: str, queue: int, fields: dict[str, Any]) -> Iterator[int]:
        """Number the ``fields["count"]`` messages of a run, and sign its header; yields the first number.

        The numbers are free again when the block raises. Raises SendError (not stored) when this producer cannot
        continue.
        """
        yield 0

    def may_send(self, lane: LaneProtocol) -> bool:
        """Whether new runs may go now. First repeats the runs that have to be repeated before."""
        return self.busy.error is None or self.busy.is_over(in_flight=bool(lane.flying))

    def handed_over(self, run: SendRun) -> None:
        """The connection took ``run``."""

    def not_taken(self, run: SendRun) -> None:
        """The connection did not take ``run``."""
        run.give_back()

    def refused(self, lane: LaneProtocol, run: SendRun, answer: dict[str, Any]) -> None:
        """The node has refused ``run``. Where it is busy, a run without a queue goes to another node, if there is one."""
        if is_busy(answer) and not (run.is_free and lane.gives_back):
            self.busy.hold(run, answer, alone=not lane.flying)
        else:
            lane.refuse(run, answer)

    def lost(self, runs: list[SendRun], sentence: str) -> None:
        """The connection that took these runs will bring no answer to them."""
        for run in runs:
            run.failed(lambda: unknown(sentence))

    def give_up(self, runs: list[SendRun], sentence: str) -> None:
        """As :meth:`lost`, but no run is repeated."""
        self.lost(runs, sentence)
        self.busy.fail()

    def expire(self, now: float) -> float:
        """Fail the messages of runs not in flight that timed out; returns the next deadline."""
        return self.busy.expire(now)


class Sequences:
    """The numbers of one producer. Used by the owner of the connection only."""

    def __init__(self, producer_id: str | None, epoch: int) -> None:
        """With ``producer_id`` None the producer makes an id of its own. Raises ValueError."""
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
        """The part of each record's mark before the sequence."""
        return mark_prefix(self.producer_id, self.epoch)

    def take(self, topic: str, queue: int, count: int) -> int:
        """The first of ``count`` sequences for messages to a queue."""
        first = self._next.get((topic, queue), 0)
        self._next[topic, queue] = first + count
        return first

    def rewind(self, topic: str, queue: int, first: int) -> None:
        """Sequences from ``first`` on are not stored: :meth:`take` returns them again."""
        self._next[topic, queue] = min(first, self._next.get((topic, queue), 0))

    def new_epoch(self) -> None:
        """Begin the next epoch, with 0 in all queues. No run of the old epoch may be in flight."""
        self.epoch += 1
        self._next.clear()

    def check(self) -> None:
        """Raise SendError (not stored) when this producer can send nothing any more."""
        if self.problem is not None:
            raise not_stored(
                self.problem.code,
                f"this idempotent producer cannot continue, make a new one: {self.problem.message}",
            )


class IdempotentDelivery(AtMostOnce):
    """Idempotent sending; see the module."""

    # The node names the place of a repeated run only while it remembers that many runs of the queue (producers.window).
    # Repetitions go one by one, so more runs in flight mean more work after the death of a node.
    window = LEAST_WINDOW
    in_submission_order = True

    def __init__(self, sequences: Sequences) -> None:
        super().__init__()
        self.sequences = sequences
        self._again: list[SendRun] = []  # in the order of their first sending
        self._refused: list[SendRun] = []  # not stored, failed or to be sent again
        self._is_lost = False  # a run's fate stayed unknown
        self._is_repeating = False
        self._reason: SendError | None = None
        self._busy_error: SendError | None = None
        self._runs_sent = 0
        self._pause_until = 0.0

    @property
    def mark(self) -> bytes:  # type: ignore[override]
        return self.sequences.mark

    @property
    def is_repeating(self) -> bool:
        return self._is_repeating

    @contextlib.contextmanager
    def numbered(self, topic: str, queue: int, fields: dict[str, Any]) -> Iterator[int]:
        sequences = self.sequences
        sequences.check()
        first = sequences.take(topic, queue, fields["count"])
        fields.update(producer_id=sequences.producer_id, producer_epoch=sequences.epoch, sequence=first)
        try:
            yield first
        except BaseException:
            sequences.rewind(topic, queue, first)
            raise

    def may_send(self, lane: LaneProtocol) -> bool:
        if self._again or self._refused or self._is_lost:
            if lane.flying:
                return False
            if self._again:
                self._send_again(lane)
                return False
            self._close_gap(lane)
        self._is_repeating = False
        return len(lane.line) < 2  # another thread waits for the connection

    def handed_over(self, run: SendRun) -> None:
        if not run.order:
            self._runs_sent += 1
            run.order = self._runs_sent

    def not_taken(self, run: SendRun) -> None:
        assert run.sequence is not None
        self.sequences.rewind(run.topic, run.queue, run.sequence)
        run.give_back()

    def refused(self, lane: LaneProtocol, run: SendRun, answer: dict[str, Any]) -> None:
        error = wire.send_refusal(answer)
        if error.outcome is Outcome.STORED:
            lane.refuse(run, answer)
            return
        self._is_repeating = True
        if error.outcome is Outcome.UNKNOWN or (run.in_doubt and error.code in LATER):
            run.in_doubt = True
            self._repeat(run)
            pause_s = PAUSE_S if error.retry_after_ms is None else error.retry_after_ms / 1000
            self._pause_until = time.monotonic() + min(pause_s, _MAX_PAUSE_S)
            return
        if is_busy(answer) and not run.in_doubt:
            self._busy_error = error  # not stored: the same numbers go again after a rest
            self._repeat(run)
            self._pause_until = time.monotonic() + rest_s(answer)
            return
        if error.code == OUT_OF_ORDER and any(
            one.topic == run.topic and one.queue == run.queue and one.order < run.order for one in self._again
        ):
            self._repeat(run)  # its turn comes once the run before it is stored
            return
        self._reason = error
        if error.code == OUT_OF_ORDER or (error.code == UNKNOWN_PRODUCER and not run.in_doubt):
            run.refused_sequence = True
            self._refused.append(run)
            return
        lane.routes.forget(run.topic)
        if run.in_doubt:
            # This repetition was refused for another reason; the first sending may have been stored.
            self._is_lost = True
            run.failed(lambda: unknown(error.message, error.code))
        else:
            self._refused.append(run)
            run.failed(lambda: wire.send_refusal(answer), answer)

    def lost(self, runs: list[SendRun], sentence: str) -> None:
        for run in runs:
            run.in_doubt = True
            self._repeat(run)
        self._is_repeating = bool(self._again or self._refused or self._is_lost)

    def give_up(self, runs: list[SendRun], sentence: str) -> None:
        self.lost(runs, sentence)
        for run in (*self._again, *self._refused):
            run.failed(lambda: unknown(sentence))
        self._is_lost |= bool(self._again)
        self._again.clear()

    def expire(self, now: float) -> float:
        return min([run.expire(now, self._too_late(run)) for run in self._again], default=NEVER_S)

    # ------------------------------------------------------------ steps

    def _repeat(self, run: SendRun) -> None:
        insort(self._again, run, key=lambda one: one.order)

    def _too_late(self, run: SendRun) -> MakeError:
        """The error of a run that timed out: its outcome is unknown, or a busy node refused it all the time."""
        error = self._busy_error
        return no_answer if run.in_doubt or error is None else lambda: error

    def _send_again(self, lane: LaneProtocol) -> None:
        """Repeat the oldest run without an answer, or give it up when all its messages have their outcome."""
        run = self._again[0]
        now = time.monotonic()
        if run.expire(now, self._too_late(run)) == NEVER_S:
            del self._again[0]
            if run.in_doubt:
                self._is_lost = True
            else:
                self._reason = self._busy_error
                self._refused.append(run)
            return
        if now < self._pause_until:
            time.sleep(min(self._pause_until - now, PAUSE_S))
            return
        try:
            channel = lane.connect(now + 0.5)
            lane.put(channel, run)
        except (SendError, NodeUnavailableError):
            lane.disconnect()
            self._pause_until = time.monotonic() + PAUSE_S
            return
        del self._again[0]

    def _close_gap(self, lane: LaneProtocol) -> None:
        """Close the gap: allow sends again, or refuse them permanently. Send runs behind the gap again. (Nothing is in
        flight.)
        """
        refused, self._refused = self._refused, []
        lost, self._is_lost = self._is_lost, False
        reason, self._reason = self._reason or no_answer(), None
        sequences = self.sequences
        if reason.code == FENCED:
            sequences.problem = reason
        if sequences.is_own:
            sequences.new_epoch()
            lane.forget_layouts()
        else:
            self._rewind(refused, lost, reason)
        for run in reversed(refused):
            if run.refused_sequence:
                if sequences.problem is None:
                    run.give_back()
                else:
                    run.failed(self._problem)

    def _rewind(self, refused: list[SendRun], lost: bool, reason: SendError) -> None:
        """Use the numbers of ``refused`` again. These runs are in the order of their sending."""
        sequences = self.sequences
        gone: set[tuple[str, int]] = set()
        for run in refused:
            if run.refused_sequence and (run.topic, run.queue) not in gone:
                sequences.problem = sequences.problem or reason
            gone.add((run.topic, run.queue))
            assert run.sequence is not None
            sequences.rewind(run.topic, run.queue, run.sequence)
        if lost:
            sequences.problem = sequences.problem or reason

    def _problem(self) -> SendError:
        try:
            self.sequences.check()
        except SendError as error:
            return error
        return not_stored("CLIENT_ERROR", "the producer cannot continue")
