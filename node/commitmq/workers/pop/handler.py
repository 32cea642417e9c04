"""The operations ``pop``, ``ack``, ``nack`` and ``extend``. What they store is gathered in a turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from commitmq import failpoints
from commitmq.config import PopConfig
from commitmq.errors import CommitMQError, ProtocolError, StoreError
from commitmq.protocol import wire
from commitmq.semantics.pop import NORMAL, ORDERED_REVIVE_QUEUE, OrderState, ReceiptHandle, first_pop, retry_flag
from commitmq.semantics.pop_revive import Ack, CheckPoint, CheckPointKey
from commitmq.semantics.retry import popped_topic
from commitmq.workers.pop.finder import Finder, OrderedFinder, PoppedMessages, PopRates, PopResult, take_back
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.points import (
    NO_RECORDS,
    CheckPoints,
    OpenCheckPoint,
    PopCounts,
    PopStep,
    PopTurn,
    Records,
    nothing,
    now_ms,
)
from commitmq.workers.pop.requests import (
    DeliveryReference,
    ParkedPops,
    PopRequest,
    asked_of,
    invisible_of,
    pop_of,
    receipts_of,
    rest_of,
)
from commitmq.workers.pop.revival import Revival, RevivedMessage, ReviveOutcome
from commitmq.workers.pop.shares import QueueKey, Share, Shares
from commitmq.workers.reader.filters import Filters
from commitmq.workers.reader.pulls import AnswerSocket
from commitmq.workers.runtime.clocks import JUMP_MS, fresh_ms
from commitmq.workers.runtime.context import monotonic_ms

_RETRY_AFTER_MS: Final = 200


class OrderedHandler:
    """The operations ``pop``, ``ack``, ``nack``, ``extend`` and ``blocked`` of ordered receives (remoting 5.2, 5.5,
    5.7).

    Invariants
        * A queue delivers nothing while a message that it delivered is neither acknowledged nor visible again.
        * What an answer tells is stored before: the group's offset, then the state of the queue
          (:mod:`commitmq.workers.pop.orders`). A death in between leaves a state that is behind the offset: its
          messages below are acked. (The other way round the offset would look like one that an operator has set back.)
        * A request without an answer may be repeated: a pop by its ``attempt``.
        * The group's offset is that of its first message that is not acknowledged. So it comes again in its place,
          whatever dies.

    The steps of a turn are stored and answered together.
    """

    def __init__(
        self,
        finder: OrderedFinder,
        orders: Orders,
        shares: Shares,
        parked: ParkedPops,
        revival: Revival,
        answers: AnswerSocket,
        broker: str,
    ) -> None:
        self._finder, self._orders, self._shares = finder, orders, shares
        self._parked, self._revival, self._answers, self._broker = parked, revival, answers, broker
        self._steps: list[PopStep] = []
        self._undo: list[tuple[OrderKey, OrderState | None]] = []
        """The states before, in the order of their changes."""
        self._undo_offsets: list[tuple[int, Share, QueueKey, int]] = []
        """The offsets before, each with the length of ``_undo`` at that time."""
        self._moved: dict[tuple[str, QueueKey], Share] = {}
        """The queues whose offsets are committed before the answers of this turn."""
        self._last_pop_ms = 0
        self.counts: PopCounts | None = None
        self.rates: PopRates | None = None

    # ------------------------------------------------------------ pop

    def serve(self, pop: PopRequest) -> bool:
        """Hand out messages. False when there are none now."""
        taken = self._finder.find(pop)
        pop.is_cut, pop.rest = taken.is_cut, taken.rest
        if not taken.portions:
            return False
        now = now_ms()
        keys = [OrderKey(one.topic, pop.group, one.queue) for one in taken.portions]
        for key in keys:
            self._orders.check_room(key, now)
        before = [self._orders.get(key) for key in keys]
        # By its time an ack tells to which receive of the queue it belongs.
        pop_time = fresh_ms(now, self._last_pop_ms, *(one.pop_time for one in before if one is not None))
        self._last_pop_ms = pop_time
        parts = []
        for portion, key, old in zip(taken.portions, keys, before, strict=True):
            queue = key.topic, key.queue
            start = taken.share.next[queue]
            if old is None:
                state = first_pop(pop_time, pop.invisible_ms, portion.offsets, now, pop.attempt)
            else:
                old = old.acked_below(start)
                state = old.popped(pop_time, pop.invisible_ms, portion.offsets, now, pop.attempt)
                state = state.keeping(old) if old.follows(start) and not pop.repeats_acked else state
            self._set(key, state)
            parts.append(_part(portion, state))
            if taken.share.committed.get(queue, -1) != start:
                self._moved[key.group, queue] = taken.share
        header = wire.ok(
            pop.request,
            parts=parts,
            pop_time=pop_time,
            invisible_ms=pop.invisible_ms,
            revive_queue=ORDERED_REVIVE_QUEUE,
            broker=self._broker,
            max_retries=taken.share.max_retries,
            **rest_of(pop),
        )
        frames = [frame for one in taken.portions for frame in one.frames]

        def handed_out() -> tuple[bytes, list[Any]]:
            if self.counts is not None:
                self.counts.handed_out(pop.group, taken.portions)
            if self.rates is not None and self.rates.flow is not None:
                self.rates.take(self.rates.flow, pop, taken.portions)
            return header, frames

        self._steps.append(PopStep(pop.client, pop.request, NO_RECORDS, nothing, handed_out))
        pop.done = True
        return True

    # ------------------------------------------------------------ ack, nack, extend

    def ack(self, client: bytes, header: dict[str, Any], receipts: list[DeliveryReference]) -> None:
        """The messages are done. Raises ProtocolError without a coordinator."""
        late = [index for index, one in enumerate(receipts) if not self._acknowledge(one)]
        self._answer(client, header["id"], late=late)

    def nack(self, client: bytes, header: dict[str, Any], receipts: list[DeliveryReference]) -> None:
        """The messages may be received again at once, in their order; dead letters after the last try, or with ``dead``. With
        ``untried`` nobody tried them: this delivery does not count.

        Raises WriterLost, or ProtocolError without a coordinator.
        """
        late: list[int] = []
        dead: list[tuple[DeliveryReference, RevivedMessage]] = []
        is_dead, is_untried = header.get("dead") is True, header.get("untried") is True
        for index, one in enumerate(receipts):
            key, state = self._out(one)
            if state is None:
                late.append(index)
                continue
            share = self._shares.of(key.group, [key.topic], ordered=True)
            was_last = not is_untried and (state.counts or {}).get(one.offset, 0) >= share.max_retries
            if is_dead or was_last:
                check_point = CheckPoint(one.key._replace(start_offset=one.offset), 1, (0,))
                dead.append((one, RevivedMessage(check_point, one.offset, -1, dead=True)))
            else:
                self._set(
                    key, state.changed(one.offset, one.key.pop_time, self._orders.time_of(key), untried=is_untried)
                )
        outcomes = self._revival.copy([entry for _, entry in dead])
        for (one, _), outcome in zip(dead, outcomes, strict=True):
            if outcome is ReviveOutcome.DONE:
                self._acknowledge(one)
        if any(outcome is not ReviveOutcome.DONE for outcome in outcomes):
            sentence = "not all messages could become dead letters"
            answer = wire.error(header["id"], "SERVICE_NOT_AVAILABLE", sentence, retry_after_ms=500)
            self._steps.append(PopStep(client, header["id"], NO_RECORDS, nothing, lambda: (answer, [])))
        else:
            self._answer(client, header["id"], late=late)

    def extend(
        self, client: bytes, header: dict[str, Any], receipts: list[DeliveryReference], invisible_ms: int
    ) -> None:
        """The messages stay invisible for another while, from now on. The pop's time stays, by which an ack is known."""
        handles: list[str | None] = []
        for one in receipts:
            key, state = self._out(one)
            if state is None:
                handles.append(None)
                continue
            visible_ms = self._orders.time_of(key) + invisible_ms
            self._set(key, state.changed(one.offset, one.key.pop_time, visible_ms))
            handles.append(one.extended(one.key.pop_time, visible_ms - one.key.pop_time))
        self._answer(client, header["id"], handles=handles)

    def blocked(self, client: bytes, header: dict[str, Any]) -> None:
        """Answer which queues hand out nothing to an attempt now, because their messages are out. Changes nothing."""
        asked, found = asked_of(header), []
        for queue, offset in asked.queues:
            key = OrderKey(asked.topic, asked.group, queue)
            state, now = self._orders.get(key), self._orders.time_of(key)
            if state is not None and state.acked_below(offset).is_blocked(now, asked.attempt):
                found.append(queue)
        self._answers.send(client, wire.ok(header["id"], blocked=found))

    def _out(self, one: DeliveryReference) -> tuple[OrderKey, OrderState | None]:
        """The state of the message's queue, when the message is out by this receipt. Raises ProtocolError."""
        key = OrderKey(one.key.topic, one.key.group, one.key.queue_id)
        state = self._finder.state(key)
        return key, state if state is not None and state.is_out(one.offset, one.key.pop_time) else None

    def _acknowledge(self, one: DeliveryReference) -> bool:
        """False for a message that is not out."""
        key, state = self._out(one)
        if state is None:
            return False
        share = self._shares.of(key.group, [key.topic], ordered=True)
        queue = (key.topic, key.queue)
        acked, offset = state.acked_below(share.next[queue]).acked(one.offset, one.key.pop_time)
        assert isinstance(offset, int)  # (it is out)
        self._set(key, acked)
        if offset > share.next[queue]:
            self._undo_offsets.append((len(self._undo), share, queue, share.next[queue]))
            share.next[queue] = offset
        self._moved[key.group, queue] = share
        return True

    def _set(self, key: OrderKey, state: OrderState) -> None:
        self._undo.append((key, self._orders.get(key)))
        self._orders.put(key, state)

    def _answer(self, client: bytes, request: int, **fields: Any) -> None:
        self._steps.append(PopStep(client, request, NO_RECORDS, nothing, lambda: (wire.ok(request, **fields), [])))

    # ------------------------------------------------------------ the end of a request, and of a turn

    def mark(self) -> tuple[int, int]:
        """How much the turn has before a request; :meth:`roll_back` takes away what came since."""
        return len(self._steps), len(self._undo)

    def roll_back(self, mark: tuple[int, int]) -> None:
        """A request has failed half way."""
        steps, undo = mark
        del self._steps[steps:]
        while self._undo_offsets and self._undo_offsets[-1][0] > undo:
            _, share, queue, offset = self._undo_offsets.pop()
            share.next[queue] = offset
        self._take_back(undo)

    def _take_back(self, undo: int) -> None:
        while len(self._undo) > undo:
            self._orders.put(*self._undo.pop())

    def store(self, commit: Callable[[], object]) -> None:
        """Commit the offsets that have moved by ``commit``, store the states, and answer."""
        if not self._steps and not self._undo:
            return
        if failpoints.ACTIVE:
            failpoints.hit("pop.before_order")
        refused = self._committed(commit) if self._moved else None
        if failpoints.ACTIVE:
            failpoints.hit("pop.after_order_commit")
        if refused is not None:
            self.roll_back((len(self._steps), 0))
        try:
            self._orders.store()
        except StoreError as error:
            refused = error
            self._take_back(0)  # (the offsets are committed)
        if failpoints.ACTIVE:
            failpoints.hit("pop.after_order")
        for step in self._steps:
            header, frames = step.answer()
            if refused is not None:
                sentence = f"it could not be stored: {refused}"
                header = wire.error(step.request, "SERVICE_NOT_AVAILABLE", sentence, retry_after_ms=_RETRY_AFTER_MS)
                frames = []
            self._answers.send(step.client, header, frames)
        self._clear()
        self.wake_free()

    def _committed(self, commit: Callable[[], object]) -> CommitMQError | None:
        """Commit the offsets that have moved: why that failed, or None."""
        try:
            commit()
        except ProtocolError as error:
            return error
        for (_, queue), share in self._moved.items():
            # (A queue that is not there was reset, or its topic deleted: nobody needs the offset.)
            if queue in share.next and share.next[queue] != share.committed.get(queue, -1):
                return ProtocolError("SERVICE_NOT_AVAILABLE", "an offset could not be committed")
        return None

    def lose(self) -> None:
        """The process starts over with what is stored."""
        for step in self._steps:
            header = wire.error(
                step.request,
                "SERVICE_NOT_AVAILABLE",
                "the writer ended in the meantime",
                retry_after_ms=_RETRY_AFTER_MS,
            )
            self._answers.send(step.client, header)
        self._clear()

    def _clear(self) -> None:
        self._steps.clear()
        self._undo.clear()
        self._undo_offsets.clear()
        self._moved.clear()

    def wake_free(self) -> None:
        """Wake the receives that wait for a queue whose block has ended."""
        now = now_ms()
        for key in self._orders.ended(now):
            self._parked.wake_group(key.topic, key.group)


