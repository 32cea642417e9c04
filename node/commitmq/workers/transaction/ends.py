"""Ends transactions: the commit or rollback that a producer, its answer to a check or a person asks for (spec 12.3).

The ends of one turn are carried out together, with the ack that their producers want: a commit waits for the device unless all
of the turn want the ack ``memory``. A committed message is appended first; the op message that says so may come
some seconds later, because the committed message itself names its half message. A rollback has no other trace than its op
message, so that is appended before the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from commitmq.coordination import requests
from commitmq.errors import ProtocolError
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics import delay, timer
from commitmq.semantics.derived import broker_order, derived
from commitmq.semantics.transaction import (
    COMMIT,
    ROLLBACK,
    EndTransaction,
    check_end,
    committed_record,
    op_record,
    real_queue,
)
from commitmq.workers.runtime.context import monotonic_ms
from commitmq.workers.runtime.isolation import is_of_message
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.transaction.appends import MOST_BYTES, Append, Appends
from commitmq.workers.transaction.half_queues import HalfQueues
from commitmq.workers.transaction.ledger import PASSED, Ledger, Place
from commitmq.workers.transaction.transaction_counts import TransactionCounts

DECISIONS: Final = {"commit": int(COMMIT), "rollback": int(ROLLBACK)}
NAMES: Final = {value: name for name, value in DECISIONS.items()}
_MOST: Final = (1 << 63) - 1
_RETRY_MS: Final = 200


class EndedError(ProtocolError):
    """The transaction has another end already. ``decision`` is that end, None when it is not known any more."""

    def __init__(self, why: str, decision: str | None) -> None:
        super().__init__("TRANSACTION_ENDED", f"the transaction cannot be ended again: {why}")
        self.decision = decision


@dataclass(slots=True)
class End:
    """A request to end a transaction, and afterwards its answer: fields, or an error."""

    request: EndTransaction
    by_person: bool
    ack: str
    fields: dict[str, Any] | None = None
    error: ProtocolError | None = None

    @property
    def is_answered(self) -> bool:
        return self.fields is not None or self.error is not None


def parse_end(header: dict[str, Any]) -> End:
    """The request of a header. Raises ProtocolError."""
    decision = header.get("decision")
    if decision not in DECISIONS:
        raise requests.refuse("decision", "commit or rollback", decision)
    ack = header.get("ack", "flushed")
    if ack not in ("memory", "flushed"):
        raise requests.refuse("ack", "memory or flushed", ack)
    by_person = requests.flag(header, "by_person")
    group = "" if by_person else requests.text(header, "group")
    return End(
        EndTransaction(
            group,
            requests.integer(header, "queue_offset", 0, _MOST),
            requests.integer(header, "physical_offset", 0, _MOST),
            DECISIONS[decision],
            requests.flag(header, "from_check"),
            requests.text(header, "topic") if header.get("topic") is not None else "",
        ),
        by_person,
        ack,
    )


@dataclass(slots=True)
class _Wanted:
    """A commit of this turn: its half message, where its transaction is now, and who asked."""

    half: Record
    place: Place
    append: Append
    asked: list[End]


class Ends:
    """Carries ends out. ``ledger`` is set by the owner when it has resumed."""

    ledger: Ledger

    def __init__(self, queues: HalfQueues, appends: Appends, topics: TopicViews, timeout_ms: int) -> None:
        self._queues, self._appends, self._topics = queues, appends, topics
        self._timeout_ms = timeout_ms
        self.committed = self.rolled_back = 0
        self.unflushed = 0
        """Commits whose ack did not wait for the device lie below this position of the log."""
        self.counts: TransactionCounts | None = None

    def carry_out(self, ends: Sequence[End], now_ms: int) -> None:
        """End the transactions; afterwards each of ``ends`` has its answer. Raises WriterLost: then the same call comes
        again, after a look into the log.
        """
        wanted: dict[int, _Wanted] = {}
        size = 0
        for end in ends:
            if size >= MOST_BYTES:
                self._commit(wanted)
                size = 0
            try:
                size += self._begin(end, now_ms, wanted)
            except ProtocolError as error:
                end.error = error
            except Exception as error:
                if not is_of_message(error):
                    raise
                end.error = ProtocolError("SYSTEM_ERROR", str(error) or repr(error))
        self._commit(wanted)
        failed = self.write_ops(now_ms) if self.ledger.has_rollback else None
        for end in ends:
            if end.is_answered:
                continue
            if failed is None:  # a rollback, now in the log
                end.fields = {"decision": NAMES[end.request.decision]}
            else:
                end.error = ProtocolError(failed.code, failed.sentence, retry_after_ms=_RETRY_MS)

    def _commit(self, wanted: dict[int, _Wanted]) -> None:
        """Append and settle the commits of ``wanted``, which is empty afterwards. Raises WriterLost."""
        if wanted:
            waits = any(end.ack != "memory" for one in wanted.values() for end in one.asked)
            self._appends.put("commit", [one.append for one in wanted.values()], "flushed" if waits else "memory")
            if not waits:
                ends = (one.append.place.physical + 1 for one in wanted.values() if one.append.place is not None)
                self.unflushed = max(self.unflushed, *ends, 0)
        for one in wanted.values():
            self._settle(one)
        wanted.clear()

    def write_ops(self, now_ms: int) -> Append | None:
        """Append the op messages of all ends so far; returns the one that was refused. Raises WriterLost."""
        buffer = self.ledger.ops
        while taken := buffer.take(monotonic_ms()):
            append = Append(op_record(taken, 0, now_ms, self._appends.host))
            self._appends.put("op", [append])
            if append.place is None:
                for offset in taken:
                    buffer.add(offset)  # later, with the next ones
                return append
        self.ledger.has_rollback = False
        return None

    def is_gone(self, half: Record, place: Place) -> bool:
        """Whether the real topic of ``half`` was deleted since: then its transaction has ended with its topic."""
        return self._topics.tombstone(half.properties.get(Property.REAL_TOPIC, "")) > place.physical

    def _begin(self, end: End, now_ms: int, wanted: dict[int, _Wanted]) -> int:
        """Judge one end: answer it, note a rollback, or add it to ``wanted``; returns the bytes of its body then.

        Raises ProtocolError, InvalidMessageError.
        """
        request = end.request
        half = self._queues.record(request.physical_offset)
        if end.by_person and half is not None:
            group = half.properties.get(Property.PRODUCER_GROUP, "")
            request = request._replace(producer_group=group, from_check=True)
        refusal = check_end(request, half, now_ms, self._timeout_ms)
        if refusal is not None:
            raise ProtocolError(refusal.code, refusal.remark)
        assert half is not None
        place = self.ledger.newest(half)
        if place is None:
            self._answer_ended(end, half)
            return 0
        former = wanted.get(place.offset)
        if former is not None:
            if request.decision != COMMIT:
                raise EndedError("it is being committed", "commit")
            former.asked.append(end)
            return 0
        if self.is_gone(half, place):
            self.ledger.note_end(half, place, int(ROLLBACK))
            raise ProtocolError(
                "TOPIC_NOT_EXIST",
                f"topic {half.properties[Property.REAL_TOPIC]!r} was deleted; the transaction is rolled back",
            )
        if request.decision == ROLLBACK:
            self.ledger.note_end(half, place, int(ROLLBACK))
            self.rolled_back += 1
            if self.counts is not None:
                self.counts.rolled_back(half)
            return 0
        real_queue(half)
        wanted[place.offset] = _Wanted(half, place, Append(placed_commit(half)), [end])
        return len(half.body)

    def _answer_ended(self, end: End, half: Record) -> None:
        """The transaction has ended before, or was given up. The same end again is in order."""
        outcome = self.ledger.outcome(half)
        known = NAMES.get(outcome) if outcome is not None else None
        if known is not None and outcome == end.request.decision:
            if outcome == ROLLBACK and self.ledger.has_rollback:
                return  # it is answered when its op message is in the log
            end.fields = {"decision": known, "before": True}
            return
        what = "was given up" if outcome == PASSED else f"has ended ({known})" if known else "has ended"
        raise EndedError(f"it {what}", known)

    def _settle(self, one: _Wanted) -> None:
        """Note and answer a commit whose append has come to its end."""
        append = one.append
        if append.place is None:
            error = ProtocolError(append.code, append.sentence, retry_after_ms=_RETRY_MS if append.retry else None)
            for end in one.asked:
                end.error = error
            return
        self.ledger.note_end(one.half, one.place, int(COMMIT))
        self.committed += 1
        if self.counts is not None:
            self.counts.committed(one.half)
        topic, queue = real_queue(one.half)
        fields: dict[str, Any] = {
            "decision": "commit",
            "topic": topic,
            "queue": queue,
            "queue_offset": append.place.offset,
            "physical_offset": append.place.physical,
        }
        if append.record.topic != topic:
            fields["stored_topic"] = append.record.topic
        for end in one.asked:
            end.fields = fields


def _timed_commit(half: Record) -> Record | None:
    """The record in the timer topic of a committed ``half`` that asks for a time of delivery to come (spec 12.2)."""
    if not timer.asks_for_timer(half.properties.get(Property.REAL_TOPIC, ""), half.properties):
        return None
    try:
        # Its time was checked when the half message came; it does not become too far away by waiting.
        return timer.timer_request(
            committed_record(half, rewritten=True), time.time_ns() // 1_000_000, timer.TimerRules(max_delay_s=1 << 40)
        )
    except timer.TimerRefusedError:
        return None  # the node refuses such a half message; RocketMQ may have left one


def placed_commit(half: Record) -> Record:
    """The record that a committed ``half`` is stored as: in its real queue, or where it waits (spec 12.3).

    A delay level wins over requests for a time, which are then not stored (spec 12.2).
    """
    try:
        level = delay.parse_level(half.properties.get(Property.DELAY, "0"))
    except ValueError:
        level = 0  # the node refuses such a half message; RocketMQ may have left one
    if not level:
        return _timed_commit(half) or committed_record(half)
    record = committed_record(half, rewritten=True)
    properties = {
        **{name: value for name, value in record.properties.items() if name not in timer.REQUESTS},
        Property.DELAY: str(level),
        Property.REAL_TOPIC: record.topic,
        Property.REAL_QUEUE_ID: str(record.queue_id),
    }
    return derived(
        record,
        delay.SCHEDULE_TOPIC,
        delay.queue_of(level),
        broker_order(properties),
        prepared_transaction_offset=half.physical_offset,
    )
