"""transaction: ends transactions, checks those without an end, and gives up on those that nobody ends (spec 12.3).

Owns: no file but its list of what is set aside. Reads: the ConsumeQueues of half and op topic, the CommitLog, topics.
Advances: nothing that others read; the offsets of CID_RMQ_SYS_TRANS at the coordinator. Sockets: ROUTER ``transaction`` (ipc
and tcp) for requests, on which it also asks registered producers; DEALER to the writer and to the coordinator. Exit codes:
workers.runtime.context.ExitCode.

Invariants
    * A transaction has at most one outcome. This process alone decides, and the first end counts.
    * A committed message is in the log once (``transaction.exactly_once``): after a death of this process, of the writer
      or of the node the log is read from the oldest open half message on for what is there already.
    * A rolled-back one never is: the answer to a rollback comes after its op message is flushed.
    * None is lost: a position that passes a half message is written down when its end, its newer copy or its discarded copy
      is flushed.

What grows: a half message that is put back, by its number of checks (:mod:`commitmq.semantics.derived`). The writer takes none
without room for that; one of RocketMQ is asked about where it is (:mod:`commitmq.workers.transaction.checks`).
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from commitmq import failpoints
from commitmq.control import DispatcherWord, Word
from commitmq.coordination import requests
from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import Property
from commitmq.format.message_id import offset_message_id
from commitmq.format.record import Record, encode_record
from commitmq.protocol import wire
from commitmq.security.audit import Actor, Event
from commitmq.semantics.derived import derived
from commitmq.semantics.transaction import (
    CHECK_GROUP,
    COMMIT,
    HALF_TOPIC,
    OP_TOPIC,
    CheckRules,
    OpBuffer,
    op_offsets,
    real_queue,
)
from commitmq.workers.runtime.clocks import DoubtingClock, wall_ms
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.mover import Mover
from commitmq.workers.runtime.request_socket import Operation, RequestSocket
from commitmq.workers.runtime.run_mover import CoordinatorLine, WriterLost
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.transaction.checks import (
    NOBODY_TO_ASK,
    CheckService,
    ProducerManager,
    UnheardGroups,
    groups_of,
    may_be_asked,
    registrant_of,
)
from commitmq.workers.transaction.ends import (
    QUEUE,
    Appends,
    End,
    Ends,
    HalfHead,
    HalfPosition,
    HalfQueues,
    TransactionCounts,
    TransactionTable,
    check_times,
    find_ends,
    find_superseded,
    parse_end,
)

MOST: Final = 256
_READ_AT_ONCE: Final = 1_024
_MAX_OFFSET: Final = (1 << 63) - 1


def list_open(
    header: dict[str, Any], queues: HalfQueues, transactions: TransactionTable, now_ms: int
) -> dict[str, Any]:
    """``transactions`` of one page, oldest first, and ``next``, the half offset where the next page begins (null: none)."""
    limit = requests.limit(header, MOST)
    at = max(transactions.half_offset, requests.optional_integer(header, "after", 0, _MAX_OFFSET) or 0)
    _, high = queues.bounds(HALF_TOPIC)
    behind, halves = queues.heads(HALF_TOPIC, at, _READ_AT_ONCE, lambda offset, _: transactions.is_open(offset))
    shown = halves[:limit]
    following = shown[-1].record.queue_offset + 1 if len(halves) > limit else behind
    is_last = following >= high or behind <= at
    if is_last:  # what a check put back a moment ago is not in the queue yet
        late = [queues.head(place.physical) for place in transactions.put_back_from(high)]
        shown += [half for half in late if half is not None]
    return {
        "transactions": [_described(half, now_ms) for half in shown],
        "next": None if is_last else following,
    }


def _described(head: HalfHead, now_ms: int) -> dict[str, Any]:
    half = head.record
    properties = half.properties
    return {
        "topic": properties.get(Property.REAL_TOPIC, ""),
        "queue": properties.get(Property.REAL_QUEUE_ID, ""),
        "group": properties.get(Property.PRODUCER_GROUP, ""),
        "unique_id": properties.get(Property.UNIQUE_KEY, ""),
        "keys": properties.get(Property.KEYS, ""),
        "tags": properties.get(Property.TAGS, ""),
        "queue_offset": half.queue_offset,
        "physical_offset": half.physical_offset,
        "born": half.born_timestamp,
        "age_ms": now_ms - half.born_timestamp,
        "checks": check_times(half),
        "body_bytes": head.body_bytes,
    }


_ANSWER_S: Final = 1.0


class TransactionPositions:
    """The positions in the half topic and in the op topic: offsets of the group CID_RMQ_SYS_TRANS, as in RocketMQ (spec 12.3).

    ``config/consumerOffset.json`` belongs to the coordinator. This process asks it, as a client does.

    The two offsets at the coordinator.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._line = CoordinatorLine(context, patience_s=_ANSWER_S)

    def fetch(self) -> tuple[int, int] | None:
        """(half offset, op offset), -1 for one that was never committed; None when the coordinator does not answer. The
        topics exist afterwards.
        """
        if self._ask("topic.own") is None:
            return None
        answer = self._ask("offset.fetch", queues=[[HALF_TOPIC, QUEUE], [OP_TOPIC, QUEUE]])
        if answer is None:
            return None
        found = {topic: offset for topic, _, offset in answer["offsets"]}
        return int(found[HALF_TOPIC]), int(found[OP_TOPIC])

    def commit(self, half_offset: int, op_offset: int) -> bool:
        """Commit both. False when the coordinator did not answer: the same call may be repeated."""
        return (
            self._ask("offset.commit", offsets=[[HALF_TOPIC, QUEUE, half_offset], [OP_TOPIC, QUEUE, op_offset]])
            is not None
        )

    def _ask(self, op: str, **fields: Any) -> dict[str, Any] | None:
        """The answer, None without one in time. Raises ProtocolError for a refusal."""
        try:
            return self._line.one({"op": op, "group": CHECK_GROUP, **fields})
        except ProtocolError as error:
            if error.code == "SERVICE_NOT_AVAILABLE":
                return None
            raise

    def close(self) -> None:
        self._line.close()