def _part(portion: PoppedMessages, state: OrderState) -> dict[str, Any]:
    return {
        "topic": portion.popped,
        "stored": portion.topic,
        "queue": portion.queue,
        "flag": NORMAL,
        "start_offset": portion.start,
        "next_offset": portion.next_offset,
        "count": len(portion.offsets),
        "frames": len(portion.frames),
        "counts": state.repeated(),
    }


_MOST_TRIES: Final = 64
_LOOK_MS: Final = 20
_AGAIN_MS: Final = 1_000
_PUT_OFF_MS: Final = 10_000
_KEY: Final = attrgetter("key")

Acked = dict[CheckPointKey, tuple[ReceiptHandle, list[int]]]
"""By check point: a handle of it, and the offsets of its messages."""


class Handler:
    """The operations of receives that are not ordered."""

    def __init__(
        self,
        limits: PopConfig,
        revive_queues: int,
        finder: Finder,
        points: CheckPoints,
        parked: ParkedPops,
        records: Records,
        revival: Revival,
        answers: AnswerSocket,
        filters: Filters,
        ordered: OrderedHandler,
        rates: PopRates | None = None,
    ) -> None:
        self._limits, self._revive_queues = limits, revive_queues
        self._finder, self._points, self._parked = finder, points, parked
        self._records, self._revival, self._answers, self._filters = records, revival, answers, filters
        self._next_revive_queue = 0
        self._last_pop_ms = 0
        self._ordered, self._rates = ordered, rates
        ordered.counts, ordered.rates = points.counts, rates
        self.turn = PopTurn()
        self.log_end = 0
        """The end of the log at the beginning of the turn."""

    def mark(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """How much the turn has before a request; :meth:`roll_back` takes away what came since."""
        return self.turn.mark(), self._ordered.mark()

    def roll_back(self, mark: tuple[tuple[int, int, int], tuple[int, int]]) -> None:
        """A request has failed half way: it stores nothing, and the others of the turn do not notice."""
        self.turn.roll_back(mark[0])
        self._ordered.roll_back(mark[1])

    # ------------------------------------------------------------ pop

    def pop(self, client: bytes, header: dict[str, Any]) -> None:
        """Hand out messages, or park the request."""
        pop = pop_of(client, header, self._limits, self._filters)
        if self._rates is not None and self._rates.is_on:
            self._rates.admit(pop, header, self._answers)
            self._finder.shares.on_behalf_of = self._rates.on_behalf_of(pop)
        self._finder.check(pop)
        if not pop.topics:
            self.time_up(pop)
        elif not self._serve(pop) and pop.wait_ms:
            if not self._parked.has_room(client):
                raise ProtocolError("SYSTEM_BUSY", "too many receives wait for messages already", retry_after_ms=1_000)
            self._parked.add(pop, monotonic_ms())
            if pop.is_cut:
                self._parked.wake_group(pop.topics[0], pop.group)
        elif not pop.done and not pop.wait_ms:
            self.time_up(pop)

    def look_again(self) -> None:
        """Serve parked pops whose topics have grown, for _LOOK_MS at most: others have requests too."""
        until_ms = monotonic_ms() + _LOOK_MS
        while self._parked.has_woken and len(self.turn.steps) < 256 and monotonic_ms() < until_ms:
            tries = 0
            woken = self._parked.next_woken()
            for number, pop in enumerate(woken):
                if number and monotonic_ms() >= until_ms:
                    self._parked.look_later(woken[number:])
                    break
                mark = self.mark()
                try:
                    if not self._serve(pop):
                        tries += 1
                        if pop.is_cut:
                            self._parked.look_later(woken[number:])
                            break
                        is_special = pop.wanted is not None or pop.queue >= 0 or self._points.is_full(pop.client)
                        if tries < _MOST_TRIES and is_special:
                            continue  # another one of the group may get what this one may not
                        break
                except (CommitMQError, OSError) as error:
                    self.roll_back(mark)
                    code = error.code if isinstance(error, ProtocolError) else "SYSTEM_ERROR"
                    self._answers.send(pop.client, wire.error(pop.request, code, str(error)))
                    pop.done = True
                self._parked.remove(pop)

    def time_up(self, pop: PopRequest) -> None:
        pop.done = True
        self._answers.send(pop.client, wire.ok(pop.request, parts=[], **rest_of(pop)))

    def _serve(self, pop: PopRequest) -> bool:
        if self._answers.unsent.is_over(pop.client):
            raise ProtocolError("SYSTEM_BUSY", "the client does not read its answers", retry_after_ms=500)
        if pop.ordered:
            return self._ordered.serve(pop)
        found = self._finder.find(pop)
        pop.is_cut, pop.rest = found.is_cut, found.rest
        if not found.portions:
            return False
        # Check points of one queue and time have different first messages, so their keys differ. The times go back with a
        # clock that was set back: RocketMQ's clients compare them with their own.
        now = now_ms()
        pop_time = self._last_pop_ms = self._last_pop_ms if now < self._last_pop_ms < now + JUMP_MS else now
        revive_queue = self._next_revive_queue = (self._next_revive_queue + 1) % self._revive_queues
        points = [self._point(pop, portion, pop_time, revive_queue) for portion in found.portions]
        first = len(self.turn.records)
        self.turn.records += [self._records.check_point(one.check_point, revive_queue, now) for one in points]
        for point in points:
            self._points.add(point)
        self.turn.steps.append(
            PopStep(
                pop.client,
                pop.request,
                range(first, len(self.turn.records)),
                partial(self._settle_pop, pop, found, points),
                partial(self._popped, pop, found, pop_time, revive_queue),
            )
        )
        pop.done = True
        return True

    def _point(self, pop: PopRequest, portion: PoppedMessages, pop_time: int, revive_queue: int) -> OpenCheckPoint:
        broker = self._records.broker_name
        key = CheckPointKey(portion.topic, pop.group, portion.queue, portion.start, pop_time, broker)
        deltas = tuple(offset - portion.start for offset in portion.offsets)
        # (The log's end is that of the turn's beginning: a topic that was recreated since begins behind it.)
        log = max(self.log_end, portion.floor)
        return OpenCheckPoint(CheckPoint(key, pop.invisible_ms, deltas), revive_queue, pop.client, log)

    def _settle_pop(self, pop: PopRequest, found: PopResult, points: list[OpenCheckPoint], stored: list[bool]) -> bool:
        """Messages whose check points could not be stored are delivered later. (Those of a check point that is stored,
        of a pop that is refused, stay in flight unseen: after their time they come back, and no second time by another
        one.)
        """
        if all(stored):
            self._handed_out(pop, found)
            return True
        take_back(found, sum(stored))
        for point in points[sum(stored) :]:
            self._points.drop(point)
        return False

    def _popped(self, pop: PopRequest, found: PopResult, pop_time: int, revive_queue: int) -> tuple[bytes, list[Any]]:
        parts = [
            {
                "topic": one.popped,
                "stored": one.topic,
                "queue": one.queue,
                "flag": retry_flag(one.topic),
                "start_offset": one.start,
                "next_offset": one.next_offset,
                "count": len(one.offsets),
                "frames": len(one.frames),
            }
            for one in found.portions
        ]
        header = wire.ok(
            pop.request,
            parts=parts,
            pop_time=pop_time,
            invisible_ms=pop.invisible_ms,
            revive_queue=revive_queue,
            broker=self._records.broker_name,
            **rest_of(pop),
        )
        return header, [frame for one in found.portions for frame in one.frames]

    def _handed_out(self, pop: PopRequest, found: PopResult) -> None:
        if self._points.counts is not None:
            self._points.counts.handed_out(pop.group, found.portions)
        if self._rates is not None and self._rates.flow is not None:
            self._rates.take(self._rates.flow, pop, found.portions)

    # ------------------------------------------------------------ ack, nack, extend

    def ack(self, client: bytes, header: dict[str, Any]) -> None:
        receipts = self._receipts(header)
        if receipts[0].handle.is_ordered:
            self._ordered.ack(client, header, receipts)
            return
        live: list[DeliveryReference] = []
        late: list[int] = []
        now = now_ms()
        for index, one in enumerate(receipts):
            if self._live(one) is None:
                late.append(index)
                if one.key in self._points.by_key or one.handle.expires_ms <= now:
                    continue  # acked before, or it came back already
                # Of a check point that RocketMQ made: its time is not over, so its ack counts.
            self.turn.claimed[one.key, one.offset] = None
            live.append(one)
        acked = _by_check_point(live)
        records = self._acknowledge(acked)
        self._answer(client, header["id"], records, partial(self._settle, acked), late=late)

    def nack(self, client: bytes, header: dict[str, Any]) -> None:
        """The messages come back at once, or with ``dead`` are dead letters. Raises WriterLost."""
        receipts = self._receipts(header)
        if receipts[0].handle.is_ordered:
            self._ordered.nack(client, header, receipts)
            return
        late: list[int] = []
        returns: list[RevivedMessage] = []
        dead = header.get("dead") is True
        for index, one in enumerate(receipts):
            point = self._live(one)
            if point is None:
                late.append(index)
                continue
            self.turn.claimed[one.key, one.offset] = None
            returns.append(RevivedMessage(point.check_point, one.offset, point.log, dead))
        outcomes = self._revival.copy(returns)
        by_key: dict[CheckPointKey, list[int]] = {}
        for entry, outcome in zip(returns, outcomes, strict=True):
            if outcome is ReviveOutcome.DONE:
                by_key.setdefault(entry.check_point.key, []).append(entry.offset)
        for key, offsets in by_key.items():
            self._came_back(self._points.by_key[key], sorted(offsets))
        if ReviveOutcome.PUT_OFF in outcomes:
            sentence = "the group or its topics do not allow it now, so not all messages could be returned"
            self._refuse(client, header["id"], "NO_PERMISSION", sentence)
        elif ReviveOutcome.AGAIN in outcomes:
            sentence = "not all messages could be returned"
            self._refuse(client, header["id"], "SERVICE_NOT_AVAILABLE", sentence, retry_after_ms=500)
        else:
            self._answer(client, header["id"], NO_RECORDS, nothing, late=late)

    def extend(self, client: bytes, header: dict[str, Any]) -> None:
        """The messages stay invisible for another while, from now on: each gets a new receipt handle."""
        invisible_ms = invisible_of(header, self._limits, rounds_up=header.get("rounds_up") is True)
        receipts = self._receipts(header)
        if receipts[0].handle.is_ordered:
            self._ordered.extend(client, header, receipts, invisible_ms)
            return
        handles: list[str | None] = []
        made: list[tuple[DeliveryReference, OpenCheckPoint]] = []
        first = len(self.turn.records)
        for one in receipts:
            old = self._live(one)
            if old is None:
                handles.append(None)
                continue
            self.turn.claimed[one.key, one.offset] = None
            pop_time = fresh_ms(now_ms(), one.key.pop_time)
            key = one.key._replace(start_offset=one.offset, pop_time=pop_time)
            point = OpenCheckPoint(CheckPoint(key, invisible_ms, (0,)), old.revive_queue, client, self.log_end)
            self.turn.records.append(self._records.check_point(point.check_point, point.revive_queue, now_ms()))
            made.append((one, point))
            handles.append(one.extended(pop_time, invisible_ms))
        self._acknowledge(_by_check_point([one for one, _ in made]))

        def settle(stored: list[bool]) -> bool:
            """A check point that is stored takes the place of the one before it, with that one's ack or without."""
            is_stored = stored[: len(made)]
            for (one, point), is_one in zip(made, is_stored, strict=True):
                old = self._points.by_key.get(one.key)
                if is_one and old is not None:
                    self._points.settle(old, one.offset)
                if is_one:
                    self._points.add(point)
            return all(is_stored)

        self._answer(client, header["id"], range(first, len(self.turn.records)), settle, handles=handles)

    def _receipts(self, header: dict[str, Any]) -> list[DeliveryReference]:
        return receipts_of(header, self._limits, self._revive_queues, now_ms(), self._points.by_key)

    def _live(self, one: DeliveryReference) -> OpenCheckPoint | None:
        """The check point of a message in flight that nobody has spoken of in this turn, and whose topic is still there."""
        point = None if (one.key, one.offset) in self.turn.claimed else self._points.has(one.key, one.offset)
        return None if point is None or self._revival.is_deleted(point) else point

    def _answer(
        self, client: bytes, request: int, records: range, settle: Callable[[list[bool]], bool], **fields: Any
    ) -> None:
        self.turn.steps.append(PopStep(client, request, records, settle, lambda: (wire.ok(request, **fields), [])))

    def _refuse(self, client: bytes, request: int, code: str, sentence: str, **fields: Any) -> None:
        """An error as an answer: what the request has stored stays."""
        answer = wire.error(request, code, sentence, **fields)
        self.turn.steps.append(PopStep(client, request, NO_RECORDS, nothing, lambda: (answer, [])))

    def _settle(self, acked: Acked, stored: list[bool]) -> bool:
        """Which of their acks are stored."""
        for (key, (_, offsets)), is_stored in zip(acked.items(), stored, strict=True):
            point = self._points.by_key.get(key)
            if point is not None and is_stored:
                self._points.settle(point, *offsets)
        return all(stored)

    def _acknowledge(self, acked: Acked) -> range:
        """Store an ack for each check point. Returns their numbers in the turn."""
        first = len(self.turn.records)
        for key, (handle, offsets) in acked.items():
            ack = Ack(key, offsets[0]) if len(offsets) == 1 else Ack(key, offsets=tuple(offsets))
            point = self._points.by_key.get(key)
            invisible_ms = handle.invisible_ms if point is None else point.check_point.invisible_ms
            queue = handle.revive_queue if point is None else point.revive_queue
            self.turn.records.append(self._records.ack(ack, invisible_ms, queue, now_ms()))
        return range(first, len(self.turn.records))

    # ------------------------------------------------------------ invisible time over

    def revive(self, points: list[OpenCheckPoint]) -> None:
        """Bring back what is left of ``points``. Those that cannot come back now are tried again. Raises WriterLost."""
        returns = [
            RevivedMessage(one.check_point, offset, one.log) for one in points for offset in one.check_point.left()
        ]
        owners = [one for one in points for _ in one.check_point.left()]
        outcomes = self._revival.copy(returns)
        by_point: dict[OpenCheckPoint, list[int]] = {}
        failed: dict[OpenCheckPoint, int] = {}
        for owner, entry, outcome in zip(owners, returns, outcomes, strict=True):
            if outcome is ReviveOutcome.DONE:
                by_point.setdefault(owner, []).append(entry.offset)
            else:
                failed[owner] = _PUT_OFF_MS if outcome is ReviveOutcome.PUT_OFF else failed.get(owner, _AGAIN_MS)
        for owner, pause_ms in failed.items():  # each once: twice due, its messages would come back twice
            self._points.again(owner, now_ms() + pause_ms)
        for point, offsets in by_point.items():
            self._came_back(point, offsets)

    def _came_back(self, point: OpenCheckPoint, offsets: list[int]) -> None:
        """Their copies are stored: an ack keeps RocketMQ, and a revive round, from making others."""
        key, invisible_ms = point.check_point.key, point.check_point.invisible_ms
        ack = Ack(key, offsets[0]) if len(offsets) == 1 else Ack(key, offsets=tuple(offsets))
        self.turn.records.append(self._records.ack(ack, invisible_ms, point.revive_queue, now_ms()))
        self._points.settle(point, *offsets)
        self._parked.wake_retries(popped_topic(key.topic, key.group), key.group)

    def look_at_the_log(self, points: list[OpenCheckPoint]) -> None:
        """After a death: settle what had come back before it."""
        for point in points:
            left = point.check_point.left()
            there = self._revival.passed_over([RevivedMessage(point.check_point, offset, point.log) for offset in left])
            offsets = [offset for offset, is_there in zip(left, there, strict=True) if is_there]
            if offsets:
                self._came_back(point, offsets)


def _by_check_point(receipts: list[DeliveryReference]) -> Acked:
    """A handle and the offsets, which rise, for each check point of ``receipts``."""
    acked: Acked = {}
    for key, many in groupby(receipts, _KEY):  # (those of a check point mostly stand side by side)
        of_key = list(many)
        _, offsets = acked.setdefault(key, (of_key[0].handle, []))
        offsets += [one.offset for one in of_key]
    for _, offsets in acked.values():
        offsets.sort()
    return acked
