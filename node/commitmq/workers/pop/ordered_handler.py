"""The operations ``pop``, ``ack``, ``nack``, ``extend`` and ``blocked`` of ordered receives (remoting 5.2, 5.5, 5.7).

Invariants
    * A queue hands out nothing while a message that it handed out is neither acknowledged nor visible again.
    * What an answer tells is stored before: the group's offset, then the state of the queue
      (:mod:`commitmq.workers.pop.orders`). A death in between leaves a state that is behind the offset: its messages below are
      acked. (The other way round the offset would look like one that a person has set back.)
    * A request without an answer may be repeated: a pop by its ``attempt``.
    * The group's offset is that of its first message that is not acknowledged. So it comes again in its place, whatever dies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commitmq import failpoints
from commitmq.errors import CommitMQError, ProtocolError, StoreError
from commitmq.protocol import wire
from commitmq.semantics.pop import NORMAL, ORDERED_REVIVE_QUEUE
from commitmq.semantics.pop_order import OrderState, first_pop
from commitmq.semantics.pop_revive import CheckPoint
from commitmq.workers.pop.finder import OrderedFinder, PopRates, Portion
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.points import PopCounts, now_ms
from commitmq.workers.pop.requests import ParkedPops, Pop, Receipt, asked_of, rest_of
from commitmq.workers.pop.revival import Fate, Return, Revival
from commitmq.workers.pop.shares import QueueKey, Share, Shares
from commitmq.workers.pop.turn import NO_RECORDS, Step, nothing
from commitmq.workers.reader.pulls import Answers
from commitmq.workers.runtime.clocks import fresh_ms

_AGAIN_MS: Final = 200


class OrderedHandler:
    """See the module. The steps of a turn are stored and answered together."""

    def __init__(
        self,
        finder: OrderedFinder,
        orders: Orders,
        shares: Shares,
        parked: ParkedPops,
        revival: Revival,
        answers: Answers,
        broker: str,
    ) -> None:
        self._finder, self._orders, self._shares = finder, orders, shares
        self._parked, self._revival, self._answers, self._broker = parked, revival, answers, broker
        self._steps: list[Step] = []
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

    def serve(self, pop: Pop) -> bool:
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

        self._steps.append(Step(pop.client, pop.request, NO_RECORDS, nothing, handed_out))
        pop.done = True
        return True

    # ------------------------------------------------------------ ack, nack, extend

    def ack(self, client: bytes, header: dict[str, Any], receipts: list[Receipt]) -> None:
        """The messages are done. Raises ProtocolError without a coordinator."""
        late = [index for index, one in enumerate(receipts) if not self._acknowledge(one)]
        self._answer(client, header["id"], late=late)

    def nack(self, client: bytes, header: dict[str, Any], receipts: list[Receipt]) -> None:
        """The messages may be received again at once, in their order; dead letters after the last try, or with ``dead``. With
        ``untried`` nobody tried them: this delivery does not count.

        Raises WriterLost, or ProtocolError without a coordinator.
        """
        late: list[int] = []
        dead: list[tuple[Receipt, Return]] = []
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
                dead.append((one, Return(check_point, one.offset, -1, dead=True)))
            else:
                self._set(
                    key, state.changed(one.offset, one.key.pop_time, self._orders.time_of(key), untried=is_untried)
                )
        fates = self._revival.copy([entry for _, entry in dead])
        for (one, _), fate in zip(dead, fates, strict=True):
            if fate is Fate.DONE:
                self._acknowledge(one)
        if any(fate is not Fate.DONE for fate in fates):
            sentence = "not all messages could become dead letters"
            answer = wire.error(header["id"], "SERVICE_NOT_AVAILABLE", sentence, retry_after_ms=500)
            self._steps.append(Step(client, header["id"], NO_RECORDS, nothing, lambda: (answer, [])))
        else:
            self._answer(client, header["id"], late=late)

    def extend(self, client: bytes, header: dict[str, Any], receipts: list[Receipt], invisible_ms: int) -> None:
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

    def _out(self, one: Receipt) -> tuple[OrderKey, OrderState | None]:
        """The state of the message's queue, when the message is out by this receipt. Raises ProtocolError."""
        key = OrderKey(one.key.topic, one.key.group, one.key.queue_id)
        state = self._finder.state(key)
        return key, state if state is not None and state.is_out(one.offset, one.key.pop_time) else None

    def _acknowledge(self, one: Receipt) -> bool:
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
        self._steps.append(Step(client, request, NO_RECORDS, nothing, lambda: (wire.ok(request, **fields), [])))

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
                header = wire.error(step.request, "SERVICE_NOT_AVAILABLE", sentence, retry_after_ms=_AGAIN_MS)
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
        """The process begins anew with what is stored."""
        for step in self._steps:
            header = wire.error(
                step.request, "SERVICE_NOT_AVAILABLE", "the writer ended meanwhile", retry_after_ms=_AGAIN_MS
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


def _part(portion: Portion, state: OrderState) -> dict[str, Any]:
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
