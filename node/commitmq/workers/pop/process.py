"""pop: the consumers of a group share queues (RocketMQ's POP; spec 12.6, remoting 5).

Owns       ``commitmq/pop.json``, ``config/consumerOrderInfo.json`` and ``commitmq/orders.journal``.
Reads      CommitLog and ConsumeQueues; dispatcher(0, DISPATCHED), the upper bound of what may be delivered; MIN_OFFSET;
the
           topic table.
Advances   nothing; publishes in AWAITED_UNTIL_MS of its slot whether a receive waits here.
Sockets    ROUTER ``pop`` (ipc and tcp) for clients; DEALERs to the writer and to the coordinator; SUB
``queues-changed`` (the
           ConsumeQueue dispatcher: which queues grew) and ``topics`` (the coordinator), which are only hints to look.
Exit       0 after ``stop``: parked receives are answered empty. 74 when topics or segments are unusable.

Invariants
    * A check point is stored before its messages are delivered, an ack before its answer: on the device, or in the log
      of a node that flushes asynchronously. So what a consumer has got comes back after its invisible time, whatever
      dies.
    * A message that came back is acked by this process after its copy is flushed.
    * An invisible time is as long as it was asked for, also when the wall clock is set in the meantime; only a new
      process knows no more than the times in the log, and takes none for longer than it was asked for.
    * Offsets of groups grow behind flushed check points only. After a death the log says more than the offsets: where
      check points end, which of their messages are done, and which came back (:mod:`commitmq.workers.pop.recovery`).

One loop; all requests of a turn share one append (:mod:`commitmq.workers.pop.points`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import orjson
import zmq

from commitmq.control import Word, WorkerWord
from commitmq.errors import ProtocolError, StoreError
from commitmq.semantics.pop import RetryNames
from commitmq.semantics.pop_revive import revive_topic
from commitmq.workers.pop.finder import Finder, OrderedFinder, PopRates
from commitmq.workers.pop.handler import Handler, OrderedHandler
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.points import CLOCK, CheckPoints, Records, Unflushed, now_ms
from commitmq.workers.pop.recovery import ProgressFile, read_points
from commitmq.workers.pop.requests import ParkedPops
from commitmq.workers.pop.revival import InFlight, Revival, ReviveQueues, cluster_of
from commitmq.workers.pop.shares import Share, Shares
from commitmq.workers.reader.filters import Filters
from commitmq.workers.reader.places import ReadableTopics, subscribe
from commitmq.workers.reader.pulls import AnswerSocket
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.mover import Mover
from commitmq.workers.runtime.request_socket import Operation, RequestSocket
from commitmq.workers.runtime.run_mover import CoordinatorLine, MovedBefore, RunMover, WriterLost
from commitmq.workers.runtime.set_aside import SetAside

ROLE = "pop"
_REQUESTS_A_TURN: Final = 256
_CHANGES_A_TURN: Final = 256
_DUE_A_TURN: Final = 500
_IDLE_MS: Final = 500
_SWEEP_MS: Final = 500
_AWAY_MS: Final = 500
_PROGRESS: Final = "pop.json"
_NO_END_MS: Final = 1 << 62


class _Requests(RequestSocket):
    """Those of pop, whose operations answer by themselves; ``guarded`` calls them."""

    guarded: Callable[[bytes, dict[str, Any], Operation], None]

    def _carried_out(self, client: bytes, header: dict[str, Any], operation: Operation) -> None:
        self.guarded(client, header, operation)


class PopProcess(Mover):
    """The loop's state."""

    def __init__(self, context: WorkerContext) -> None:
        self._mover = RunMover(context)
        super().__init__(context, self._mover, SetAside(context))
        config = self._config = context.config
        self._limits, self._rates = config.pop, PopRates(context)
        self._parked = ParkedPops(self._limits.max_parked, RetryNames.of(self._limits))
        self._places = ReadableTopics(context, self._parked.wake_these)
        self._expired = ExpiredSegments(context, self._places.log)
        self._expired.release()
        self._changes = subscribe(context, "queues-changed")
        self._line = CoordinatorLine(context)
        self._cluster, self._revive_queues_count = cluster_of(context.layout, config)
        self._socket = _Requests(context, "pop", {}, requests_a_turn=_REQUESTS_A_TURN)
        self._socket.guarded = self._guarded
        self._router, self.endpoints = self._socket.router, self._socket.endpoints
        self._answers = AnswerSocket(self._router, context.log)
        self._progress = ProgressFile(context.layout, context.log, partial(self._control.get, Word.FLUSHED))
        self._orders = Orders(context.layout, context.log, context.room, config.pop)
        self._filters = Filters(context.params.get("filters", ()), limit=config.filter.max_compiled)
        self._records = Records(config, self._cluster)
        self._ringers = [context.ringer("flush"), context.ringer("reput")]
        self._is_awaited = False
        self._sweep_at_ms = self._commit_at_ms = self._store_at_ms = 0
        self._swept = self._resets = -1
        self._committed_log, self._is_dirty = 0, False
        self._told: tuple[int, int] = (-1, -1)
        self._unflushed = Unflushed(context)
        context.control.put_worker(context.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        self._begin()

    def _begin(self) -> None:
        """State without anything in it."""
        CLOCK.take_up()
        self._points = CheckPoints.of(self._context)
        most, resets = self._limits.max_groups, partial(self._control.get, Word.GROUP_RESETS)
        reads = partial(self._control.get, Word.GROUP_READS)
        revive, names = revive_topic(self._cluster), self._parked.names
        self._shares = Shares(self._line, revive, self._revive_queues_count, most, resets, reads, names)
        self._revival = Revival(self._context, self._places, self._shares, self._records, self._mover, self.aside)
        self._orders.load()
        self._shares.begun_anew = lambda group, key: self._orders.drop(OrderKey(key[0], group, key[1]))
        finder = Finder(self._control, self._places, self._shares, self._points, self._limits.max_bytes, names=names)
        in_order = OrderedFinder(self._control, self._places, self._shares, self._orders, self._limits.max_bytes)
        self._ordered = OrderedHandler(
            in_order, self._orders, self._shares, self._parked, self._revival, self._answers, self._records.broker_name
        )
        self._handler = Handler(
            self._limits, self._revive_queues_count, finder, self._points, self._parked, self._records, self._revival,
            self._answers, self._filters, self._ordered, self._rates,
        )  # fmt: skip
        self._queues = ReviveQueues(self._context, self._places, revive, self._points, self._revival)
        self._socket.operations = {
            "pop": self._handler.pop,
            "ack": self._handler.ack,
            "nack": self._handler.nack,
            "extend": self._handler.extend,
            "blocked": self._ordered.blocked,
            "in_flight": InFlight(self._points, self._orders, self._queues, self._answers).answer,
        }

    # ------------------------------------------------------------ after a start, and after the writer's death

    def resume(self) -> None:
        """Take up what the log and the committed offsets say. Raises WriterLost, or ProtocolError without a coordinator."""
        self._begin()
        end = self._log_end()
        start = self._progress.load()
        floor = self._control.get(Word.MIN_OFFSET)
        if start is None or start > end:
            start = end
        before = self._revival.before if self._limits.exactly_once else MovedBefore()
        self._shares.handed_out = read_points(
            self._places.log,
            max(start, floor),
            end,
            self._points,
            self._context.heartbeat,
            before,
            self._places.floor,
            now_ms(),
        )
        self._queues.load(self._line)
        self._mover.wait_until_dispatched(end)
        if not self._context.stopping:
            self._shares.commit_handed_out()
        if len(before):
            self._handler.look_at_the_log(list(self._points.by_key.values()))
        self._store()
        self._committed_log = start
        self._is_dirty = True
        if self._progress.log is None:
            self._context.room.wait(_PROGRESS, partial(self._progress.store, start))
        if self._points.open:
            self._context.log.info("messages are in flight", count=self._points.open, bytes=end - start)

    def lost(self) -> None:
        """The writer was lost: the clients ask again."""
        self._handler.turn.lose(self._answers)
        self._ordered.lose()
        self._context.log.warning("the writer was lost, looking into the log for what was stored")

    def cope(self, error: Exception) -> bool | None:
        """Without a coordinator the process waits."""
        if not isinstance(error, ProtocolError):
            return None
        self._context.log.warning("the coordinator is away", why=str(error))
        self._context.wait(_AWAY_MS)
        return False

    # ------------------------------------------------------------ one turn

    def turn(self) -> None:
        """Wait for events, and handle them. Raises WriterLost."""
        readable = self._context.wait(self._timeout_ms())
        self._expired.release()
        if jump_ms := CLOCK.take_up():
            self._points.shift(jump_ms)
            self._orders.shift(jump_ms)
            self._context.log.warning("the wall clock was set: invisible times stay as long as they are", by_ms=jump_ms)
        if self._places.changes in readable:
            self._places.hear_topics()
        if self._places.topics.is_stale:
            self._places.reload_topics()
        if self._changes in readable:
            self._hear_changes()
        self._handler.log_end = self._control.get(Word.WRITTEN)
        due = self._points.due(now_ms(), _DUE_A_TURN)
        if due:
            self._handler.revive(due)
        if self._router in readable:
            self._socket.serve()
        now = monotonic_ms()
        if now >= self._sweep_at_ms:
            self._sweep_at_ms = now + _SWEEP_MS
            self._orders.look_after(now, self._places.topics)
            if self._places.bound() != self._swept:
                self._swept = self._places.bound()
                self._parked.wake_all()
        if self._resets != (resets := self._control.get(Word.GROUP_RESETS)):
            self._resets = resets
            self._parked.wake_all()
        self._ordered.wake_free()
        self._handler.look_again()
        self._store()
        for pop in self._parked.due(now):
            self._handler.time_up(pop)
        self._look_after_revive_queues()
        self._commit(now)
        self._publish_awaited(now)

    def _store(self) -> None:
        if self._handler.turn.steps or self._handler.turn.records:
            self._is_dirty = True
            self._handler.turn.store(self._records, self._mover, self._answers, self._unflushed)
        self._ordered.store(lambda: self._shares.commit([], self._is_in_flight, only_ordered=True))

    def _is_in_flight(self, share: Share) -> bool:
        if share.ordered:
            return self._orders.is_out(share.group, share.topics)
        return self._points.in_flight_of(share.group) > 0

    def _look_after_revive_queues(self) -> None:
        if not self._queues.has_queues and self._places.topics.get(revive_topic(self._cluster)) is not None:
            with contextlib.suppress(ProtocolError):
                self._queues.load(self._line)
        self._queues.turn(now_ms(), monotonic_ms())
        if len(self._revival.before) and self._queues.is_behind_start and not self._points.open:
            self._revival.before.forget()

    def _timeout_ms(self) -> int:
        if self._parked.has_woken:
            return 0
        timeout = _IDLE_MS
        for due in (self._points.next_due_ms(), self._orders.next_end_ms()):
            if due is not None:
                timeout = min(timeout, due - now_ms())
        if (deadline := self._parked.next_deadline_ms()) is not None:
            timeout = min(timeout, deadline - monotonic_ms())
        if self._is_dirty:
            timeout = min(timeout, self._commit_at_ms - monotonic_ms())
        return max(0, timeout)

    def _guarded(self, client: bytes, header: dict[str, Any], operation: Operation) -> None:
        lost: list[WriterLost] = []
        mark = self._handler.mark()

        def work() -> None:
            try:
                try:
                    operation(client, header)
                except Exception:
                    self._handler.roll_back(mark)
                    raise
            except WriterLost as error:
                lost.append(error)
                raise ProtocolError(
                    "SERVICE_NOT_AVAILABLE", "the writer ended in the meantime", retry_after_ms=200
                ) from error

        self._answers.guarded(client, header["id"], work)
        if lost:
            raise lost[0]

    def _hear_changes(self) -> None:
        for _ in range(_CHANGES_A_TURN):
            try:
                frames = self._changes.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(self._parked):
                for topic, _queue in orjson.loads(frames[-1]):
                    self._parked.wake(topic)

    def _publish_awaited(self, now: int) -> None:
        """A receive that waits ends the long pauses of flush and reput, as a pull does."""
        waits = len(self._parked) > 0
        if waits is self._is_awaited:
            return
        self._is_awaited = waits
        control, slot = self._control, self._context.slot
        control.put_worker(slot, WorkerWord.AWAITED_UNTIL_MS, _NO_END_MS if waits else now + 100)
        if waits:
            for ringer in self._ringers:
                ringer.ring()

    # ------------------------------------------------------------ offsets and progress

    def _commit(self, now: int, *, at_once: bool = False) -> None:
        """Commit offsets and write down the progress, when something was done since."""
        if now < self._commit_at_ms and not at_once:
            return
        commits = self._queues.commits()
        if not self._is_dirty and not commits and not any(True for _ in self._shares):
            return
        self._commit_at_ms = now + self._limits.commit_interval_ms
        if not (self._unflushed.wait() if at_once else self._unflushed.is_nothing()):
            return  # the next time; until then the log says more than the offsets
        log = self._control.get(Word.WRITTEN)
        try:
            if not self._shares.commit(commits, self._is_in_flight):
                return
        except ProtocolError as error:
            self._commit_at_ms = now + _AWAY_MS
            self._context.log.warning("offsets cannot be committed now", why=str(error))
            return
        self._queues.committed(commits)
        self._committed_log = log
        if self._is_dirty and (at_once or now >= self._store_at_ms):
            self._store_at_ms = now + self._limits.persist_interval_ms
            self._write_down()

    def _write_down(self) -> None:
        self._points.forget_old(now_ms())
        first = self._points.log()
        log = self._committed_log if first is None else min(first, self._committed_log)
        self._is_dirty = bool(self._points.by_key)
        if log == self._progress.log:
            return
        try:
            self._context.room.try_to(_PROGRESS, partial(self._progress.store, log))
        except (OSError, StoreError) as error:
            # Nothing is lost: more of the log is read after a death.
            self._context.log.error("the progress of pop cannot be written", error=str(error))
        told = self._revival.came_back, self._points.open
        if told != self._told:
            self._told = told
            self._context.tell(came_back=told[0], in_flight=told[1])

    def close(self, *, lost: bool) -> None:
        """Answer the waiting receives, and commit. Not with ``lost``: whether the last check points are stored is open
        then, and an offset behind one that is not would pass over its messages. The next start reads the log.
        """
        self._router.line.stop_resting()
        for pop in self._parked.all():
            self._parked.remove(pop)
            self._handler.time_up(pop)
        if not lost:
            self._commit(monotonic_ms(), at_once=True)
        self._orders.close(lost=lost)
        self._control.put_worker(self._context.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        for ringer in self._ringers:
            ringer.close()
        self._line.close()
        self._mover.close()
        self._context.unregister(self._changes)
        self._changes.close()
        self._places.close()


def run(context: WorkerContext) -> None:
    """The loop: requests, what is due, offsets."""
    pop = PopProcess(context)
    context.ready(endpoints=pop.endpoints)
    pop.serve()