ROLE = "transaction"
_REQUESTS_A_TURN: Final = 512
_IDLE_MS: Final = 1_000
_LOOK_S: Final = 0.02
_READ: Final = 512
_CHECKED_MARK: Final = Property.TRANSACTION_CHECK_TIMES.encode()


def _by_hand(actor: Actor, header: dict[str, Any]) -> Event:
    """The audit line of an end manually."""
    wanted = {name: header.get(name) for name in ("decision", "queue_offset", "physical_offset")}
    return Event(actor, "transaction.end", request=header["id"], after=wanted)


class TransactionProcess(Mover):
    """The loop's state."""

    def __init__(self, context: WorkerContext) -> None:
        config = self._config = context.config.transaction
        self._appends = Appends(context)
        super().__init__(context, self._appends.way, SetAside(context))
        self._queues = HalfQueues(context)
        self._positions = TransactionPositions(context)
        self._topics = TopicViews(context.layout, context.control)
        self._producers = ProducerManager.of(config)
        hours = context.config.retention.hours
        rules = CheckRules(
            timeout_ms=config.timeout_ms,
            check_max=config.check_max,
            reserved_ms=(hours or 24 * 365 * 100) * 3_600_000,
            interval_ms=config.check_interval_ms,
        )
        self._ends = Ends(self._queues, self._appends, self._topics, config.timeout_ms)
        self._checks = CheckService(
            self._queues, self._appends, self._ends, rules, config.batch_messages, self._ask, self.aside.message
        )
        self._counts = self._ends.counts = TransactionCounts.of(context)
        self._transactions = TransactionTable(0, 0, OpBuffer(0))
        self._written = (-1, -1)
        self._due = ((-1, -1), 0)  # the next positions to write down, and how far the log must be flushed for them
        self._told: tuple[int, ...] = ()
        self._check_at_ms = 0
        self._proven = DoubtingClock()
        operations: dict[str, Operation] = {
            "transaction.end": self._end,
            "transaction.register": self._register,
            "transaction.leave": self._leave,
            "transaction.list": lambda _peer, header: list_open(header, self._queues, self._transactions, wall_ms()),
        }
        self._socket = RequestSocket(context, "the transaction process", operations, requests_a_turn=_REQUESTS_A_TURN)
        self._router, self.endpoints = self._socket.router, self._socket.endpoints
        self._waiting: deque[tuple[bytes, int, End]] = deque()
        self._by_hand: dict[int, Event] = {}  # ends among them, by id()
        self._check_number = 0
        self._unheard = UnheardGroups()

    # ------------------------------------------------------------ begin and resume

    def writer_serves(self) -> bool:
        """Wait for the writer. False when this process shall stop first."""
        return self._appends.writer_serves()

    def resume(self) -> None:
        """Take up the positions, and find in queues and log what is done behind them; not all when this process shall stop."""
        positions = None
        while positions is None:
            self._context.wait(0)
            if self._context.stopping:
                return
            positions = self._positions.fetch()
            if positions is None:
                time.sleep(_LOOK_S)
        if not self._is_dispatched():
            return
        config = self._config
        low, high = self._queues.bounds(HALF_TOPIC)
        ops_low, ops_high = self._queues.bounds(OP_TOPIC)
        buffer = OpBuffer(monotonic_ms(), interval_ms=config.op_interval_ms, max_bytes=config.op_max_bytes)
        transactions = TransactionTable(
            min(max(positions[0], low), high), min(max(positions[1], ops_low), ops_high), buffer
        )
        self._written = positions
        self._due = ((-1, -1), 0)
        self._transactions = self._ends.transactions = self._checks.transactions = transactions
        self._checks.forget()
        at = transactions.op_offset
        while at < ops_high:
            at, ops = self._queues.records(OP_TOPIC, at, _READ)
            for op in ops:
                for offset in op_offsets(op):
                    transactions.note_known_end(offset)
            self._context.heartbeat()
        halves = self._halves(transactions, high)
        for half in halves:
            if check_times(half) and transactions.is_open(half.queue_offset):
                transactions.note_place(half)
        if config.exactly_once:
            self._find(transactions, halves)
        self._check_at_ms = monotonic_ms() + config.check_interval_ms

    def _is_dispatched(self) -> bool:
        """Wait until everything that is written now is in the queues. False when this process shall stop first."""
        end = self._control.get(Word.WRITTEN)
        while self._control.dispatcher(0, DispatcherWord.DISPATCHED) < end or self._control.committed() < end:
            self._context.wait(0)
            if self._context.stopping:
                return False
            time.sleep(_LOOK_S)
        return True

    def _halves(self, transactions: TransactionTable, high: int) -> list[Record]:
        """The open half messages, and all those that were put back; without their bodies, for there may be many."""
        halves: list[Record] = []
        at = transactions.half_offset
        while at < high:
            at, heads = self._queues.heads(
                HALF_TOPIC, at, _READ, lambda offset, data: transactions.is_open(offset) or _CHECKED_MARK in bytes(data)
            )
            halves += [head.record for head in heads]
            self._context.heartbeat()
        return halves

    def _find(self, transactions: TransactionTable, halves: list[Record]) -> None:
        superseded = find_superseded(halves)
        is_open = [
            half for half in halves if half.queue_offset not in superseded and transactions.is_open(half.queue_offset)
        ]
        end = self._control.committed()
        found = find_ends(self._queues.log, is_open, end, self._context.heartbeat)
        by_offset = {half.queue_offset: half for half in halves}
        for offset in sorted(found.committed):
            half = by_offset[offset]
            transactions.note_end(half, HalfPosition(offset, half.physical_offset), int(COMMIT))
        for offset in superseded | (found.discarded - found.committed):
            if transactions.is_open(offset):
                transactions.note_superseded(offset)
        if found.committed or found.discarded or superseded:
            self._context.log.info(
                "found in the log what was done before",
                committed=len(found.committed),
                discarded=len(found.discarded),
                put_back=len(superseded),
            )

    # ------------------------------------------------------------ one turn

    def turn(self) -> None:
        """Do what is due, and sleep until more is. Raises WriterLost."""
        self._context.wait(self._work())

    def _work(self) -> float:
        """Do what is due; returns how long to wait, in ms. Raises WriterLost."""
        self._queues.release()
        if self._topics.is_stale:
            self._topics.reload()
        more = self._socket.serve()
        self._carry_out()
        if self._counts is not None:
            self._counts.open(self._transactions.open_below(self._queues.bounds(HALF_TOPIC)[1]))
        now = wall_ms()
        proven_ms = self._proven.now_ms()
        due_ms = self._transactions.ops.due_in_ms(monotonic_ms())
        if due_ms == 0:
            self._ends.write_ops(now)
            due_ms = self._transactions.ops.due_in_ms(monotonic_ms())
        if not self._checks.is_running and monotonic_ms() >= self._check_at_ms:
            self._check_at_ms = monotonic_ms() + self._config.check_interval_ms
            self._producers.expire(monotonic_ms())
            if self._checks.has_work():
                self._checks.begin(now)
            elif self._unheard.forget():
                self._context.tell(unheard_groups=[])
        if self._checks.is_running:
            self._checks.step(now, proven_ms)
            if self._checks.is_running:
                return 0
            self._due = ((self._transactions.half_offset, self._transactions.op_offset), self._ends.unflushed)
            self._tell()
        self._commit_positions()
        if more:
            return 0
        waits = [_IDLE_MS, max(0, self._check_at_ms - monotonic_ms())]
        return min([*waits, due_ms] if due_ms is not None else waits)

    def _end(self, peer: bytes, header: dict[str, Any]) -> None:
        """It is answered when it was carried out."""
        end = parse_end(header)
        if end.by_person:
            self._by_hand[id(end)] = change = _by_hand(self._router.actor(peer, header), header)
            self._context.audit.change(change)
        self._waiting.append((peer, header["id"], end))

    def _register(self, peer: bytes, header: dict[str, Any]) -> dict[str, Any]:
        self._producers.register(registrant_of(self._router, peer, header), groups_of(header), monotonic_ms())
        return {"session_timeout_ms": self._producers.timeout_ms}

    def _leave(self, peer: bytes, header: dict[str, Any]) -> dict[str, Any]:
        self._producers.leave(peer, requests.optional_text(header, "group"))
        return {}

    def _carry_out(self) -> None:
        """Carry out the ends that wait, and answer them. Raises WriterLost: they wait on."""
        if not self._waiting:
            return
        self._ends.carry_out([end for _, _, end in self._waiting if not end.is_answered], wall_ms())
        if failpoints.ACTIVE:
            failpoints.hit("transaction.before_answer")
        while self._waiting:
            peer, identity, end = self._waiting.popleft()
            change = self._by_hand.pop(id(end), None)
            if end.error is not None:
                answer = wire.refused(identity, end.error)
                if change is not None:
                    self._context.audit.failed(change, end.error.message)
            else:
                answer = wire.ok(identity, **(end.fields or {}))
            self._router.send_multipart([peer, answer])

    # ------------------------------------------------------------ checks

    def _ask(self, half: Record, place: HalfPosition) -> None:
        """Ask a live producer of the group of ``half``, which is now at ``place``. Nobody answers: the next round asks."""
        router = self._router
        try:
            topic, queue = real_queue(half)
        except InvalidMessageError as error:  # of a foreign store: nobody can end it either
            self.aside.message(half, str(error))
            return
        group = half.properties.get(Property.PRODUCER_GROUP, "")
        peer = self._producers.pick(group, monotonic_ms(), lambda who: may_be_asked(router, who, topic))
        if peer is None:
            if self._unheard.note(group):
                unique_id = half.properties.get(Property.UNIQUE_KEY, "")
                self._context.log.warning(NOBODY_TO_ASK, group=group, unique_id=unique_id)
                self._context.tell(unheard_groups=self._unheard.shown)
            return
        if self._unheard.forget(group):
            self._context.tell(unheard_groups=self._unheard.shown)
        network = self._context.config.network
        self._check_number += 1
        header = wire.pack(
            {
                "op": "transaction.check",
                "id": self._check_number,
                "group": group,
                "queue_offset": place.offset,
                "physical_offset": place.physical,
                "unique_id": half.properties.get(Property.UNIQUE_KEY, ""),
                "offset_msg_id": offset_message_id(network.store_host, network.store_port, place.physical),
            }
        )
        message = derived(half, topic, queue, half.properties)
        message.queue_offset, message.physical_offset = place.offset, place.physical
        message.store_host = self._appends.host
        router.send_multipart([peer, header, encode_record(message, buckets=None)])

    def _commit_positions(self) -> None:
        """Tell the coordinator how far both queues are dealt with, when that is flushed."""
        now, end = self._due
        if now == self._written or now in ((0, 0), (-1, -1)) or self._control.get(Word.FLUSHED) < end:
            return
        self._due = ((-1, -1), 0)  # after a failure the next round commits
        try:
            if not self._positions.commit(*now):
                return
        except ProtocolError as error:
            self._context.log.error("the positions of transactions cannot be committed", error=str(error))
            return
        self._written = now
        if failpoints.ACTIVE:
            failpoints.hit("transaction.after_positions")

    def _tell(self) -> None:
        counts = (self._ends.committed, self._ends.rolled_back, self._checks.checked, self._checks.discarded)
        if counts != self._told:
            self._told = counts
            names = ("committed", "rolled_back", "checked", "discarded")
            self._context.tell(**dict(zip(names, counts, strict=True)), producers=len(self._producers))

    def close(self, *, lost: bool) -> None:
        """Write the last op messages and positions, if the writer still takes them."""
        del lost  # (the transactions is as it was when the writer was lost)
        try:
            if self._appends.writer_lives and self._transactions.ops.due_in_ms(monotonic_ms()) is not None:
                self._ends.write_ops(wall_ms())
        except WriterLost:
            pass  # the next start finds the ends in the log
        self._commit_positions()
        self._appends.close()
        self._positions.close()
        self._queues.close()


def run(context: WorkerContext) -> None:
    """The loop: what is due, then sleep until something is."""
    transactions = TransactionProcess(context)
    context.ready(endpoints=transactions.endpoints)
    transactions.serve()
